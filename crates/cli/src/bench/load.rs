//! `poorwill bench load`: how fast a checkpoint gets into host memory, beside what its storage reads at best.

use poorwill::Device;
use poorwill::checkpoint::Checkpoint;
use poorwill::offload::{LoadOptions, Switches};
use poorwill_bench::load::{self, Plan, Report, Stage};

use crate::args::LoadArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Shown;
use crate::show;

/// The command.
pub(crate) fn run(args: &LoadArgs) -> Result<Report, Failure> {
    let switches = Switches::here()?;
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.open(&args.device);
    let device = Device::open_with(&config.device, &config.host_memory)?;
    let options = LoadOptions::default().switching(switches).reading_with(args.readers);
    let plan = Plan { options, rounds: args.rounds };
    let shown = Shown::default();
    let report = load::run(&device, &checkpoint, &plan, &mut |stage| {
        let label = match stage {
            Stage::Direct => "reading",
            Stage::Load => "loading",
            _ => "verifying",
        };
        shown.begin(label, None);
    })?;
    drop(shown);
    Ok(report)
}

impl Outcome for Report {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::load(self)
    }
}
