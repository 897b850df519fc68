//! Errors of a disk.

use poorwill_core::{DriverError, DriverErrorKind, Op};

/// What the operating system reports, with the next step.
pub(super) fn refused(op: Op, what: &str, error: &std::io::Error, next: &str) -> DriverError {
    let kind = DriverErrorKind::Device {
        code: error.raw_os_error().unwrap_or(0).into(),
        name: what.to_owned(),
        text: format!("{error}; {next}"),
    };
    DriverError::new(op, kind)
}
