//! The registration of this process in a folder.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use poorwill_core::hibernation::ProcessState;

use super::position::{DeviceCall, DeviceLost, HostProcessMemory, Steps};
use super::serve::serve;
use super::socket_path;
use crate::process::Owner;

/// This process, registered as one that can be taken off its devices. It takes part until this is dropped.
///
/// ```
/// use poorwill_core::hibernation::{HeldMemory, ProcessState};
/// use poorwill_driver::host::{HostProcess, HostProcessMemory, StepFailure};
///
/// struct Nothing;
///
/// impl HostProcessMemory for Nothing {
///     fn held(&self) -> Vec<HeldMemory> {
///         Vec::new()
///     }
///     fn take_off(&self) -> Result<(), StepFailure> {
///         Ok(())
///     }
///     fn put_back(&self) -> Result<(), StepFailure> {
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let process = HostProcess::register(folder, Box::new(Nothing))?;
/// assert_eq!(process.state(), ProcessState::Running);
/// let call = process.enter()?; // Waits while the process is locked.
/// drop(call);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HostProcess {
    steps: Arc<Steps>,
    socket: PathBuf,
    owner: Owner,
    /// `None` in a forked child, where the thread does not exist.
    thread: Option<JoinHandle<()>>,
}

impl HostProcess {
    /// Registers this process in a folder, which it makes if there is none. Sockets of processes that have ended are
    /// removed.
    ///
    /// # Errors
    /// What the operating system reports; `AlreadyExists` if this process is registered there.
    pub fn register(folder: &Path, memory: Box<dyn HostProcessMemory>) -> io::Result<Self> {
        let pid = std::process::id();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        remove_dead(folder);
        let socket = socket_path(folder, pid);
        if UnixStream::connect(&socket).is_ok() {
            let reason = format!("process {pid} is registered in {} already", folder.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, reason));
        }
        let owner = Owner::this().map_err(io::Error::other)?;
        let steps = Arc::new(Steps::new(memory));
        let listener = listen(folder, &socket)?;
        let serving = Arc::clone(&steps);
        let thread = thread::Builder::new()
            .name("poorwill-host-process".into())
            .spawn(move || serve(&listener, &serving))?;
        Ok(Self { steps, socket, owner, thread: Some(thread) })
    }

    /// Begins a device call. Waits while the process is locked, and at once in a forked child.
    ///
    /// # Errors
    /// The process has lost its device.
    pub fn enter(&self) -> Result<DeviceCall, DeviceLost> {
        if self.owner.is_here() { self.steps.enter() } else { Ok(DeviceCall::uncounted()) }
    }

    /// Begins a call that looks at queued work. It passes a lock, and waits for a checkpoint or restore under way. `None`
    /// while the process is off its devices.
    ///
    /// # Errors
    /// The process has lost its device.
    pub fn look(&self) -> Result<Option<DeviceCall>, DeviceLost> {
        if self.owner.is_here() { self.steps.look() } else { Ok(Some(DeviceCall::uncounted())) }
    }

    /// Where it stands.
    #[must_use]
    pub fn state(&self) -> ProcessState {
        self.steps.state()
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let thread = self.thread.take();
        if !self.owner.is_here() {
            std::mem::forget(thread);
            return;
        }
        self.steps.leave();
        // The thread wakes up by this, sees that the process has left, and ends.
        if UnixStream::connect(&self.socket).is_ok() {
            let _ = thread.map(JoinHandle::join);
        }
        let _ = fs::remove_file(&self.socket);
    }
}

/// Under another name until it listens, so that each socket of a living process answers.
fn listen(folder: &Path, socket: &Path) -> io::Result<UnixListener> {
    let making = folder.join(format!("{}.making", std::process::id()));
    let _ = fs::remove_file(&making);
    let made = UnixListener::bind(&making).and_then(|listener| {
        fs::set_permissions(&making, fs::Permissions::from_mode(0o600))?;
        fs::rename(&making, socket)?;
        Ok(listener)
    });
    made.inspect_err(|_| drop(fs::remove_file(&making)))
}

/// What processes that were killed have left.
fn remove_dead(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    for path in entries.map(|entry| entry.path()) {
        let pid = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        if pid.is_some_and(crate::other_process::has_ended) {
            let _ = fs::remove_file(&path);
        }
    }
}
