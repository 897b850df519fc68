//! `poorwill bench load`: how fast a checkpoint gets into host memory, beside what its storage reads at best.

use poorwill::Device;
use poorwill::checkpoint::Checkpoint;
use poorwill::offload::load_bench::{self, LoadBenchReport, LoadPlan, LoadStage};
use poorwill::offload::{LoadOptions, Switches};

use crate::args::LoadArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::show;

/// The command.
pub(crate) fn run(args: &LoadArgs) -> Result<LoadBenchReport, Failure> {
    let switches = Switches::here()?;
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.open(&args.device);
    let device = Device::open_with(&config.device, &config.host_memory)?;
    let options = LoadOptions { switches, readers: args.readers, ..LoadOptions::default() };
    let plan = LoadPlan { options, rounds: args.rounds };
    let mut shown = None;
    let report = load_bench::run(&device, &checkpoint, &plan, &mut |stage| {
        let label = match stage {
            LoadStage::Direct => "reading",
            LoadStage::Load => "loading",
            _ => "verifying",
        };
        // The one before goes first.
        shown = None;
        shown = Some(Progress::waiting(label));
    })?;
    drop(shown);
    Ok(report)
}

impl Outcome for LoadBenchReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::load(self)
    }
}
