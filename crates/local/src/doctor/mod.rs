//! `poorwill doctor`: devices, memory limits, and advice for an engine.
//!
//! The exit code is 0 whatever the report says, unless a named device is missing or a claim does not fit.

mod args;
mod show;

use std::path::PathBuf;

use poorwill::doctor::{self, DoctorReport, Plan};
use serde::Serialize;

pub use self::args::DoctorArgs;
use crate::failure::{CommandOutput, Failure};

#[derive(Debug, Serialize)]
pub(crate) struct DoctorOutcome {
    #[serde(flatten)]
    report: DoctorReport,
    #[serde(skip)]
    refused: Option<String>,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<DoctorOutcome, Failure> {
    let mut plan = Plan::default();
    plan.timeout = args.timeout.unwrap_or(plan.timeout);
    let plan = plan
        .on(args.device.clone())
        .budgeted(args.budget.clone().unwrap_or_default())
        .claiming(args.claims.clone())
        .asking(std::env::var_os("POORWILL_BROKER").filter(|path| !path.is_empty()).map(PathBuf::from));
    let report = doctor::examine(&plan)?;
    let refused = report.refused().map(|(device, reason)| format!("{device}: {reason}"));
    Ok(DoctorOutcome { report, refused })
}

impl CommandOutput for DoctorOutcome {
    const MISMATCH: &'static str = "the claims do not fit";

    fn mismatch(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    fn text(&self) -> String {
        show::doctor(&self.report)
    }
}
