//! `poorwill bench sleep`: what sleeping and waking cost beside the machine's limits.

use poorwill::cycle::{self, CycleReport, Plan, Stage};
use poorwill::{Arena, Config};

use crate::args::SleepArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::show;

/// The command.
pub(crate) fn run(args: &SleepArgs) -> Result<CycleReport, Failure> {
    let arena = Arena::open(Config::on(args.device.clone()).within(args.budget.of(&args.device)))?;
    let plan = Plan { cycles: args.cycles, ..Plan::new(args.size) };
    let mut shown = None;
    let report = cycle::run(&arena, &plan, &mut |stage| {
        let label = match stage {
            Stage::Limits => "limits".into(),
            Stage::Load => "loading".into(),
            Stage::Cycle(number) => format!("cycle {number}"),
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
