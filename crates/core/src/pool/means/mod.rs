//! What operations draw on: memory, host memory, events, captures, streams, and who owns what was lost.

pub(super) mod capture;
pub(super) mod events;
pub(super) mod host_ahead;
pub(super) mod host_reclaim;
pub(super) mod loss_owners;
pub(super) mod memory;
pub(super) mod pressure;
pub(super) mod reaper;
pub(super) mod spill;
pub(super) mod streams;
pub(super) mod supply;
