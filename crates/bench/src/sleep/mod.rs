//! What sleep and wake cost beside the limits of the machine.
//!
//! [`run`] measures the limits first. Then it fills a load like a model's with [`Contents`](crate::Contents),
//! and runs cycles of sleep at level 1 and wake:
//!
//! 1. a **first** sleep, without backups or cached host memory;
//! 2. a **prepared** one of a new load, with backups made in the background;
//! 3. [`SleepPlan::cycles`] **clean** ones, with nothing changed;
//! 4. a **changed** one, after writes to a part of the granules;
//! 5. with a disk, some whose backups are moved there before the wake, each beside a plain read of the same file;
//! 6. some that **drop** everything and copy nothing.
//!
//! [`Ratios`] compare each with the limits.
//!
//! Promises: every byte is compared after the wakes of 1, 2, 4 and 5, and after the first and last of 3. The
//! report's size does not depend on the number of cycles.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::sleep::{SleepPlan, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let report = run(&arena, &SleepPlan::new((8 << 20).try_into()?), &mut |_| {})?;
//! assert!(report.verified && !report.moved);
//! assert_eq!(report.copied_bytes.first, report.copied_bytes.wake);
//! assert_eq!(report.copied_bytes.clean, Some(0));
//! # Ok(())
//! # }
//! ```

mod aims;
mod choice;
#[cfg(target_os = "linux")]
mod disk;
mod fraction;
mod limits;
mod plan;
mod ratios;
mod report;
mod run;
mod sizes;

#[cfg(target_os = "linux")]
pub use disk::{DiskCycle, DiskCycles};
pub use fraction::{Fraction, InvalidFraction};
pub use limits::Limits;
pub use plan::{CycleKind, SleepError, SleepPlan, SleepStage};
pub use ratios::{LimitRatio, Ratios};
pub use report::{
    CopiedBytes, DropCycle, Dropping, MemoryTrend, MemoryUse, SleepBenchReport, SleepCycle, Spreads,
};
pub use run::run;
