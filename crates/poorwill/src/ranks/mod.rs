//! The processes of one engine sleep and wake together: all of them, or none.
//!
//! Each rank does everything that can fail, and keeps it reversible. Then the group commits or undoes. The truth is a
//! [`FileDecision`], written once; messages only make it faster. So no lost message, late answer, stopped or killed process
//! leaves a group half asleep. A rank that hears nothing proposes to undo, and does what the decision then says.
//!
//! Ranks that have another channel, such as an engine's own, use a [`FileDecision`] with
//! [`Arena::stage_sleep`](crate::Arena::stage_sleep) alone. Others each start a [`RankServer`]. A [`Group`] is the
//! coordinator, in any process of the same user on this machine:
//!
//! ```
//! use poorwill::ranks::{Group, GroupConfig, GroupSleep, GroupWake, RankServer};
//! use poorwill::{AllocRequest, Arena, Config, Level, Tag};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path().to_owned();
//! let config = GroupConfig::new("job-17", 2)?.in_folder(folder);
//! // In each rank, with its own number:
//! let mut servers = Vec::new();
//! for rank in 0..2 {
//!     let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//!     arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
//!     servers.push(RankServer::start(&config, rank, arena)?);
//! }
//! // In the coordinator:
//! let group = Group::open(&config)?;
//! let reports = group.sleep(&GroupSleep::all(Level::One))?;
//! assert_eq!((reports.len(), &reports[1]["released_bytes"]), (2, &(2 << 20).into()));
//! group.wake(&GroupWake::all())?;
//! # Ok(())
//! # }
//! ```

mod config;
mod connection;
mod counted;
mod decision;
mod error;
mod group;
mod line;
mod message;
mod place;
mod protocol;
mod rank;
mod server;
#[cfg(test)]
mod simulation;

pub use self::config::GroupConfig;
pub use self::counted::CountedDecision;
pub use self::decision::FileDecision;
pub use self::error::{GroupError, GroupState, RanksError};
pub use self::group::{Group, GroupSleep, GroupWake};
pub use self::message::RankStatus;
pub use self::protocol::{GroupOp, RankState};
pub use self::rank::{Rank, RankOutcome, StageError, StagedRank};
pub use self::server::RankServer;
