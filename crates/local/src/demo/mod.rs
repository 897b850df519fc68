//! `poorwill demo`: load, sleep, wake and verify on the host device, and the memory that large loads take.

mod args;

use std::num::NonZeroU64;
use std::time::Instant;

use poorwill::checkpoint::Checkpoint;
use poorwill::{Arena, ByteSize, DeviceSpec, Level, chain};
use poorwill_bench::churn::{self, ChurnPlan, ChurnReport, Load};
use poorwill_bench::synthetic::SyntheticMoe;
use poorwill_bench::verify::{VerifyPlan, VerifyReport};
use serde::Serialize;

pub use self::args::DemoArgs;
use crate::bench;
use crate::failure::{CommandOutput, Failure};
use crate::progress::Progress;
use crate::verify::{self, verify};

const VERIFY_DEVICE: DeviceSpec = DeviceSpec::host_of(4 << 30);

/// The large loads write nothing, so it takes no memory.
const CHURN_DEVICE: DeviceSpec = DeviceSpec::host_of(64 << 30);

/// Smaller sizes are not representative.
const DIVISOR_MAX: u64 = 1 << 10;

#[derive(Debug, Serialize)]
pub(crate) struct DemoReport {
    /// Sleeps and wakes of the checkpoint.
    verify: VerifyReport,
    /// The large loads.
    churn: Vec<ChurnReport>,
    /// All sizes of the loads were divided by this.
    #[serde(skip)]
    churn_divisor: NonZeroU64,
    /// Writing the checkpoint.
    write_s: f64,
    /// Whether nothing differed and no load failed.
    verified: bool,
}

pub(crate) fn run(args: &DemoArgs) -> Result<DemoReport, Failure> {
    let device = args.device.clone().unwrap_or(VERIFY_DEVICE);
    let arena = open(&device, args)?;
    let (checkpoint, write_s) = checkpoint()?;
    let plan = VerifyPlan {
        device,
        cycles: 3,
        level: Level::One,
        prepare: false,
        kv_cache: NonZeroU64::new(256 << 20),
    };
    let report = verify(&arena, &checkpoint, &plan)?;
    drop(arena);
    let (churn, churn_divisor) = churn(args.device.as_ref().unwrap_or(&CHURN_DEVICE), args)?;
    let verified = report.verified && churn.iter().all(|report| report.failed.is_none());
    Ok(DemoReport { verify: report, churn, churn_divisor, write_s, verified })
}

fn open(device: &DeviceSpec, args: &DemoArgs) -> Result<Arena, Failure> {
    Ok(Arena::open(args.budget.config(device))?)
}

/// A checkpoint with open, already deleted files, and the seconds of writing it.
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
    // The open files suffice. No folder is left, however this process ends.
    folder.close().map_err(|error| Failure::new(format!("cannot remove the temporary folder: {error}")))?;
    Ok((checkpoint, write_s))
}

/// Two loads, each in its own arena. Sizes are halved until they fit well.
fn churn(device: &DeviceSpec, args: &DemoArgs) -> Result<(Vec<ChurnReport>, NonZeroU64), Failure> {
    let plans = [Load::Moe, Load::Swizzle].map(ChurnPlan::new);
    let arena = open(device, args)?;
    let free_bytes = arena.driver().memory_info()?.free_bytes.min(arena.limit_bytes());
    drop(arena);
    let needed_bytes = plans.iter().map(|plan| churn::peak_live_bytes(&plan.steps())).max().unwrap_or(0);
    let mut divisor = NonZeroU64::MIN;
    // Leaves a quarter for mapped memory that is not live.
    while needed_bytes / divisor > free_bytes / 4 * 3 && divisor.get() < DIVISOR_MAX {
        divisor = divisor.saturating_mul(NonZeroU64::MIN.saturating_add(1));
    }
    let reports = plans.map(|plan| bench::churn(&open(device, args)?, &ChurnPlan { divisor, ..plan }));
    Ok((reports.into_iter().collect::<Result<_, Failure>>()?, divisor))
}

impl CommandOutput for DemoReport {
    fn mismatch(&self) -> Option<&str> {
        let failed = || self.churn.iter().find_map(|report| report.failed.as_deref());
        self.verify.mismatch().or_else(failed)
    }

    fn text(&self) -> String {
        let model = "A mixture-of-experts checkpoint as Hugging Face would lay it out";
        let size = match self.churn_divisor.get() {
            1 => String::new(),
            divisor => format!(", all sizes divided by {divisor}"),
        };
        format!(
            "{model}, written in {:.2} s.\n{}\nMapped and live memory while two large models load{size}\n{}",
            self.write_s,
            verify::text(&self.verify),
            bench::churn_text(&self.churn)
        )
    }
}
