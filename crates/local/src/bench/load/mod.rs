//! `poorwill bench load`: time and peak memory of loading a checkpoint into host memory.

mod args;
mod show;

use poorwill::Device;
use poorwill::checkpoint::Checkpoint;
use poorwill::offload::{LoadOptions, Switches};
use poorwill_bench::load::{self, LoadBenchReport, LoadPlan, LoadStage};

pub use self::args::LoadArgs;
use crate::failure::{CommandOutput, Failure};
use crate::progress::Steps;

pub(crate) fn run(args: &LoadArgs) -> Result<LoadBenchReport, Failure> {
    let switches = Switches::from_env()?;
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.config(&args.device);
    let device = Device::open_with(&config.device, &config.host_memory)?;
    let options = LoadOptions::default().switching(switches).reading_with(args.readers);
    let plan = LoadPlan { options, rounds: args.rounds };
    let steps = Steps::default();
    let report = load::run(&device, &checkpoint, &plan, &mut |stage| {
        let label = match stage {
            LoadStage::Direct => "reading",
            LoadStage::Load => "loading",
            _ => "verifying",
        };
        steps.begin(label, None);
    })?;
    drop(steps);
    Ok(report)
}

impl CommandOutput for LoadBenchReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::load(self)
    }
}
