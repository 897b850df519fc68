//! `poorwill doctor`: what this computer has to work with. A report, so it ends with 0 whatever it found.

use poorwill::doctor::{self, DoctorReport};

use crate::failure::Outcome;
use crate::show;

/// The command.
pub(crate) fn run() -> DoctorReport {
    doctor::examine()
}

impl Outcome for DoctorReport {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        show::doctor(self)
    }
}
