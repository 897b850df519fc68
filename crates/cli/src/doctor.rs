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
    let plan = Plan::default()
        .on(args.device.clone())
        .within(args.budget.clone().unwrap_or_default())
        .claiming(args.claims.clone());
    let report = doctor::examine(&plan)?;
    let refused = report.refused().map(|(device, reason)| format!("{device}: {reason}"));
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
