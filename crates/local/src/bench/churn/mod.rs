//! `poorwill bench churn`: mapped against live memory while a large model is loaded.

mod args;
mod show;
mod trace;

use poorwill::{Arena, PoolError};
use poorwill_bench::churn::{self, ChurnEvent, ChurnPlan, ChurnProgress, ChurnReport, Step};

pub use self::args::ChurnArgs;
pub(crate) use self::show::text;
use self::trace::Trace;
use crate::failure::{CommandOutput, Failure};
use crate::progress::Progress;

pub(crate) fn run(args: &ChurnArgs) -> Result<ChurnReport, Failure> {
    let plan = ChurnPlan { seed: args.seed, rounds: args.rounds, ..ChurnPlan::new(args.load) };
    let config = args.budget.config(&args.device).limited_to(args.limit.map(|limit| limit.0));
    let arena = Arena::open(config)?;
    let Some(path) = &args.trace else { return churn(&arena, &plan) };
    let mut trace = Trace::create(path)?;
    let report = run_observed(&arena, &plan, &mut |step| {
        trace.add(step, arena.stats()?.mapped_bytes);
        Ok(())
    })?;
    trace.finish()?;
    Ok(report)
}

/// Runs a load in an otherwise unused arena, and closes it.
pub(crate) fn churn(arena: &Arena, plan: &ChurnPlan) -> Result<ChurnReport, Failure> {
    run_observed(arena, plan, &mut |_| Ok(()))
}

fn run_observed(
    arena: &Arena,
    plan: &ChurnPlan,
    observer: &mut dyn FnMut(&ChurnProgress) -> Result<(), PoolError>,
) -> Result<ChurnReport, Failure> {
    let load_bytes: u64 = plan
        .steps()
        .iter()
        .map(|step| match step {
            Step::Alloc { bytes } => *bytes,
            Step::Free { .. } => 0,
        })
        .sum();
    let progress = Progress::bytes("loading", load_bytes.saturating_mul(plan.rounds.get().into()));
    let report = churn::run(arena, plan, &mut |step| {
        if step.event == ChurnEvent::Alloc {
            progress.add(step.bytes);
        }
        observer(step)
    })?;
    arena.close()?;
    Ok(report)
}

impl CommandOutput for ChurnReport {
    const MISMATCH: &'static str = "the load failed";

    fn mismatch(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    fn text(&self) -> String {
        text(std::slice::from_ref(self))
    }
}
