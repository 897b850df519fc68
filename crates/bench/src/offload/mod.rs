//! What weights in host memory cost a forward pass, beside link and computing alone.
//!
//! [`run`] allocates layers of whole granules in host memory, with bytes by layer and offset. It measures,
//! each the median of five after a warm-up:
//!
//! 1. **copies** of all layers to device slots on one stream;
//! 2. the same by a **kernel** that reads host memory in place;
//! 3. a pass with **resident** layers;
//! 4. a pass that reads each layer **in place** with that kernel;
//! 5. copies and computing **side by side**, in separate slots;
//! 6. a pass with **prefetching** ([`Prefetcher`](poorwill::offload::Prefetcher)).
//!
//! Computing a layer digests its slot, then [`OffloadReport::repeats`] times its first
//! [`OffloadReport::part_bytes`], for about as long as the copy. As with weights, each byte is read from
//! device memory once; the rest comes from caches.
//!
//! Promises: passes 3 to 6 compare every digest with the layer's bytes on the host. Before passes 4 and 6 no
//! slot holds the layer that it will get. A kernel's figure never comes from another copy path. At the end,
//! or after an error, all memory is released.
//!
//! ```
//! use poorwill::{Arena, Config};
//! use poorwill_bench::offload::{OffloadPlan, Source, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
//! let plan = OffloadPlan { layers: 4.try_into()?, ..OffloadPlan::new((16 << 20).try_into()?) };
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

pub use choice::{SLOTS_MAX, SLOTS_MIN, Times, choose_repeats, choose_slots};
pub use layers::Source;
pub use plan::{OffloadError, OffloadPlan, OffloadStage};
pub use report::{OffloadReport, overlap_of};
pub use run::run;
