//! The figures of a wake in progress.

use crate::pool::tools::report::WakePhases;

#[derive(Debug, Default)]
pub(super) struct Woken {
    pub(super) mapped_bytes: u64,
    /// In place already.
    pub(super) returned_bytes: u64,
    pub(super) copied_bytes: u64,
    pub(super) read_bytes: u64,
    pub(super) disk_read_bytes: u64,
    pub(super) linked_bytes: u64,
    pub(super) peer_bytes: u64,
    pub(super) zeroed_bytes: u64,
    pub(super) phases: WakePhases,
}
