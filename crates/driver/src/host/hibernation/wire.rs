//! What goes over a process's socket: a request of one line, and an answer of lines up to `end`.

use std::fmt::{self, Write};
use std::time::Duration;

use poorwill_core::hibernation::{
    CheckpointErrorKind, CheckpointStep, HeldMemory, Obstacle, ProcessInspection, ProcessState,
};

/// The last line of an answer: without it the process has ended.
pub(super) const END: &str = "end";
/// Longer than any request.
pub(super) const REQUEST_BYTES_MAX: u64 = 256;

const STATES: [ProcessState; 6] = [
    ProcessState::Running,
    ProcessState::Locked,
    ProcessState::Checkpointed,
    ProcessState::Checkpointing,
    ProcessState::Restoring,
    ProcessState::Failed,
];

/// A step, with a lock's limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) step: CheckpointStep,
    pub(super) wait_max: Duration,
}

/// What a step returns: a state or an inspection, where it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    State(ProcessState),
    Inspection(ProcessInspection),
}

impl Request {
    pub(super) fn new(step: CheckpointStep) -> Self {
        Self { step, wait_max: Duration::ZERO }
    }

    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let mut request = Self::new(match words.next()? {
            "state" => CheckpointStep::State,
            "inspect" => CheckpointStep::Inspect,
            "lock" => CheckpointStep::Lock,
            "checkpoint" => CheckpointStep::Checkpoint,
            "restore" => CheckpointStep::Restore,
            "unlock" => CheckpointStep::Unlock,
            _ => return None,
        });
        if request.step == CheckpointStep::Lock {
            request.wait_max = Duration::from_millis(words.next()?.parse().ok()?);
        }
        words.next().is_none().then_some(request)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            CheckpointStep::Inspect => f.write_str("inspect"),
            CheckpointStep::Lock => write!(f, "lock {}", millis_up(self.wait_max)),
            step => write!(f, "{step}"),
        }
    }
}

/// Rounded up, so that a wait is not cut short.
fn millis_up(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

pub(super) fn write_answer(answer: &Result<Answer, CheckpointErrorKind>) -> String {
    let mut text = String::new();
    let written = match answer {
        Ok(Answer::Done) => Ok(()),
        Ok(Answer::State(state)) => writeln!(text, "state {state}"),
        Ok(Answer::Inspection(inspection)) => write_inspection(&mut text, inspection),
        Err(kind) => write_error(&mut text, kind),
    };
    debug_assert!(written.is_ok(), "writing to a string does not fail");
    text + END + "\n"
}

fn write_inspection(text: &mut String, inspection: &ProcessInspection) -> fmt::Result {
    writeln!(text, "state {}", inspection.state)?;
    for held in &inspection.held {
        match held.used_bytes {
            Some(bytes) => writeln!(text, "held {} {bytes}", held.uuid)?,
            None => writeln!(text, "held {} unknown", held.uuid)?,
        }
    }
    inspection.obstacles.iter().try_for_each(|obstacle| {
        let (kind, what) = match obstacle {
            Obstacle::SharedMemory(what) => ("shared_memory", what),
            Obstacle::PeerMapping(what) => ("peer_mapping", what),
            Obstacle::Service(what) => ("service", what),
            Obstacle::Communicator(what) => ("communicator", what),
            _ => ("service", &obstacle.to_string()),
        };
        writeln!(text, "obstacle {kind} {}", in_one_line(what))
    })
}

fn write_error(text: &mut String, kind: &CheckpointErrorKind) -> fmt::Result {
    match kind {
        CheckpointErrorKind::NotPermitted { reason } => {
            writeln!(text, "error not_permitted {}", in_one_line(reason))
        }
        CheckpointErrorKind::WrongState { found, wanted, .. } => {
            writeln!(text, "error wrong_state {found} {wanted}")
        }
        CheckpointErrorKind::Busy { wait_max } => writeln!(text, "error busy {}", millis_up(*wait_max)),
        CheckpointErrorKind::OutOfHostMemory => writeln!(text, "error out_of_host_memory"),
        CheckpointErrorKind::OutOfDeviceMemory => writeln!(text, "error out_of_device_memory"),
        CheckpointErrorKind::NoDevice => writeln!(text, "error no_device"),
        CheckpointErrorKind::Unsupported { reason } => {
            writeln!(text, "error unsupported {}", in_one_line(reason))
        }
        CheckpointErrorKind::Refused { code, name, text: why } => {
            writeln!(
                text,
                "error refused {code} {} {}",
                name.replace(char::is_whitespace, "_"),
                in_one_line(why)
            )
        }
        other => writeln!(text, "error unsupported {}", in_one_line(&other.to_string())),
    }
}

fn in_one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// `None` for an answer that is not complete, or not of this protocol.
pub(super) fn parse_answer(text: &str) -> Option<Result<Answer, CheckpointErrorKind>> {
    let lines = text.strip_suffix('\n')?.strip_suffix(END)?;
    let (mut state, mut held, mut obstacles) = (None, Vec::new(), Vec::new());
    for line in lines.lines() {
        let (word, rest) = line.split_once(' ')?;
        match word {
            "error" => return parse_error(rest).map(Err),
            "state" => state = Some(parse_state(rest)?),
            "held" => held.push(parse_held(rest)?),
            "obstacle" => obstacles.push(parse_obstacle(rest)?),
            _ => return None,
        }
    }
    Some(Ok(match state {
        Some(state) => Answer::Inspection(ProcessInspection { state, held, obstacles }),
        None => Answer::Done,
    }))
}

fn parse_state(text: &str) -> Option<ProcessState> {
    STATES.into_iter().find(|state| state.as_str() == text)
}

fn parse_held(text: &str) -> Option<HeldMemory> {
    let (uuid, bytes) = text.rsplit_once(' ')?;
    let used_bytes = if bytes == "unknown" { None } else { Some(bytes.parse().ok()?) };
    Some(HeldMemory { uuid: uuid.to_owned(), used_bytes })
}

fn parse_obstacle(text: &str) -> Option<Obstacle> {
    let (kind, what) = text.split_once(' ')?;
    let what = what.to_owned();
    Some(match kind {
        "communicator" => Obstacle::Communicator(what),
        "shared_memory" => Obstacle::SharedMemory(what),
        "peer_mapping" => Obstacle::PeerMapping(what),
        "service" => Obstacle::Service(what),
        _ => return None,
    })
}

fn parse_error(text: &str) -> Option<CheckpointErrorKind> {
    let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
    Some(match kind {
        "no_device" => CheckpointErrorKind::NoDevice,
        "not_permitted" => CheckpointErrorKind::NotPermitted { reason: rest.to_owned() },
        "unsupported" => CheckpointErrorKind::Unsupported { reason: rest.to_owned() },
        "busy" => CheckpointErrorKind::Busy { wait_max: Duration::from_millis(rest.parse().ok()?) },
        "out_of_host_memory" => CheckpointErrorKind::OutOfHostMemory,
        "out_of_device_memory" => CheckpointErrorKind::OutOfDeviceMemory,
        "wrong_state" => {
            let (found, wanted) = rest.split_once(' ')?;
            CheckpointErrorKind::wrong_state(parse_state(found)?, parse_state(wanted)?)
        }
        "refused" => {
            let mut words = rest.splitn(3, ' ');
            let (code, name) = (words.next()?.parse().ok()?, words.next()?.to_owned());
            CheckpointErrorKind::Refused { code, name, text: words.next()?.to_owned() }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_back_as_they_were() {
        for line in ["state", "inspect", "lock 0", "lock 1500", "checkpoint", "restore", "unlock"] {
            assert_eq!(Request::parse(line).unwrap().to_string(), line);
        }
        let short = Request { wait_max: Duration::from_micros(1), ..Request::new(CheckpointStep::Lock) };
        assert_eq!(short.to_string(), "lock 1");
        for malformed in ["", "lock", "lock x", "lock -1", "lock 1 2", "unlock 1", "erase", "LOCK 1"] {
            assert_eq!(Request::parse(malformed), None, "{malformed}");
        }
    }

    #[test]
    fn answers_come_back_as_they_were() {
        let inspection = |held, obstacles| {
            Ok(Answer::Inspection(ProcessInspection { state: ProcessState::Locked, held, obstacles }))
        };
        let reason = || "because of this".to_owned();
        let held = |uuid: &str, used_bytes| HeldMemory { uuid: uuid.into(), used_bytes };
        for answer in [
            Ok(Answer::Done),
            inspection(vec![], vec![]),
            inspection(
                vec![held("a-b", Some(u64::MAX)), held("host device", None)],
                vec![
                    Obstacle::Communicator(reason()),
                    Obstacle::SharedMemory(reason()),
                    Obstacle::PeerMapping(reason()),
                    Obstacle::Service(reason()),
                ],
            ),
            Err(CheckpointErrorKind::NoDevice),
            Err(CheckpointErrorKind::OutOfHostMemory),
            Err(CheckpointErrorKind::OutOfDeviceMemory),
            Err(CheckpointErrorKind::Busy { wait_max: Duration::from_millis(7) }),
            Err(CheckpointErrorKind::NotPermitted { reason: reason() }),
            Err(CheckpointErrorKind::Unsupported { reason: reason() }),
            Err(CheckpointErrorKind::wrong_state(ProcessState::Checkpointing, ProcessState::Locked)),
            Err(CheckpointErrorKind::Refused { code: -1, name: "NAME".into(), text: reason() }),
        ] {
            let text = write_answer(&answer);
            assert_eq!(parse_answer(&text), Some(answer), "{text}");
            for cut in 0..text.len() {
                assert_eq!(parse_answer(&text[..cut]), None, "{:?}", &text[..cut]);
            }
        }
        let state = write_answer(&Ok(Answer::State(ProcessState::Failed)));
        assert_eq!(state, "state failed\nend\n");
    }

    #[test]
    fn what_is_no_answer_is_none() {
        for text in [
            "",
            "end",
            "state asleep\nend\n",
            "error\nend\n",
            "error odd\nend\n",
            "held x\nend\n",
            "?\nend\n",
        ] {
            assert_eq!(parse_answer(text), None, "{text:?}");
        }
    }
}
