//! `poorwill nap`: load, then cycles of sleep and wake, each verified against the files.

use std::num::NonZeroU64;
use std::sync::Arc;

use poorwill::checkpoint::Checkpoint;
use poorwill::{Arena, Level};
use poorwill_bench::nap::{self, Event, Plan, Report, Stage};

use crate::args::NapArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Shown;
use crate::show;

/// The command.
pub(crate) fn run(args: &NapArgs) -> Result<Report, Failure> {
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.open(&args.device).limited_to(args.limit.map(|limit| limit.0));
    let plan = Plan {
        device: args.device.clone(),
        cycles: args.cycles,
        level: if args.level == 2 { Level::Two } else { Level::One },
        prepare: args.prepare,
        kv_cache: NonZeroU64::new(args.kv_cache.0),
    };
    nap(&Arena::open(config)?, &checkpoint, &plan)
}

/// Naps in an arena of its own, and closes it.
pub(crate) fn nap(arena: &Arena, checkpoint: &Checkpoint, plan: &Plan) -> Result<Report, Failure> {
    let shown = Arc::new(Shown::default());
    let told = Arc::clone(&shown);
    let observer: nap::Observer = Arc::new(move |event| match event {
        Event::Begin(stage, bytes) => told.begin(label(stage), bytes),
        Event::Moved(bytes) => told.add(bytes),
        // One that comes late belongs to no step any more.
        Event::Woken(progress) => told.set(label(Stage::Wake), progress.filled_bytes, progress.total_bytes),
        _ => {}
    });
    let report = nap::run(arena, checkpoint, plan, &observer);
    shown.end();
    Ok(report?)
}

fn label(stage: Stage) -> &'static str {
    match stage {
        Stage::Load => "loading",
        Stage::Reload => "reloading",
        Stage::Verify => "verifying",
        Stage::KvCache => "kv cache",
        Stage::Prepare => "preparing",
        Stage::Sleep => "sleeping",
        Stage::Wake => "waking",
        _ => "napping",
    }
}

impl Outcome for Report {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::nap(self)
    }
}
