//! Physical memory of a pool: what it holds, and what the driver still owes.
//!
//! Promise: `held_bytes` equals creates minus successful releases as the driver counted them, at any time.
//! A release that fails is remembered and tried again by [`Ledger::settle`].

use std::sync::Arc;

use crate::driver::{BackingId, Driver, DriverError};

#[derive(Debug)]
pub(super) struct Ledger {
    driver: Arc<dyn Driver>,
    held_bytes: u64,
    peak_bytes: u64,
    created_bytes: u64,
    owed: Vec<(BackingId, u64)>,
}

impl Ledger {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, held_bytes: 0, peak_bytes: 0, created_bytes: 0, owed: Vec::new() }
    }

    /// Bytes created and not released, those owed included.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Most bytes held at any time.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// All bytes ever created.
    pub(super) fn created_bytes(&self) -> u64 {
        self.created_bytes
    }

    /// Bytes whose release failed so far.
    pub(super) fn owed_bytes(&self) -> u64 {
        self.owed.iter().map(|(_, bytes)| bytes).sum()
    }

    pub(super) fn create(&mut self, bytes: u64) -> Result<BackingId, DriverError> {
        let backing = self.driver.create(bytes)?;
        self.held_bytes += bytes;
        self.created_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.held_bytes);
        Ok(backing)
    }

    /// Gives `backing` up. After an error the ledger owns it, and the caller may forget it.
    pub(super) fn release(&mut self, backing: BackingId, bytes: u64) -> Result<(), DriverError> {
        match self.driver.release(backing) {
            Ok(()) => {
                self.held_bytes -= bytes;
                Ok(())
            }
            Err(error) => {
                self.owed.push((backing, bytes));
                Err(error)
            }
        }
    }

    /// Tries the releases that failed again. Returns the bytes given back, and the first refusal.
    pub(super) fn settle(&mut self) -> (u64, Option<DriverError>) {
        let mut released_bytes = 0;
        let mut refused = None;
        for (backing, bytes) in std::mem::take(&mut self.owed) {
            match self.release(backing, bytes) {
                Ok(()) => released_bytes += bytes,
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        (released_bytes, refused)
    }
}
