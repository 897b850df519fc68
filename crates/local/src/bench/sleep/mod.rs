//! `poorwill bench sleep`: sleep and wake beside the machine's limits.

mod args;
mod show;

use poorwill::disk::DiskConfig;
use poorwill::{Arena, PoolConfig};
use poorwill_bench::sleep::{self, CycleKind, SleepBenchReport, SleepPlan, SleepStage};

pub use self::args::SleepArgs;
use crate::failure::{CommandOutput, Failure};
use crate::progress::Steps;

pub(crate) fn run(args: &SleepArgs) -> Result<SleepBenchReport, Failure> {
    let pool = PoolConfig::default().compressing(args.compress);
    let disk = args.disk.as_ref().map(DiskConfig::in_folder);
    let arena = Arena::open(args.budget.config(&args.device).pooling(pool).spilling_to(disk))?;
    let (cycles, changed, contents, disk) = (args.cycles, args.changed, args.content, args.disk.clone());
    let plan = SleepPlan { cycles, changed, contents, disk, ..SleepPlan::new(args.bytes()) };
    let steps = Steps::default();
    let report = sleep::run(&arena, &plan, &mut |stage| {
        let label = match stage {
            SleepStage::Limits => "limits".into(),
            SleepStage::Load => "loading".into(),
            SleepStage::Prepare => "preparing".into(),
            SleepStage::Cycle { kind: CycleKind::First, .. } => "first".into(),
            SleepStage::Cycle { kind: CycleKind::Prepared, .. } => "prepared".into(),
            SleepStage::Cycle { kind: CycleKind::Clean, number } => format!("clean {number}"),
            SleepStage::Cycle { kind: CycleKind::Changed, .. } => "changed".into(),
            SleepStage::OnDisk => "from disk".into(),
            SleepStage::Drop => "dropping".into(),
            _ => "measuring".into(),
        };
        steps.begin(&label, None);
    })?;
    drop(steps);
    arena.close()?;
    Ok(report)
}

impl CommandOutput for SleepBenchReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::sleep(self)
    }
}
