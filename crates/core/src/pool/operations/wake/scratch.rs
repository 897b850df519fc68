//! Whether the codes of a wake pass through device memory on their way ([`ScratchMemory`]).
//!
//! A copy engine brings codes faster than a decoding kernel reads them over the link. Each stream of saves decodes
//! from a part of its own, so its kernel runs beside the copies of others. The memory must be left over: as much as
//! the wake creates, and three times its own size, is free.
//!
//! Promise: without this memory a wake does the same.
//!
//! [`ScratchMemory`]: crate::pool::parts::scratch::ScratchMemory

use super::filling::Filling;
use super::plan::WakePlan;
use crate::pool::parts::scratch::Loan;
use crate::pool::shared::Shared;
use crate::pool::tools::mapping::Mapping;

/// Encoded fillings for each stream, at most, for which the memory does not pay.
const FILLINGS_MIN: usize = 2;

/// What is free must be so many times the memory, besides what the wake creates.
const MARGIN: u64 = 3;

impl Shared {
    /// How many parts it has: of each, one stream of saves decodes.
    pub(super) fn scratch_parts(&self) -> usize {
        self.streams().saves()
    }

    /// `None` where it does not pay, or is not left over.
    pub(super) fn borrow_scratch(&self, plan: &WakePlan) -> Option<Loan<'_>> {
        if !self.driver().info().fast_codec || self.streams().kernel().is_none() {
            return None;
        }
        let encoded: Vec<u64> = plan.fillings.iter().filter_map(Filling::code_bytes).collect();
        let parts = self.scratch_parts();
        if encoded.len() <= FILLINGS_MIN * parts {
            return None;
        }
        let part_bytes = encoded.into_iter().max()?.next_multiple_of(self.shape().granule_bytes);
        let absent = plan.mappings.iter().filter(|mapping| mapping.is_absent());
        let absent_bytes: u64 = absent.map(|mapping: &Mapping| mapping.range.bytes).sum();
        let margin_bytes = part_bytes.checked_mul(parts as u64)?.checked_mul(MARGIN)?;

        let mut memory = self.lock_memory().ok()?;
        let ours = self.lock_state().reclaimable().stream_safe_bytes + memory.counters().spare_bytes();
        let wanted_bytes = absent_bytes.saturating_sub(ours).checked_add(margin_bytes)?;
        let limit_bytes = self.shape().limit_bytes.unwrap_or(u64::MAX);
        if limit_bytes.saturating_sub(memory.counters().committed_bytes()) < wanted_bytes {
            return None;
        }
        let free_bytes = self.driver().memory_info().ok()?.free_bytes;
        if free_bytes < wanted_bytes {
            return None;
        }
        self.scratch().lend(&mut memory, parts, part_bytes)
    }

    /// Whether the wake's work `is_settled`: nothing of it is in flight.
    pub(super) fn return_scratch(&self, loan: Option<Loan<'_>>, is_settled: bool) {
        let Some(loan) = loan else { return };
        if is_settled {
            loan.settled();
        }
        // A closing pool does it otherwise. What the driver refuses is tried again.
        if let Ok(mut memory) = self.lock_memory() {
            let _ = self.scratch().take(&mut memory);
        }
    }
}
