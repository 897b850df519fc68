//! How much host memory may be held, and the texts of refusals.
//!
//! The caller's limit and the control groups are checked once per request: a group over its limit is killed,
//! not refused. The machine's memory is checked before each slab: some machines grow as memory is touched,
//! and never report how far.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::ByteSize;
use poorwill_core::budget::system_reserve_bytes;

use crate::system::System;

/// Most to leave for a control group's other needs (page tables, the process's own memory).
const GROUP_MARGIN_MAX: u64 = 256 << 20;

/// Most to leave for the machine.
const MACHINE_MARGIN_MAX: u64 = 1 << 30;

/// Share of the total to leave, up to these.
const MARGIN_SHARE: u64 = 32;

/// For a machine whose memory grows.
const GROWTH_WAIT_MAX: Duration = Duration::from_secs(2);
const GROWTH_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Budget {
    limit_bytes: Option<u64>,
    is_shared: bool,
    system: System,
    first_total: OnceLock<Option<u64>>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Figures {
    pub(super) held_bytes: u64,
    pub(super) unmade_bytes: u64,
}

/// Why memory may not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shortage {
    /// How much less would fit.
    pub(super) missing_bytes: u64,
    /// Which limit applies, and what would help.
    pub(super) reason: String,
}

impl Budget {
    pub(super) fn new(limit_bytes: Option<u64>, is_shared: bool, system: System) -> Self {
        Self { limit_bytes, is_shared, system, first_total: OnceLock::new() }
    }

    fn machine_margin(&self, total_bytes: u64) -> u64 {
        match self.is_shared {
            true => system_reserve_bytes(total_bytes),
            false => (total_bytes / MARGIN_SHARE).min(MACHINE_MARGIN_MAX),
        }
    }

    pub(super) fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    pub(super) fn check_limit(&self, held_bytes: u64) -> Result<(), Shortage> {
        let Some(limit) = self.limit_bytes.filter(|limit| held_bytes > *limit) else { return Ok(()) };
        let reason = format!(
            "with it {} would be held, and the limit for host memory is {}; raise the limit, or drop buffers",
            ByteSize(held_bytes),
            ByteSize(limit)
        );
        Err(Shortage { missing_bytes: held_bytes - limit, reason })
    }

    /// Returns how much more the control groups leave.
    pub(super) fn check_groups(&self, figures: Figures) -> Result<Option<u64>, Shortage> {
        let group = self.system.cgroup_memory();
        let (Some(limit), Some(left)) = (group.limit_bytes, group.available_bytes) else { return Ok(None) };
        let margin = (limit / MARGIN_SHARE).min(GROUP_MARGIN_MAX);
        let allowed = left.saturating_sub(margin);
        if figures.unmade_bytes <= allowed {
            return Ok(Some(allowed - figures.unmade_bytes));
        }
        let reason = format!(
            "{} are held, {} more would be taken, and the control group of this process, whose limit is {}, leaves \
             {} and kills a process that takes more; raise the group's memory limit, or set a limit for host memory below it",
            ByteSize(figures.held_bytes - figures.unmade_bytes.min(figures.held_bytes)),
            ByteSize(figures.unmade_bytes),
            ByteSize(limit),
            ByteSize(allowed)
        );
        Err(Shortage { missing_bytes: figures.unmade_bytes - allowed, reason })
    }

    /// May wait briefly for a machine whose memory grows.
    pub(super) fn check_machine(
        &self,
        unpopulated_bytes: impl Fn() -> u64,
        may_wait: bool,
    ) -> Result<(), Shortage> {
        let start = Instant::now();
        loop {
            // In this order, so that memory populated in between counts twice rather than not at all.
            let (unpopulated_bytes, memory) = (unpopulated_bytes(), self.system.memory());
            let first = *self.first_total.get_or_init(|| memory.total_bytes);
            let (Some(total), Some(available)) = (memory.total_bytes, memory.available_bytes) else {
                return Ok(());
            };
            let allowed = available.saturating_sub(self.machine_margin(total));
            if unpopulated_bytes <= allowed {
                return Ok(());
            }
            if !may_wait || first == Some(total) || start.elapsed() > GROWTH_WAIT_MAX {
                let reason = format!(
                    "the machine has {} available of {}, of which {} can be had, and {} would be taken; free memory, \
                     or keep fewer bytes in host memory",
                    ByteSize(available),
                    ByteSize(total),
                    ByteSize(allowed),
                    ByteSize(unpopulated_bytes)
                );
                return Err(Shortage { missing_bytes: unpopulated_bytes - allowed, reason });
            }
            thread::sleep(GROWTH_PAUSE);
        }
    }
}
