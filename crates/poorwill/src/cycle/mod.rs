//! What sleeping and waking cost beside the limits of the machine, all measured in one run.
//!
//! [`run`] measures the link and the bare calls of the driver first, without a pool. Then it fills a load like a
//! model's with bytes that depend on where they are, takes it through [`Plan::cycles`] of sleep at level 1 and
//! wake and compares the bytes, and then through some cycles in which everything is dropped and nothing is
//! copied. Ratios in the [`CycleReport`] put each beside its limit of the same run.
//!
//! Promises: every byte is compared after the first wake and after the last, and after each when there are few;
//! the report has the same size however many cycles there are; at the end everything is freed and trimmed.
//!
//! ```
//! use poorwill::cycle::{Plan, run};
//! use poorwill::{Arena, Config};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let report = run(&arena, &Plan::new((8 << 20).try_into()?), &mut |_| {})?;
//! assert!(report.verified && !report.moved);
//! assert_eq!(report.cycles[0].sleep.copied_bytes, report.cycles[0].wake.copied_bytes);
//! # Ok(())
//! # }
//! ```

mod limits;
mod load;
mod report;
mod run;

pub use limits::Limits;
pub use report::{Cycle, CycleReport, DropCycle, Dropping, Held, Memory, Spread};
pub use run::{CycleError, Plan, Stage, run};
