//! The side that asks.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use poorwill_core::hibernation::{
    CheckpointError, CheckpointErrorKind, CheckpointStep, Checkpointer, ProcessInspection, ProcessState,
    Result,
};
use rustix::net::sockopt;

use super::socket_path;
use super::wire::{Answer, Request, parse_answer};
use crate::other_process;

/// How long a process may take to answer, by default.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Takes the processes of a folder off their devices.
///
/// `state`, `inspect` and `unlock` end within a limit, 5 seconds by default; `lock` within its own and this one. A
/// checkpoint and a restore take as long as they take, unless the process is stopped.
#[derive(Debug, Clone)]
pub struct HostCheckpointer {
    folder: PathBuf,
    answer_max: Duration,
}

impl HostCheckpointer {
    /// For the processes that are registered in this folder.
    #[must_use]
    pub fn open(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), answer_max: ANSWER_MAX }
    }

    /// Sets how long a process may take to answer.
    #[must_use]
    pub fn answering_within(mut self, answer_max: Duration) -> Self {
        self.answer_max = answer_max;
        self
    }

    fn ask(&self, step: CheckpointStep, pid: u32) -> Result<Answer> {
        self.ask_for(Request::new(step), pid)
    }

    fn ask_for(&self, request: Request, pid: u32) -> Result<Answer> {
        let failed = |kind| CheckpointError::new(request.step, pid, kind);
        let socket = socket_path(&self.folder, pid);
        other_process::expect(request.step, pid).inspect_err(|error| {
            if error.kind == CheckpointErrorKind::NoSuchProcess {
                let _ = fs::remove_file(&socket);
            }
        })?;
        let stream = connect(&socket, pid).map_err(failed)?;
        match self.exchange(&stream, request, pid) {
            Ok(text) => match parse_answer(&text) {
                Some(answer) => answer.map_err(failed),
                None => Err(failed(self.ended(&socket, pid))),
            },
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                Err(failed(CheckpointErrorKind::NoAnswer { waited: self.limit(request) }))
            }
            Err(_) => Err(failed(self.ended(&socket, pid))),
        }
    }

    fn limit(&self, request: Request) -> Duration {
        self.answer_max.saturating_add(request.wait_max)
    }

    /// `TimedOut` without an answer in time.
    fn exchange(&self, mut stream: &UnixStream, request: Request, pid: u32) -> io::Result<String> {
        writeln!(stream, "{request}")?;
        let has_limit = !matches!(request.step, CheckpointStep::Checkpoint | CheckpointStep::Restore);
        let limit = self.limit(request);
        let deadline = Instant::now().checked_add(limit);
        let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let wait = left.filter(|left| !left.is_zero()).unwrap_or(self.answer_max);
            stream.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
            match stream.read(&mut buffer) {
                Ok(0) => return String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into()),
                Ok(read) => text.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if has_limit || other_process::is_stopped(pid) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Why a connection has ended without an answer.
    fn ended(&self, socket: &Path, pid: u32) -> CheckpointErrorKind {
        if other_process::ends_within(pid, self.answer_max) {
            let _ = fs::remove_file(socket);
            CheckpointErrorKind::NoSuchProcess
        } else {
            CheckpointErrorKind::NoDevice
        }
    }
}

impl Checkpointer for HostCheckpointer {
    fn state(&self, pid: u32) -> Result<ProcessState> {
        match self.ask(CheckpointStep::State, pid)? {
            Answer::Inspection(ProcessInspection { state, .. }) | Answer::State(state) => Ok(state),
            Answer::Done => Err(without_state(CheckpointStep::State, pid)),
        }
    }

    fn inspect(&self, pid: u32) -> Result<ProcessInspection> {
        match self.ask(CheckpointStep::Inspect, pid)? {
            Answer::Inspection(inspection) => Ok(inspection),
            _ => Err(without_state(CheckpointStep::Inspect, pid)),
        }
    }

    /// Each process has a device of its own.
    fn has_shared_devices(&self) -> bool {
        false
    }

    fn free_bytes(&self, _uuid: &str) -> Option<u64> {
        None
    }

    fn used_bytes(&self, _uuid: &str) -> Option<u64> {
        None
    }

    fn lock(&self, pid: u32, wait_max: Duration) -> Result<()> {
        self.ask_for(Request { step: CheckpointStep::Lock, wait_max }, pid).map(drop)
    }

    fn checkpoint(&self, pid: u32) -> Result<()> {
        self.ask(CheckpointStep::Checkpoint, pid).map(drop)
    }

    fn restore(&self, pid: u32) -> Result<()> {
        self.ask(CheckpointStep::Restore, pid).map(drop)
    }

    fn unlock(&self, pid: u32) -> Result<()> {
        self.ask(CheckpointStep::Unlock, pid).map(drop)
    }
}

/// The process's own socket: its number is checked, since another process may have had the name.
fn connect(socket: &Path, pid: u32) -> std::result::Result<UnixStream, CheckpointErrorKind> {
    let stream = UnixStream::connect(socket).map_err(|error| match error.kind() {
        ErrorKind::NotFound => CheckpointErrorKind::NoDevice,
        ErrorKind::ConnectionRefused => {
            // Of a process that had this number before.
            let _ = fs::remove_file(socket);
            CheckpointErrorKind::NoDevice
        }
        ErrorKind::PermissionDenied => CheckpointErrorKind::NotPermitted {
            reason: format!("its socket {} may not be opened: ask as its user", socket.display()),
        },
        _ => CheckpointErrorKind::Unsupported {
            reason: format!("its socket {} cannot be reached: {error}", socket.display()),
        },
    })?;
    let is_its_own = sockopt::socket_peercred(&stream)
        .is_ok_and(|peer| peer.pid.as_raw_nonzero().get().cast_unsigned() == pid);
    if is_its_own { Ok(stream) } else { Err(CheckpointErrorKind::NoDevice) }
}

fn without_state(step: CheckpointStep, pid: u32) -> CheckpointError {
    let reason = "its process is of another version of Poorwill: it answered without a state".to_owned();
    CheckpointError::new(step, pid, CheckpointErrorKind::Unsupported { reason })
}
