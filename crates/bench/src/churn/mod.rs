//! How much memory a pool takes while a model loads.
//!
//! Loading and converting weights mixes large transient blocks with blocks that stay. Which free block a pool
//! gives to which request decides its mapped memory at the peak and at the end. A [`Load`] is such a sequence
//! of sizes, identical for a seed on every machine. [`run`] takes an arena through it.
//!
//! No byte is written, so on the host device a load takes no memory.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::churn::{Load, ChurnPlan, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64GiB".parse()?))?;
//! let report = run(&arena, &ChurnPlan::new(Load::Moe), &mut |_| Ok(()))?;
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
pub use report::ChurnReport;
pub use run::{ChurnEvent, ChurnObserver, ChurnPlan, ChurnProgress, run};
