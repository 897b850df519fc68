//! What happens to this process in the steps of a checkpoint.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::CheckpointStep;

use crate::text::number;

/// An item of the setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Happening {
    /// The step fails with this code, once. `is_lost`: the process has lost its device, and says so.
    Fails { step: CheckpointStep, code: i32, is_lost: bool },
    /// The step writes `PATH.reached`, and waits for `PATH`.
    Holds { step: CheckpointStep, path: PathBuf },
    /// It has something that a restore fails on.
    Has(Obstacle),
}

/// What makes a restore fail, as it shows in `/proc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// It is rank 1 of a communicator of NCCL.
    Communicator,
    /// It is so, and the communicator is suspended: nothing fails.
    SuspendedCommunicator,
    /// It has opened memory of another process.
    SharedMemory,
}

impl Obstacle {
    /// What the restore fails with.
    pub(crate) fn code(self) -> Option<i32> {
        match self {
            Self::Communicator => Some(801),
            Self::SuspendedCommunicator => None,
            Self::SharedMemory => Some(1),
        }
    }
}

/// The items, those that happen once until they have.
#[derive(Debug, Default)]
pub(crate) struct Script {
    events: Mutex<Vec<Happening>>,
    obstacle: Option<Obstacle>,
}

impl Script {
    pub(crate) fn of(events: Vec<Happening>) -> Self {
        let obstacle = events.iter().find_map(|event| match event {
            Happening::Has(obstacle) => Some(*obstacle),
            _ => None,
        });
        Self { events: Mutex::new(events), obstacle }
    }

    pub(crate) fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle
    }

    /// Waits where a step is held. Then its failure: the code, and whether the device is lost.
    pub(crate) fn run(&self, of: CheckpointStep) -> Option<(i32, bool)> {
        let due = self.events.lock().map(|mut events| {
            let is_due = |event: &mut Happening| match event {
                Happening::Fails { step, .. } | Happening::Holds { step, .. } => *step == of,
                Happening::Has(_) => false,
            };
            events.extract_if(.., is_due).collect::<Vec<Happening>>()
        });
        let mut failure = None;
        for event in due.into_iter().flatten() {
            match event {
                Happening::Holds { path, .. } => wait_for(&path),
                Happening::Fails { code, is_lost, .. } => failure = Some((code, is_lost)),
                Happening::Has(_) => {}
            }
        }
        failure
    }
}

fn wait_for(path: &Path) {
    let reached = path.with_extension("reached");
    if let Err(error) = fs::write(&reached, "") {
        eprintln!("fake libcuda: cannot write {}: {error}", reached.display());
    }
    while !path.exists() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// `STEP:CODE`, `STEP:CODE:failed`, `STEP:hold:PATH`, `communicator`, `suspended` or `ipc`.
pub(crate) fn event(item: &str) -> Result<Happening, String> {
    let parts: Vec<&str> = item.splitn(3, ':').collect();
    match parts[..] {
        ["communicator"] => Ok(Happening::Has(Obstacle::Communicator)),
        ["suspended"] => Ok(Happening::Has(Obstacle::SuspendedCommunicator)),
        ["ipc"] => Ok(Happening::Has(Obstacle::SharedMemory)),
        [name, "hold", path] => Ok(Happening::Holds { step: step(name)?, path: path.into() }),
        [name, code] => Ok(Happening::Fails { step: step(name)?, code: self::code(code)?, is_lost: false }),
        [name, code, "failed"] => {
            Ok(Happening::Fails { step: step(name)?, code: self::code(code)?, is_lost: true })
        }
        _ => Err("write STEP:CODE, STEP:CODE:failed, STEP:hold:PATH, communicator, suspended or ipc".into()),
    }
}

fn step(name: &str) -> Result<CheckpointStep, String> {
    Ok(match name {
        "lock" => CheckpointStep::Lock,
        "checkpoint" => CheckpointStep::Checkpoint,
        "restore" => CheckpointStep::Restore,
        "unlock" => CheckpointStep::Unlock,
        _ => return Err(format!("there is no step `{name}`")),
    })
}

fn code(text: &str) -> Result<i32, String> {
    match i32::try_from(number(text)?).map_err(|error| error.to_string())? {
        0 => Err("codes begin at 1".into()),
        code => Ok(code),
    }
}

/// What of an obstacle shows in `/proc`, for as long as it is kept.
#[derive(Debug)]
pub(crate) struct Shown {
    _socket: Option<UnixDatagram>,
    _file: Option<fs::File>,
}

/// Has an obstacle show as it does on a GPU.
pub(crate) fn show(obstacle: Obstacle) -> std::io::Result<Shown> {
    let pid = std::process::id();
    match obstacle {
        Obstacle::Communicator | Obstacle::SuspendedCommunicator => {
            let name = format!("tmp/nccl-socket-1-{pid:x}");
            let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
            Ok(Shown { _socket: Some(socket), _file: None })
        }
        Obstacle::SharedMemory => {
            let path = PathBuf::from(format!("/dev/shm/cuda.shm.0.{pid:x}.1"));
            let file = fs::File::create(&path)?;
            fs::remove_file(&path)?; // The name stays with the descriptor.
            Ok(Shown { _socket: None, _file: Some(file) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_parsed() {
        let (step, code) = (CheckpointStep::Restore, 2);
        assert_eq!(event("restore:2"), Ok(Happening::Fails { step, code, is_lost: false }));
        assert_eq!(event("restore:2:failed"), Ok(Happening::Fails { step, code, is_lost: true }));
        let path = PathBuf::from("/a:b");
        assert_eq!(event("lock:hold:/a:b"), Ok(Happening::Holds { step: CheckpointStep::Lock, path }));
        assert_eq!(event("ipc"), Ok(Happening::Has(Obstacle::SharedMemory)));
        for malformed in
            ["", "lock", "lock:", "lock:0", "lock:x", "state:1", "lock:1:lost", "lock:hold", "nccl"]
        {
            assert!(event(malformed).is_err(), "{malformed}");
        }
    }

    #[test]
    fn a_failure_happens_once() {
        let script = Script::of(vec![event("lock:7").unwrap(), event("communicator").unwrap()]);
        assert_eq!(script.run(CheckpointStep::Unlock), None);
        assert_eq!(script.run(CheckpointStep::Lock), Some((7, false)));
        assert_eq!(script.run(CheckpointStep::Lock), None);
        assert_eq!(script.obstacle, Some(Obstacle::Communicator));
    }
}
