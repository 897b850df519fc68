//! What sleeping and waking cost beside the limits of the machine, all measured in one run.
//!
//! [`run`] measures the link, reading device memory, making host memory and the bare calls of the driver first,
//! without a pool. Then it fills a load like a model's with bytes that depend on where they are, and takes it
//! through sleeps at level 1 and wakes:
//!
//! 1. a **first** sleep, with nothing prepared and no host memory kept;
//! 2. after loading the same again, a **prepared** one, whose backups were made in the background;
//! 3. [`Plan::cycles`] **clean** ones, with nothing changed; in the first five a GPU rests for 0.1 s before the wake,
//!    since for a moment it cleans what was given back, with the engines that also copy;
//! 4. a **changed** one, after other bytes were written into a part of the granules ([`Plan::changed`]);
//! 5. and some cycles in which everything is dropped and nothing is copied.
//!
//! [`Ratios`] in the [`Report`] put each beside what the limits of the same run make of it.
//!
//! Promises: every byte is compared after the wakes of 1, 2 and 4, after the first and the last of 3, and after each
//! of those when there are few; the report has the same size however many cycles there are; at the end everything
//! is freed and trimmed.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::sleep::{Plan, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let report = run(&arena, &Plan::new((8 << 20).try_into()?), &mut |_| {})?;
//! assert!(report.verified && !report.moved);
//! assert_eq!(report.copied_bytes.first, report.copied_bytes.wake);
//! assert_eq!(report.copied_bytes.clean, Some(0));
//! # Ok(())
//! # }
//! ```

mod choice;
mod fraction;
mod limits;
mod plan;
mod ratios;
mod report;
mod run;
mod sizes;

pub use fraction::{Fraction, InvalidFraction};
pub use limits::Limits;
pub use plan::{Error, Kind, Plan, Stage};
pub use ratios::{Beside, Ratios};
pub use report::{CopiedBytes, Cycle, DropCycle, Dropping, Held, Memory, Report, Spreads};
pub use run::run;
