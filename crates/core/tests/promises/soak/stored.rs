//! Steps on backups: reading, viewing, spilling and dropping them.

use poorwill_core::{DeviceRange, DriverErrorKind, PoolError, TagState, chain};

use super::worker::Worker;

impl Worker {
    pub(super) fn read_backup(&mut self, n: usize) {
        let (at, range) = self.part_of(n);
        let mut read = vec![0xA5; usize::try_from(range.bytes).unwrap()];
        match self.world.pool.read_backup(range.addr, &mut read) {
            Ok(()) => {
                self.world.saw("a backup that was read");
                self.expect_backup(n, at, &read);
            }
            Err(PoolError::Backup { .. }) => {
                let is_stored = self.state(n) == TagState::AsleepBackedUp;
                let is_resident =
                    self.world.setup.lends && self.tags[self.live[n].tag].0.as_str().starts_with("volatile");
                assert!(
                    !is_stored || is_resident || self.world.setup.spoils(),
                    "a sleeping block has no backup"
                );
            }
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    /// The view is kept: later sleeps and wakes must not change what it shows.
    pub(super) fn view_backup(&mut self, n: usize) {
        let (at, range) = self.part_of(n);
        match self.world.pool.view_backup(range) {
            Ok(view) => {
                self.world.saw("a view");
                view.verify().unwrap();
                self.expect_backup(n, at, &view);
                let shown = view.to_vec();
                self.views.push((view, shown));
            }
            Err(PoolError::Backup { .. }) => {}
            Err(error) => panic!("{}", chain(&error)),
        }
        if self.views.len() > 2 {
            self.drop_views();
        }
    }

    pub(super) fn drop_views(&mut self) {
        for (view, shown) in &self.views {
            assert!(view[..] == shown[..], "a view has changed");
        }
        self.views.clear();
    }

    fn part_of(&mut self, n: usize) -> (usize, DeviceRange) {
        let (len, addr) = (self.live[n].bytes.len(), self.live[n].block.range.addr);
        let at = self.random.usize(..len);
        (at, DeviceRange::new(addr + at as u64, self.random.usize(1..=len - at) as u64))
    }

    /// Of a tag that sleeps, its bytes; of another, what each byte was at some time: a preparation copies while a write
    /// may be half done.
    fn expect_backup(&self, n: usize, at: usize, read: &[u8]) {
        if self.state(n) == TagState::AsleepBackedUp {
            return self.expect_bytes(n, at, read);
        }
        let known = &self.live[n];
        let was = |at: usize, byte: u8| {
            known.bytes[at] == byte || known.before.iter().any(|bytes| bytes[at] == byte)
        };
        assert!((at..).zip(read).all(|(at, byte)| was(at, *byte)), "bytes of another block");
    }

    pub(super) fn spill(&mut self) {
        if !self.world.setup.has_disk() {
            return;
        }
        let tags = self.some_tags();
        match self.world.pool.spill(Some(&tags)) {
            Ok(bytes) if bytes > 0 => self.world.saw("a spill"),
            Ok(_) => {}
            Err(PoolError::Driver { source, .. })
                if matches!(source.kind, DriverErrorKind::OutOfDisk { .. })
                    && self.world.setup.is_short() => {}
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    /// Others need memory, or the broker ends, and another begins.
    pub(super) fn take_lent(&mut self) {
        let bytes = self.random.u64(..20) * self.world.granule;
        let taken_bytes = match self.random.u8(..8) {
            0 => {
                self.world.broker.fail(true);
                self.sleep();
                self.world.broker.fail(false);
                self.world.broker.have_given_up(u64::MAX)
            }
            1..4 => self.world.broker.have_given_up(bytes),
            _ => self.world.broker.give_up(bytes),
        };
        if taken_bytes > 0 {
            self.world.saw("memory that was taken");
        }
    }

    pub(super) fn drop_backups(&mut self) {
        let tags = self.some_tags();
        match self.world.pool.drop_backups(Some(&tags)) {
            Ok(_) => {}
            Err(PoolError::Asleep { .. }) => {
                let sleeps = |tag| self.model.state(tag).is_asleep();
                assert!(tags.iter().any(sleeps), "none of {tags:?} sleeps");
            }
            Err(error) => self.expect_failed_copy(&error),
        }
    }
}
