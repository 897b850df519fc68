//! `poorwill verify`: loads a checkpoint, and compares it with its files after each sleep and wake.

mod args;
mod show;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill::checkpoint::Checkpoint;
use poorwill::{Arena, Level};
use poorwill::{Config, Device, DeviceOptions, DeviceSpec};
use poorwill_bench::verify::{
    self, VerifyEvent, VerifyObserver, VerifyPlan, VerifyReport, VerifyStage, WhileAsleep,
};

pub use self::args::VerifyArgs;
pub(crate) use self::show::text;
use crate::failure::{CommandOutput, Failure};
use crate::hibernate::OwnHelper;
use crate::progress::Steps;
use crate::text::count;

pub(crate) fn run(args: &VerifyArgs) -> Result<VerifyReport, Failure> {
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    if checkpoint.tensors().is_empty() {
        let files = count(checkpoint.files().len(), "file");
        return Err(Failure::new(format!(
            "there is nothing to verify: no tensor in {files}, {}; name the files or folders of a model",
            named(&args.checkpoints)
        )));
    }
    let config = args.budget.config(&args.device).limited_to(args.limit.map(|limit| limit.0));
    let plan = VerifyPlan {
        device: args.device.clone(),
        cycles: args.cycles,
        level: if args.level == 2 { Level::Two } else { Level::One },
        prepare: args.prepare,
        kv_cache: NonZeroU64::new(args.kv_cache.0),
    };
    if args.hibernate {
        return hibernating(config, &checkpoint, &plan);
    }
    verify(&Arena::open(config)?, &checkpoint, &plan)
}

fn named(paths: &[PathBuf]) -> String {
    let names: Vec<String> = paths.iter().map(|path| format!("{path:?}")).collect();
    names.join(", ")
}

fn hibernating(config: Config, checkpoint: &Checkpoint, plan: &VerifyPlan) -> Result<VerifyReport, Failure> {
    let helper = OwnHelper::start(matches!(config.device, DeviceSpec::Host { .. }))?;
    let options = DeviceOptions::default().backing_up_in(config.host_memory).open_to(config.peers);
    let device = Device::open_with(&config.device, options)?;
    device.register_process(&helper.processes()).map_err(|error| {
        Failure::new(format!("this process cannot be registered for hibernation: {error}"))
    })?;
    let arena = Arena::open_on(&device, config.budget, config.pool)?;
    verify_with(&arena, checkpoint, plan, Some(&|| helper.cycle()))
}

/// Runs a plan in an otherwise unused arena, and closes it.
pub(crate) fn verify(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &VerifyPlan,
) -> Result<VerifyReport, Failure> {
    verify_with(arena, checkpoint, plan, None)
}

fn verify_with(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &VerifyPlan,
    while_asleep: Option<&WhileAsleep<'_>>,
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
    let report = verify::run_with(arena, checkpoint, plan, &observer, while_asleep);
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
        VerifyStage::Hibernate => "hibernating",
        VerifyStage::Wake => "waking",
        _ => "running",
    }
}

impl CommandOutput for VerifyReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        text(self)
    }
}
