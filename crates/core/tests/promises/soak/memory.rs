//! Steps that allocate, write and free.

use std::time::Duration;

use poorwill_core::{AllocRequest, DeviceRange, PoolError, Tag, TagState, chain};

use super::worker::{Known, Worker};

impl Worker {
    pub(super) fn alloc(&mut self) {
        let tag = self.random.usize(..self.tags.len());
        let request = self.request(tag);
        self.alloc_by(tag, &request);
    }

    /// While `staged` tags may not be touched: a call that waits for them would wait for ever.
    pub(super) fn work_beside(&mut self, staged: &[Tag]) {
        for _ in 0..self.random.u8(..3) {
            let tag = self.random.usize(..self.tags.len());
            if staged.contains(&self.tags[tag].0) {
                continue;
            }
            match self.live.iter().position(|known| known.tag == tag) {
                Some(n) if self.one_in(2) => self.free(n),
                _ => {
                    let request = self.request(tag).within(Duration::ZERO);
                    self.alloc_by(tag, &request);
                }
            }
        }
    }

    fn request(&mut self, tag: usize) -> AllocRequest {
        let granule = self.world.granule;
        let bytes = (granule << self.random.u8(..5)) / 16 * self.random.u64(1..12) + self.random.u64(1..600);
        let align = 512 << self.random.u8(..4);
        let request = AllocRequest::new(bytes, self.tags[tag].0.clone()).aligned_to(align);
        if self.one_in(3) { request.freed_in_parts() } else { request }
    }

    fn alloc_by(&mut self, tag: usize, request: &AllocRequest) {
        let waits = request.wait_max.is_none();
        match self.world.pool.alloc(request) {
            Ok(block) => {
                self.next += 1;
                assert!(self.model.alloc(self.next, &request.tag, request.bytes), "{} sleeps", request.tag);
                assert!(block.range.addr.is_multiple_of(request.align) && block.range.bytes >= request.bytes);
                let apart = |other: &Known| !other.block.range.overlaps(&block.range);
                assert!(self.live.iter().all(apart), "{block:?} overlaps another block");
                let bytes = self.content(usize::try_from(request.bytes).unwrap());
                let before = Vec::new();
                self.live.push(Known { id: self.next, block, tag, bytes: bytes.clone(), before });
                self.write_at(self.live.len() - 1, 0, bytes).unwrap();
            }
            Err(PoolError::Asleep { .. }) => assert!(self.model.state(&request.tag).is_asleep()),
            Err(PoolError::OverLimit { .. } | PoolError::DeviceFull { .. }) if waits => {
                self.world.saw("a refused allocation");
                (0..3).for_each(|_| self.pick().into_iter().for_each(|n| self.free(n)));
            }
            Err(PoolError::OverLimit { .. } | PoolError::DeviceFull { .. } | PoolError::TimedOut { .. })
                if !waits => {}
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    pub(super) fn free(&mut self, n: usize) {
        let known = self.live.swap_remove(n);
        self.world.pool.free(known.block.id).unwrap();
        assert!(matches!(self.world.pool.free(known.block.id), Err(PoolError::StaleBlock { .. })));
        self.model.free(known.id);
    }

    pub(super) fn free_part(&mut self, n: usize) {
        let whole = self.live[n].block;
        let units = whole.range.bytes / 512;
        let [one, other] = [0; 2].map(|_| self.random.u64(..=units) * 512);
        let (from, to) = (one.min(other), one.max(other));
        let part = DeviceRange::new(whole.range.addr + from, to - from);
        let rest = match self.world.pool.free_part(whole.id, part) {
            Ok(rest) => rest,
            Err(PoolError::InvalidPart { .. }) => return assert_eq!(from, to),
            Err(error) => panic!("{}", chain(&error)),
        };
        self.world.saw("a part that was freed");
        let known = self.live.swap_remove(n);
        let (mut named, mut left) = (Vec::new(), Vec::new());
        for block in rest {
            self.next += 1;
            let offset = block.range.addr - whole.range.addr;
            named.push((self.next, offset, block.requested_bytes));
            let [start, len] = [offset, block.requested_bytes].map(|bytes| usize::try_from(bytes).unwrap());
            let cut = |bytes: &Vec<u8>| bytes[start..start + len].to_vec();
            let before = known.before.iter().map(cut).collect();
            left.push(Known { id: self.next, block, tag: known.tag, bytes: cut(&known.bytes), before });
        }
        self.model.free_part(known.id, &named);
        self.live.append(&mut left);
    }

    pub(super) fn write(&mut self, n: usize) {
        let len = self.live[n].bytes.len();
        let at = self.random.usize(..len);
        let bytes = self.random.usize(1..=len - at);
        let bytes = self.content(bytes);
        match self.write_at(n, at, bytes.clone()) {
            Ok(()) => {
                assert!(!self.state(n).is_asleep());
                let mut whole = self.live[n].bytes.clone();
                whole[at..at + bytes.len()].copy_from_slice(&bytes);
                self.live[n].set(whole);
            }
            Err(PoolError::Asleep { .. }) => assert!(self.state(n).is_asleep()),
            Err(error) => panic!("{}", chain(&error)),
        }
    }

    pub(super) fn trim(&mut self) {
        self.world.pool.trim().unwrap();
    }

    /// Writes what was dropped again, and says so.
    pub(super) fn restore(&mut self) {
        for (tag, _) in self.tags.clone() {
            if self.model.state(&tag) != TagState::Undefined {
                continue;
            }
            for n in 0..self.live.len() {
                if self.tags[self.live[n].tag].0 == tag {
                    self.write_at(n, 0, self.live[n].bytes.clone()).unwrap();
                }
            }
            self.world.pool.mark_restored(std::slice::from_ref(&tag)).unwrap();
            assert!(self.model.mark_restored(&tag).is_some());
        }
    }
}
