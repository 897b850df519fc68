//! `poorwill doctor`: what this computer has to work with, and what an engine should be given of it.
//!
//! A report, so it ends with 0 whatever it found, unless a device was named that is not here or a claim does not fit.

use poorwill::doctor::{self, DoctorReport, Plan};
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::failure::{Failure, Outcome};
use crate::show;

/// The report, and what was refused.
#[derive(Debug, Serialize)]
pub(crate) struct Examined {
    #[serde(flatten)]
    report: DoctorReport,
    #[serde(skip)]
    refused: Option<String>,
}

/// The command.
pub(crate) fn run(args: &DoctorArgs) -> Result<Examined, Failure> {
    let plan = Plan {
        device: args.device.clone(),
        caps: args.budget.clone().unwrap_or_default(),
        claims: args.claims.clone(),
    };
    let report = doctor::examine(&plan)?;
    // A claim is for the devices that are asked about: all, or the one that is named. The host device that comes
    // with a GPU is no place for an engine.
    let asked = report.devices.iter().filter(|device| match &plan.device {
        Some(named) => device.id == named.id(),
        None => device.gpu.is_some() || report.devices.len() == 1,
    });
    let refused =
        asked.filter_map(|device| Some(format!("{}: {}", device.id, device.engine.refused.as_deref()?)));
    let refused: Vec<String> = refused.collect();
    let refused = (!refused.is_empty()).then(|| refused.join("; "));
    Ok(Examined { report, refused })
}

impl Outcome for Examined {
    const WRONG: &'static str = "the claims do not fit";

    fn mismatch(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn text(&self) -> String {
        show::doctor(&self.report)
    }
}
