//! `poorwill bench offload`: what weights in host memory cost a forward pass.

use poorwill::offload::Switches;
use poorwill::{Arena, Config, Device, OpenError};
use poorwill_bench::offload::{self, Plan, Report, Source, Stage};

use crate::args::OffloadArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Shown;
use crate::show;

/// The command.
pub(crate) fn run(args: &OffloadArgs) -> Result<Report, Failure> {
    let switches = Switches::here()?;
    let (device, arena) = open(&args.budget.open(&args.device))?;
    let plan = Plan { layers: args.layers, ..Plan::new(args.bytes()) };
    let shown = Shown::default();
    let report = offload::run(&arena, &Source::Buffers(device, switches), &plan, &mut |stage| {
        let label = match stage {
            Stage::Memory => "memory",
            Stage::Copies => "copies",
            Stage::KernelCopies => "kernel",
            Stage::Resident => "resident",
            Stage::InPlace => "in place",
            Stage::SideBySide => "side by side",
            Stage::Prefetch => "prefetch",
            _ => "measuring",
        };
        shown.begin(label, None);
    })?;
    drop(shown);
    arena.close()?;
    Ok(report)
}

/// A device and an arena on all that its budget allows.
fn open(config: &Config) -> Result<(Device, Arena), OpenError> {
    let device = Device::open_with(&config.device, &config.host_memory)?;
    let arena = Arena::open_on(&device, config.budget, config.pool)?;
    Ok((device, arena))
}

impl Outcome for Report {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::offload(self)
    }
}
