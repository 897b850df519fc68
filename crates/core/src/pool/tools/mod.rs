//! What all layers speak in and wait by: keys, sizes, requests, reports, errors, clocks, locks.

pub(super) mod byte_ranges;
pub(super) mod cancel;
pub(super) mod clocks;
pub(super) mod commands;
pub(super) mod config;
pub(super) mod deadline;
pub(super) mod error;
pub(super) mod free_memory;
pub(super) mod handle;
pub(super) mod handover;
pub(super) mod keys;
pub(super) mod loss_ranges;
pub(super) mod mapping;
pub(super) mod reaper_thread;
pub(super) mod report;
pub(super) mod shape;
pub(super) mod tag_lock;
pub(super) mod threads;
pub(super) mod units;
pub(super) mod visits;
