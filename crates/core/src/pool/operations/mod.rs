//! What callers ask for: sleep, wake, allocate, copy, save, prepare.

pub(super) mod access;
pub(super) mod alloc;
pub(super) mod backup_view;
mod compare;
pub(super) mod hold_guard;
pub(super) mod leaving;
mod lend;
mod peer_copies;
pub(super) mod prepare;
pub(super) mod read_backup;
mod resident;
pub(super) mod save;
pub(super) mod sleep;
pub(super) mod spoiled_backups;
pub(super) mod stage;
pub(super) mod wake;
