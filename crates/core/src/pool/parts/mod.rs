//! What a pool is made of. Each part owns its data; the state applies changes of one to others.

pub(super) mod backups;
pub(super) mod heap;
pub(super) mod hold_table;
pub(super) mod lent_chunks;
pub(super) mod links;
pub(super) mod newly_taken;
pub(super) mod open_copies;
pub(super) mod peer_copies;
pub(super) mod physical;
pub(super) mod scratch;
pub(super) mod tags;
pub(super) mod undefined_ranges;
