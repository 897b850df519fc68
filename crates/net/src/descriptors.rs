//! The limit of file descriptors, raised for the service and not for the commands that it runs.
//!
//! Clients need many, and the soft limit is often 1024. A program that uses `select` may break above it.

use std::io;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// The soft limit before it was raised.
static ORIGINAL: OnceLock<Option<u64>> = OnceLock::new();

/// Raises the soft limit of this process to its hard limit. Commands of engines get the limit before.
///
/// # Errors
/// The system refuses it.
///
/// ```
/// poorwill_net::descriptors::raise()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn raise() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    // If it was raised before, the first limit is the one to restore.
    let _already = ORIGINAL.set(limit.current);
    Ok(())
}

/// Gives a process that has just started the limit before [`raise`].
///
/// # Errors
/// The system refuses it. A process that has ended is no error.
pub fn restore(pid: u32) -> io::Result<()> {
    let Some(&current) = ORIGINAL.get() else { return Ok(()) };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("it has no usual id"))?;
    let maximum = getrlimit(Resource::Nofile).maximum;
    match prlimit(Some(pid), Resource::Nofile, Rlimit { current, maximum }) {
        // It may have ended already.
        Ok(_) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
