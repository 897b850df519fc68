//! `poorwill bench churn`: mapped against live memory while a large model is loaded.

use poorwill::{Arena, PoolError};
use poorwill_bench::churn::{self, Event, Moment, Plan, Report, Step};

use super::trace::Trace;
use crate::args::ChurnArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::show;

/// The command.
pub(crate) fn run(args: &ChurnArgs) -> Result<Report, Failure> {
    let plan = Plan { seed: args.seed, rounds: args.rounds, ..Plan::new(args.load) };
    let config = args.budget.open(&args.device).limited_to(args.limit.map(|limit| limit.0));
    let arena = Arena::open(config)?;
    let Some(path) = &args.trace else { return churn(&arena, &plan) };
    let mut trace = Trace::create(path)?;
    let report = observed(&arena, &plan, &mut |moment| {
        trace.add(moment, arena.stats()?.mapped_bytes);
        Ok(())
    })?;
    trace.finish()?;
    Ok(report)
}

/// Takes an arena of its own through a load, and closes it.
pub(crate) fn churn(arena: &Arena, plan: &Plan) -> Result<Report, Failure> {
    observed(arena, plan, &mut |_| Ok(()))
}

fn observed(
    arena: &Arena,
    plan: &Plan,
    observer: &mut dyn FnMut(&Moment) -> Result<(), PoolError>,
) -> Result<Report, Failure> {
    let taken_bytes: u64 = plan
        .steps()
        .iter()
        .map(|step| match step {
            Step::Take { bytes } => *bytes,
            Step::Give { .. } => 0,
        })
        .sum();
    let progress = Progress::bytes("loading", taken_bytes.saturating_mul(plan.rounds.get().into()));
    let report = churn::run(arena, plan, &mut |moment| {
        if moment.event == Event::Take {
            progress.add(moment.bytes);
        }
        observer(moment)
    })?;
    arena.close()?;
    Ok(report)
}

impl Outcome for Report {
    const WRONG: &'static str = "the load failed";

    fn mismatch(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    fn text(&self) -> String {
        show::churn(std::slice::from_ref(self))
    }
}
