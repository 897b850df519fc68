//! What may be held, and the words of a refusal.
//!
//! What the caller allows and what control groups leave are looked at once for all that a call asks for: a group that
//! is overrun is killed, not refused. What the machine has is looked at before each slab is touched, since there are
//! machines whose memory grows as it is touched, and which never tell beforehand how far.

use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::ByteSize;

use crate::system::System;

/// Most that is left to a control group's other needs (tables of pages, the process's own memory).
const GROUP_MARGIN_MAX: u64 = 256 << 20;

/// Most that is left to the machine.
const MACHINE_MARGIN_MAX: u64 = 1 << 30;

/// Share of the whole that is left, up to that.
const MARGIN_SHARE: u64 = 32;

/// How long a machine whose memory grows is waited for.
const GROWTH_WAIT_MAX: Duration = Duration::from_secs(2);
const GROWTH_PAUSE: Duration = Duration::from_millis(20);

/// The limits of one device's host memory.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) limit_bytes: Option<u64>,
    system: System,
    /// What the machine had when it was first asked.
    first_total: OnceLock<Option<u64>>,
}

/// Figures of a moment, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Figures {
    /// With what is asked for now.
    pub(super) held: u64,
    /// Of which takes memory only later.
    pub(super) unmade: u64,
}

/// What keeps memory from being made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lack {
    /// How much less would do.
    pub(super) lacking_bytes: u64,
    /// Which limit it is, and what would help.
    pub(super) reason: String,
}

impl Budget {
    pub(super) fn new(limit_bytes: Option<u64>, system: System) -> Self {
        Self { limit_bytes, system, first_total: OnceLock::new() }
    }

    /// Whether the caller allows as much.
    pub(super) fn check_limit(&self, held: u64) -> Result<(), Lack> {
        let Some(limit) = self.limit_bytes.filter(|limit| held > *limit) else { return Ok(()) };
        let reason = format!(
            "with it {} would be held, and the limit for host memory is {}; raise the limit, or drop buffers",
            ByteSize(held),
            ByteSize(limit)
        );
        Err(Lack { lacking_bytes: held - limit, reason })
    }

    /// Whether the control groups leave as much; how much more they do.
    pub(super) fn check_groups(&self, figures: Figures) -> Result<Option<u64>, Lack> {
        let group = self.system.cgroup_memory();
        let (Some(limit), Some(left)) = (group.limit_bytes, group.available_bytes) else { return Ok(None) };
        let margin = (limit / MARGIN_SHARE).min(GROUP_MARGIN_MAX);
        let allowed = left.saturating_sub(margin);
        if figures.unmade <= allowed {
            return Ok(Some(allowed - figures.unmade));
        }
        let reason = format!(
            "{} are held, {} more would be taken, and the control group of this process, whose limit is {}, leaves \
             {} and kills who takes more; raise the group's memory limit, or set a limit for host memory below it",
            ByteSize(figures.held - figures.unmade.min(figures.held)),
            ByteSize(figures.unmade),
            ByteSize(limit),
            ByteSize(allowed)
        );
        Err(Lack { lacking_bytes: figures.unmade - allowed, reason })
    }

    /// Whether the machine has as much as is to come. With patience, waits a little for one that grows.
    pub(super) fn check_machine(&self, to_come: impl Fn() -> u64, is_patient: bool) -> Result<(), Lack> {
        let start = Instant::now();
        loop {
            // In this order, so that what comes in between counts twice rather than not at all.
            let (to_come, memory) = (to_come(), self.system.memory());
            let first = *self.first_total.get_or_init(|| memory.total_bytes);
            let (Some(total), Some(available)) = (memory.total_bytes, memory.available_bytes) else {
                return Ok(());
            };
            let allowed = available.saturating_sub((total / MARGIN_SHARE).min(MACHINE_MARGIN_MAX));
            if to_come <= allowed {
                return Ok(());
            }
            if !is_patient || first == Some(total) || start.elapsed() > GROWTH_WAIT_MAX {
                let reason = format!(
                    "the machine has {} available of {}, of which {} can be had, and {} would be taken; free memory, \
                     or keep fewer bytes in host memory",
                    ByteSize(available),
                    ByteSize(total),
                    ByteSize(allowed),
                    ByteSize(to_come)
                );
                return Err(Lack { lacking_bytes: to_come - allowed, reason });
            }
            thread::sleep(GROWTH_PAUSE);
        }
    }
}
