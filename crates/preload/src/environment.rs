//! Settings in the environment. A value that is none is an error of the call that needs it.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use poorwill::backup::Compress;
use poorwill::lend::Lending;

use crate::code::{Failure, Result};

pub(crate) const ENABLE: &str = "TMS_INIT_ENABLE";
pub(crate) const CPU_BACKUP: &str = "TMS_INIT_ENABLE_CPU_BACKUP";
pub(crate) const DISK_BACKUP: &str = "TMS_INIT_ENABLE_DISK_BACKUP";
pub(crate) const RETAIN: &str = "TMS_RETAIN_CPU_BACKUP";
const BACKEND: &str = "TMS_INIT_CPU_BACKUP_BACKEND";
const DISK_FOLDER: &str = "TMS_DISK_BACKUP_DIR";
const COMPRESS: &str = "POORWILL_COMPRESS";
const LEND: &str = "POORWILL_LEND";
const BROKER: &str = "POORWILL_BROKER";
const WAKE_TIMEOUT: &str = "POORWILL_WAKE_TIMEOUT";

const WAKE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(2);
const WAKE_TIMEOUT_MAX_S: f64 = 3600.0;

/// What becomes of a backup in host memory after a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum Backend {
    /// It stays, so that the next pause copies changes only.
    #[default]
    Pinned,
    /// It is dropped, unless backups are retained.
    Mmap,
}

impl Backend {
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "pinned" => Some(Self::Pinned),
            "mmap" => Some(Self::Mmap),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static std::ffi::CStr {
        match self {
            Self::Pinned => c"pinned",
            Self::Mmap => c"mmap",
        }
    }
}

/// False where it is not set.
pub(crate) fn flag(variable: &'static str) -> Result<bool> {
    parsed(variable, "use 1, true or yes, or 0, false or no", false, |value| match value {
        "1" | "true" | "TRUE" | "yes" | "YES" => Some(true),
        "0" | "false" | "FALSE" | "no" | "NO" | "" => Some(false),
        _ => None,
    })
}

pub(crate) fn backend() -> Result<Backend> {
    parsed(BACKEND, "use pinned or mmap", Backend::default(), |value| {
        if value.is_empty() { Some(Backend::default()) } else { Backend::named(value) }
    })
}

pub(crate) fn compress() -> Result<Compress> {
    parsed(COMPRESS, "use off, auto or always", Compress::Off, |value| match value {
        "off" | "" => Some(Compress::Off),
        "auto" => Some(Compress::Auto),
        "always" => Some(Compress::Always),
        _ => None,
    })
}

/// The broker at which pauses lend memory, if they do. One that is not there is not started.
pub(crate) fn lending() -> Result<Option<Lending>> {
    if !flag(LEND)? {
        return Ok(None);
    }
    let socket = env::var_os(BROKER).filter(|socket| !socket.is_empty());
    let lending = socket.map_or_else(Lending::default, |socket| Lending::default().at(socket));
    Ok(Some(lending.named("torch_memory_saver")))
}

/// How long a resume waits for memory that others are about to release. `None`: not at all.
pub(crate) fn wake_timeout() -> Result<Option<Duration>> {
    let timeout =
        parsed(WAKE_TIMEOUT, "use a number of seconds from 0 to 3600", WAKE_TIMEOUT_DEFAULT, seconds)?;
    Ok((!timeout.is_zero()).then_some(timeout))
}

fn seconds(value: &str) -> Option<Duration> {
    let value = value.trim();
    if value.is_empty() {
        return Some(WAKE_TIMEOUT_DEFAULT);
    }
    let number = value.parse().ok().filter(|number| (0.0..=WAKE_TIMEOUT_MAX_S).contains(number))?;
    Some(Duration::from_secs_f64(number))
}

pub(crate) fn disk_folder() -> PathBuf {
    let named = env::var_os(DISK_FOLDER).filter(|folder| !folder.is_empty());
    named.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

fn parsed<T>(
    variable: &'static str,
    known: &'static str,
    otherwise: T,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T> {
    let Some(value) = env::var_os(variable) else { return Ok(otherwise) };
    let value = value.to_string_lossy();
    parse(&value).ok_or_else(|| Failure::Setting { variable, value: value.escape_debug().to_string(), known })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_a_number_within_an_hour() {
        assert_eq!(seconds(" "), Some(WAKE_TIMEOUT_DEFAULT));
        assert_eq!(seconds(" 0.25"), Some(Duration::from_millis(250)));
        assert_eq!((seconds("0"), seconds("3600")), (Some(Duration::ZERO), Some(Duration::from_secs(3600))));
        assert_eq!(["-1", "3601", "NaN", "inf", "2s", "soon"].map(seconds), [None; 6]);
    }
}
