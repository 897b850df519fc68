//! `poorwill bench offload`: what weights in host memory cost a forward pass.

mod args;
mod show;

use poorwill::offload::Switches;
use poorwill::{Arena, Config, Device, OpenError};
use poorwill_bench::offload::{self, OffloadPlan, OffloadReport, OffloadStage, Source};

pub use self::args::OffloadArgs;
use crate::failure::{CommandOutput, Failure};
use crate::progress::Steps;

pub(crate) fn run(args: &OffloadArgs) -> Result<OffloadReport, Failure> {
    let switches = Switches::from_env()?;
    let (device, arena) = open(&args.budget.config(&args.device))?;
    let plan = OffloadPlan { layers: args.layers, ..OffloadPlan::new(args.bytes()) };
    let steps = Steps::default();
    let report = offload::run(&arena, &Source::Buffers(device, switches), &plan, &mut |stage| {
        let label = match stage {
            OffloadStage::Memory => "memory",
            OffloadStage::Copies => "copies",
            OffloadStage::KernelCopies => "kernel",
            OffloadStage::Resident => "resident",
            OffloadStage::InPlace => "in place",
            OffloadStage::SideBySide => "side by side",
            OffloadStage::Prefetch => "prefetch",
            _ => "measuring",
        };
        steps.begin(label, None);
    })?;
    drop(steps);
    arena.close()?;
    Ok(report)
}

fn open(config: &Config) -> Result<(Device, Arena), OpenError> {
    let device = Device::open_with(&config.device, &config.host_memory)?;
    let arena = Arena::open_on(&device, config.budget, config.pool)?;
    Ok((device, arena))
}

impl CommandOutput for OffloadReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::offload(self)
    }
}
