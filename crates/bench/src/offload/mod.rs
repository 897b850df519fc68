//! What weights in host memory cost a forward pass, beside the link and the computing alone, all measured in one
//! run.
//!
//! [`run`] makes [`Plan::layers`] layers in host memory, each of the same number of whole granules, and writes
//! bytes into them that depend on layer and place. Then it measures, in this order and each the median of five
//! after one that is not counted:
//!
//! 1. **copies** of all layers to slots on the device, one after the other on one stream;
//! 2. the same by a **kernel** that reads the host memory where it is;
//! 3. a pass in which the layers are **resident**: they are computed, and nothing is copied;
//! 4. a pass in which each layer is read **in place** by that kernel right before it is computed, on one stream;
//! 5. copies and computing **side by side**, in slots of their own, where neither waits for the other: what the device
//!    does at the same time, whatever the order;
//! 6. a pass with **prefetching**: a [`Prefetcher`](poorwill::offload::Prefetcher).
//!
//! Computing a layer stands in as digests of its slot, and then of [`Report::part_bytes`] of it
//! [`Report::repeats`] times, which is chosen so that it takes about as long as bringing the layer in: each
//! byte is read from the device's memory once, as a layer's weights are, and what goes on is about what caches have.
//! [`repeats_of`] and [`slots_of`] are the rules.
//!
//! Promises: in each pass of 3 to 6 every digest of every layer is held against those of its bytes on the host,
//! and before each pass of 4 and 6 no slot holds what it will get; a kernel's figure is never that of another way,
//! and is absent, with the reason, where there is no such way. At the end, and after an error, everything is given
//! back.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::offload::{Plan, Source, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let plan = Plan { layers: 4.try_into()?, ..Plan::new((16 << 20).try_into()?) };
//! let report = run(&arena, &Source::Driver, &plan, &mut |_| {})?;
//! assert!(report.verified);
//! assert_eq!((report.host_bytes_asked, report.layers), (16 << 20, 4));
//! # Ok(())
//! # }
//! ```

mod choice;
mod layers;
mod plan;
mod report;
mod run;

pub use choice::{SLOTS_MAX, SLOTS_MIN, Times, repeats_of, slots_of};
pub use layers::Source;
pub use plan::{Error, Plan, Stage};
pub use report::{Report, overlap_of};
pub use run::run;
