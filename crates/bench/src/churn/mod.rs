//! Synthetic loads that allocate and free as the loading of a model does, and how much memory they take.
//!
//! While weights are loaded and converted, large blocks come and go beside others that stay. How much a pool
//! maps at its peak, and how much it still holds when only the weights are left, is decided by which free
//! block it gives to which request. A [`Load`] is such a sequence of sizes, the same for a seed on every
//! machine; [`run`] takes an arena through it and reports mapped against live bytes.
//!
//! No byte is written: on the host device a load of any size takes no memory of the machine.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::churn::{Load, Plan, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64GiB".parse()?))?;
//! let report = run(&arena, &Plan::new(Load::Moe), &mut |_| Ok(()))?;
//! assert_eq!((report.failed, report.peak_live_bytes >> 30), (None, 23));
//! assert_eq!(arena.stats()?.mapped_bytes, 0, "nothing stays behind");
//! # Ok(())
//! # }
//! ```

mod load;
mod python;
mod report;
mod run;

pub use load::{Load, ParseLoadError, Step, peak_live_bytes};
pub use report::Report;
pub use run::{Event, Moment, Observer, Plan, run};
