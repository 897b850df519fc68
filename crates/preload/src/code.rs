//! Failures, as sentences and as codes of `cudaError_t`.

use std::ffi::c_int;
use std::process;

use poorwill::{DriverErrorKind, OpenError, PoolError, chain};

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const MEMORY_ALLOCATION: c_int = 2;
const INITIALIZATION_ERROR: c_int = 3;
const SYMBOL_NOT_FOUND: c_int = 302;
const STREAM_CAPTURE_UNSUPPORTED: c_int = 900;
pub(crate) const UNKNOWN: c_int = 999;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{variable} is `{value}`, and that is no value of it: {known}")]
    Setting { variable: &'static str, value: String, known: &'static str },
    #[error("{0}")]
    Argument(String),
    #[error(
        "the memory is that of process {owner}, and this is its fork {}: start a process afresh instead",
        process::id()
    )]
    Forked { owner: u32 },
    #[error("no library of this process has `{name}`: load the CUDA runtime as a shared library")]
    NoRuntime { name: &'static str },
    #[error("the CUDA runtime's {name} returned {code}")]
    Runtime { name: &'static str, code: c_int },
    #[error(
        "cannot allocate {bytes} bytes: {free_bytes} are free on the device, and {margin_bytes} of them are a margin"
    )]
    Margin { bytes: u64, free_bytes: u64, margin_bytes: u64 },
    #[error("{}", chain(_0))]
    Open(#[from] OpenError),
    #[error("{}", chain(_0))]
    Pool(#[from] PoolError),
    #[error("{failed}; and it could not be undone: {undo}")]
    NotUndone { failed: Box<Failure>, undo: Box<Failure> },
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn code(&self) -> c_int {
        match self {
            Self::Setting { .. } | Self::Argument(_) => INVALID_VALUE,
            Self::Margin { .. } => MEMORY_ALLOCATION,
            Self::Forked { .. } | Self::Open(_) => INITIALIZATION_ERROR,
            Self::NoRuntime { .. } => SYMBOL_NOT_FOUND,
            Self::Runtime { code, .. } => *code,
            Self::Pool(error) => code_of(error),
            Self::NotUndone { failed, .. } => failed.code(),
        }
    }
}

fn code_of(error: &PoolError) -> c_int {
    match error {
        PoolError::OverLimit { .. }
        | PoolError::DeviceFull { .. }
        | PoolError::HeldByCapture { .. }
        | PoolError::TimedOut { .. }
        | PoolError::InvalidRequest { .. } => MEMORY_ALLOCATION, // Its size is all that can be wrong.
        PoolError::Capturing { .. } => STREAM_CAPTURE_UNSUPPORTED,
        PoolError::WrongProcess(_) => INITIALIZATION_ERROR,
        PoolError::InvalidRange { .. } => INVALID_VALUE,
        PoolError::Driver { source, .. } if matches!(source.kind, DriverErrorKind::Capturing { .. }) => {
            STREAM_CAPTURE_UNSUPPORTED
        }
        _ => UNKNOWN,
    }
}
