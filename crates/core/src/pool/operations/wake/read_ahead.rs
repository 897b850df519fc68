//! Reading backups from disk ahead of a wake's copies.
//!
//! Extents, or parts of raw ones, are fetched into host memory in the order in which they are copied, a window at a time.
//! So the disk has requests throughout, and little host memory is needed. Where host memory lacks even that, the window
//! shrinks down to one read. For that one others are moved to disk, or another wake's window is awaited.
//!
//! Promise: when it is dropped, no read is in flight.

use std::collections::VecDeque;

use super::filling::{Filling, With};
use super::windows::Windows;
use crate::backup::BackupBuffer;
use crate::driver::{DriverError, Op, Pending};
use crate::pool::means::host_reclaim::is_lacking;
use crate::pool::shared::Shared;

/// Host memory of what is read and not yet on the device.
const WINDOW_BYTES: u64 = 512 << 20;

pub(super) struct ReadAhead<'a> {
    shared: &'a Shared,
    windows: &'static Windows,
    fillings: &'a [Filling],
    /// The first filling that was not looked at.
    next: usize,
    /// By number of the filling, in order.
    reads: VecDeque<(usize, Pending<BackupBuffer>)>,
    /// In reads, and in copies from what was read.
    window_bytes: u64,
    read_bytes: u64,
}

impl<'a> ReadAhead<'a> {
    pub(super) fn new(shared: &'a Shared, fillings: &'a [Filling]) -> Self {
        let windows = Windows::here();
        Self { shared, windows, fillings, next: 0, reads: VecDeque::new(), window_bytes: 0, read_bytes: 0 }
    }

    /// Read from disk so far.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// Whether copies have to end before more is read.
    pub(super) fn is_full(&self) -> bool {
        self.window_bytes >= WINDOW_BYTES
    }

    /// A copy from bytes of `fetched` bytes has ended.
    pub(super) fn copied(&mut self, fetched_bytes: u64) {
        self.window_bytes -= fetched_bytes;
        self.windows.release(fetched_bytes);
    }

    /// Reads as far as the window and host memory allow. Returns whether filling `nth` is read, or need not be.
    pub(super) fn reaches(&mut self, nth: usize) -> Result<bool, DriverError> {
        while !self.is_full()
            && let Some(filling) = self.fillings.get(self.next)
        {
            match self.fetch(filling) {
                Some(Err(error)) if is_lacking(&error) => break,
                fetched => self.note(filling, fetched.transpose()?),
            }
        }
        Ok(self.next > nth)
    }

    /// The backup of filling `nth` in host memory, once it is there. `None` where it need not be fetched.
    pub(super) fn take(&mut self, nth: usize) -> Result<Option<BackupBuffer>, DriverError> {
        match self.reads.pop_front_if(|read| read.0 == nth) {
            Some((_, read)) => read.wait().map(Some),
            None => Ok(None),
        }
    }

    /// With host memory that others give.
    pub(super) fn fetch_next_by_force(&mut self) -> Result<(), DriverError> {
        let Some(filling) = self.fillings.get(self.next) else {
            return Err(DriverError::invalid(Op::DiskRead, "a wake asked for more than its plan"));
        };
        if matches!(filling.with, With::Zeros) {
            self.note(filling, None);
            return Ok(());
        }
        loop {
            let releases = self.windows.releases();
            let again = || self.fetch(filling).transpose();
            match self.shared.with_host_memory(&[], filling.fetch_bytes(), again) {
                Err(error) if is_lacking(&error) && self.windows.await_release(releases) => {}
                fetched => {
                    self.note(filling, fetched?);
                    return Ok(());
                }
            }
        }
    }

    fn fetch(&self, filling: &Filling) -> Option<Result<Pending<BackupBuffer>, DriverError>> {
        self.windows.hold(filling.fetch_bytes());
        let fetched = filling.fetch(self.shared.shape().granule_bytes);
        if !matches!(fetched, Some(Ok(_))) {
            self.windows.had_none(filling.fetch_bytes());
        }
        fetched
    }

    fn note(&mut self, filling: &Filling, fetched: Option<Pending<BackupBuffer>>) {
        if let Some(read) = fetched {
            self.reads.push_back((self.next, read));
            self.window_bytes += filling.fetch_bytes();
            self.read_bytes += filling.fetch_bytes();
        }
        self.next += 1;
    }
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        self.reads.drain(..).for_each(|(_, read)| _ = read.wait());
        if self.window_bytes > 0 {
            self.windows.release(self.window_bytes);
        }
    }
}
