//! `poorwill bench sleep`: what sleeping and waking cost beside the machine's limits.

use poorwill::Arena;
use poorwill::cycle::{self, CycleReport, Kind, Plan, Stage};

use crate::args::SleepArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::show;

/// The command.
pub(crate) fn run(args: &SleepArgs) -> Result<CycleReport, Failure> {
    let arena = Arena::open(args.budget.open(&args.device))?;
    let plan = Plan { cycles: args.cycles, changed: args.changed, ..Plan::new(args.bytes()) };
    let mut shown = None;
    let report = cycle::run(&arena, &plan, &mut |stage| {
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
        // The one before goes first.
        shown = None;
        shown = Some(Progress::waiting(&label));
    })?;
    drop(shown);
    arena.close()?;
    Ok(report)
}

impl Outcome for CycleReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::cycles(self)
    }
}
