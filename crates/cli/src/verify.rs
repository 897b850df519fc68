//! `poorwill verify`: loads a checkpoint, and compares it with its files after each sleep and wake.

use std::num::NonZeroU64;
use std::sync::Arc;

use poorwill::checkpoint::Checkpoint;
use poorwill::{Arena, Level};
use poorwill_bench::verify::{self, VerifyEvent, VerifyObserver, VerifyPlan, VerifyReport, VerifyStage};

use crate::args::VerifyArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Steps;
use crate::show;

pub(crate) fn run(args: &VerifyArgs) -> Result<VerifyReport, Failure> {
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.config(&args.device).limited_to(args.limit.map(|limit| limit.0));
    let plan = VerifyPlan {
        device: args.device.clone(),
        cycles: args.cycles,
        level: if args.level == 2 { Level::Two } else { Level::One },
        prepare: args.prepare,
        kv_cache: NonZeroU64::new(args.kv_cache.0),
    };
    verify(&Arena::open(config)?, &checkpoint, &plan)
}

/// Runs a plan in an otherwise unused arena, and closes it.
pub(crate) fn verify(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &VerifyPlan,
) -> Result<VerifyReport, Failure> {
    let steps = Arc::new(Steps::default());
    let shown = Arc::clone(&steps);
    let observer: VerifyObserver = Arc::new(move |event| match event {
        VerifyEvent::Begin(stage, bytes) => shown.begin(label(stage), bytes),
        VerifyEvent::Moved(bytes) => shown.add(bytes),
        // Late progress belongs to no step and is dropped.
        VerifyEvent::Woken(progress) => {
            shown.set(label(VerifyStage::Wake), progress.filled_bytes, progress.total_bytes);
        }
        _ => {}
    });
    let report = verify::run(arena, checkpoint, plan, &observer);
    steps.end();
    Ok(report?)
}

fn label(stage: VerifyStage) -> &'static str {
    match stage {
        VerifyStage::Load => "loading",
        VerifyStage::Reload => "reloading",
        VerifyStage::Compare => "verifying",
        VerifyStage::KvCache => "kv cache",
        VerifyStage::Prepare => "preparing",
        VerifyStage::Sleep => "sleeping",
        VerifyStage::Wake => "waking",
        _ => "running",
    }
}

impl Outcome for VerifyReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::verify(self)
    }
}
