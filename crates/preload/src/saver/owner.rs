//! Which process has the memory. It is one atomic word, so a forked child that asks waits for no lock.

use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::code::{Failure, Result};

/// The process in the upper half. Below it whether there is memory, and how many calls may create the first of it.
/// 0 without any of them.
#[derive(Debug)]
pub(super) struct Owner(AtomicU64);

const HAS_MEMORY: u64 = 1 << 31;
const CLAIM: u64 = 1;

/// A call that may create memory of this process.
#[derive(Debug)]
pub(crate) struct Claim<'a>(&'a Owner);

impl Owner {
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether this process has memory, or is about to.
    pub(super) fn is_this_process(&self) -> Result<bool> {
        match process_of(self.0.load(Ordering::Relaxed)) {
            0 => Ok(false),
            owner if owner == process::id() => Ok(true),
            owner => Err(Failure::Forked { owner }),
        }
    }

    /// A child that is forked from here on gets errors.
    pub(super) fn claim(&self) -> Result<Claim<'_>> {
        let this = process::id();
        let claimed = |word: u64| match process_of(word) {
            0 => Some((u64::from(this) << 32) | CLAIM),
            owner => (owner == this).then_some(word + CLAIM),
        };
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claimed) {
            Ok(_) => Ok(Claim(self)),
            Err(word) => Err(Failure::Forked { owner: process_of(word) }),
        }
    }
}

impl Claim<'_> {
    /// There is memory from now on.
    pub(super) fn keep(&self) {
        self.0.0.fetch_or(HAS_MEMORY, Ordering::Relaxed);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let released = |word: u64| {
            let word = word - CLAIM;
            Some(if word & u64::from(u32::MAX) == 0 { 0 } else { word })
        };
        // It changes every word, so it never fails.
        let _ = self.0.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, released);
    }
}

fn process_of(word: u64) -> u32 {
    u32::try_from(word >> 32).unwrap_or(u32::MAX)
}
