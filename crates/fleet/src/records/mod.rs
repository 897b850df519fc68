//! What lies in etcd, as JSON.
//!
//! Machines of a fleet are upgraded one by one, so each reader meets records of older and newer versions:
//!
//! - A field that a reader does not know is ignored. A field that is missing has a default, unless nothing sensible is.
//! - `format` is the oldest format whose readers understand the record. It grows only if they would misunderstand it.
//!   A reader of an older one gets [`Reading::Newer`]. It then leaves alone what the record is about, and takes a node to
//!   do what its placements say.
//! - A stage that a reader does not know is [`Stage::Unknown`]: the model may have memory, and nothing is sent there.
//! - A goal or wish that it does not know comes with a newer `format`.

mod model;
mod node;
mod placement;
mod reading;
mod wishes;

pub use self::model::{Costs, ModelRecord, Rate, Requests, Stage};
pub use self::node::{GpuRecord, NodeRecord};
pub use self::placement::{Goal, Placement};
pub use self::reading::{FORMAT, Reading, Record, RecordError, RecordProblem, read, write};
pub use self::wishes::{Drain, Pin};
