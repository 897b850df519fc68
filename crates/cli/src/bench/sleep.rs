//! `poorwill bench sleep`: what sleeping and waking cost beside the machine's limits.

use poorwill::Arena;
use poorwill_bench::sleep::{self, Kind, Plan, Report, Stage};

use crate::args::SleepArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Shown;
use crate::show;

/// The command.
pub(crate) fn run(args: &SleepArgs) -> Result<Report, Failure> {
    let arena = Arena::open(args.budget.open(&args.device))?;
    let plan = Plan { cycles: args.cycles, changed: args.changed, ..Plan::new(args.bytes()) };
    let shown = Shown::default();
    let report = sleep::run(&arena, &plan, &mut |stage| {
        let label = match stage {
            Stage::Limits => "limits".into(),
            Stage::Load => "loading".into(),
            Stage::Prepare => "preparing".into(),
            Stage::Cycle { kind: Kind::First, .. } => "first".into(),
            Stage::Cycle { kind: Kind::Prepared, .. } => "prepared".into(),
            Stage::Cycle { kind: Kind::Clean, number } => format!("clean {number}"),
            Stage::Cycle { kind: Kind::Changed, .. } => "changed".into(),
            Stage::Drop => "dropping".into(),
            _ => "measuring".into(),
        };
        shown.begin(&label, None);
    })?;
    drop(shown);
    arena.close()?;
    Ok(report)
}

impl Outcome for Report {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::sleep(self)
    }
}
