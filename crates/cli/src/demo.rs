//! `poorwill demo`: the main job on the host device in one go, and what loading large models takes.

use std::num::NonZeroU64;
use std::time::Instant;

use poorwill::checkpoint::Checkpoint;
use poorwill::{Arena, ByteSize, DeviceSpec, Level, chain};
use poorwill_bench::churn::{self, Load};
use poorwill_bench::nap::{self, Plan};
use poorwill_bench::synthetic::SyntheticMoe;
use serde::Serialize;

use crate::args::DemoArgs;
use crate::bench;
use crate::failure::{Failure, Outcome};
use crate::nap::nap;
use crate::progress::Progress;
use crate::show;

/// Device of the nap, unless the user names one.
const NAP_DEVICE: DeviceSpec = DeviceSpec::Host { capacity_bytes: 4 << 30 };

/// Device of the large loads, unless the user names one. They write nothing, so it takes no memory.
const CHURN_DEVICE: DeviceSpec = DeviceSpec::Host { capacity_bytes: 64 << 30 };

/// Where sizes are too small to say anything.
const DIVISOR_MAX: u64 = 1 << 10;

/// What the demonstration did.
#[derive(Debug, Serialize)]
pub(crate) struct DemoReport {
    nap: nap::Report,
    churn: Vec<churn::Report>,
    /// Which part of their full size the loads had, as its denominator.
    #[serde(skip)]
    churn_divisor: NonZeroU64,
    /// Seconds that writing the checkpoint took.
    write_s: f64,
    verified: bool,
}

/// The command.
pub(crate) fn run(args: &DemoArgs) -> Result<DemoReport, Failure> {
    let device = args.device.clone().unwrap_or(NAP_DEVICE);
    let arena = open(&device, args)?;
    let (checkpoint, write_s) = checkpoint()?;
    let plan =
        Plan { device, cycles: 3, level: Level::One, prepare: false, kv_cache: NonZeroU64::new(256 << 20) };
    let nap = nap(&arena, &checkpoint, &plan)?;
    drop(arena);
    let (churn, churn_divisor) = churn(args.device.as_ref().unwrap_or(&CHURN_DEVICE), args)?;
    let verified = nap.verified && churn.iter().all(|report| report.failed.is_none());
    Ok(DemoReport { nap, churn, churn_divisor, write_s, verified })
}

/// An arena on a device, within the user's budget.
fn open(device: &DeviceSpec, args: &DemoArgs) -> Result<Arena, Failure> {
    Ok(Arena::open(args.budget.open(device))?)
}

/// A checkpoint whose files are open and have no names any more, and how many seconds it took to write.
fn checkpoint() -> Result<(Checkpoint, f64), Failure> {
    let synthetic = SyntheticMoe::default();
    let size = ByteSize(synthetic.total_bytes());
    let folder = tempfile::Builder::new().prefix("poorwill-demo-").tempdir().map_err(|error| {
        Failure::new(format!(
            "cannot make a temporary folder: {error}; set TMPDIR to one that exists and has {size} free"
        ))
    })?;
    let started = Instant::now();
    let progress = Progress::bytes("writing", synthetic.total_bytes());
    synthetic.write(folder.path(), |bytes| progress.set(bytes)).map_err(|error| {
        Failure::new(format!(
            "{}; the checkpoint takes {size}: set TMPDIR to a folder that has them free",
            chain(&error)
        ))
    })?;
    drop(progress);
    let write_s = started.elapsed().as_secs_f64();
    let checkpoint = Checkpoint::open(&[folder.path().to_owned()])?;
    // The open files are all that is needed: whatever ends this process now, no folder is left behind.
    folder.close().map_err(|error| Failure::new(format!("cannot remove the temporary folder: {error}")))?;
    Ok((checkpoint, write_s))
}

/// Two loads, each in an arena of its own, at full size or at the largest half, quarter, … that fits well.
fn churn(device: &DeviceSpec, args: &DemoArgs) -> Result<(Vec<churn::Report>, NonZeroU64), Failure> {
    let plans = [Load::Moe, Load::Swizzle].map(churn::Plan::new);
    let arena = open(device, args)?;
    let free_bytes = arena.driver().memory_info()?.free_bytes.min(arena.limit_bytes());
    drop(arena);
    let needed_bytes = plans.iter().map(|plan| churn::peak_live_bytes(&plan.steps())).max().unwrap_or(0);
    let mut divisor = NonZeroU64::MIN;
    // A quarter is left to whatever the pool maps beyond what is live.
    while needed_bytes / divisor > free_bytes / 4 * 3 && divisor.get() < DIVISOR_MAX {
        divisor = divisor.saturating_mul(NonZeroU64::MIN.saturating_add(1));
    }
    let reports = plans.map(|plan| bench::churn(&open(device, args)?, &churn::Plan { divisor, ..plan }));
    Ok((reports.into_iter().collect::<Result<_, Failure>>()?, divisor))
}

impl Outcome for DemoReport {
    fn mismatch(&self) -> Option<&str> {
        let failed = || self.churn.iter().find_map(|report| report.failed.as_deref());
        self.nap.mismatch().or_else(failed)
    }

    fn text(&self) -> String {
        let model = "A mixture-of-experts checkpoint as Hugging Face would lay it out";
        let size = match self.churn_divisor.get() {
            1 => String::new(),
            divisor => format!(", all sizes divided by {divisor}"),
        };
        format!(
            "{model}, written in {:.2} s.\n{}\nWhat the loading of two large models maps for what it has live{size}\n{}",
            self.write_s,
            show::nap(&self.nap),
            show::churn(&self.churn)
        )
    }
}
