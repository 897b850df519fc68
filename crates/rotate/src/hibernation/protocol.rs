//! The helper's protocol: one JSON object on each line.

use std::fmt;

use poorwill::hibernation::ProcessState;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request's operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "op")]
pub(super) enum Ask {
    Hibernate { pids: Vec<u32>, wait_max_ms: u64, host_bytes_max: Option<u64> },
    Resume { pids: Vec<u32> },
    Inspect { pids: Vec<u32> },
    State { pids: Vec<u32> },
}

#[derive(Debug, Serialize)]
pub(super) struct Request<'a> {
    pub(super) id: u64,
    #[serde(flatten)]
    pub(super) operation: &'a Ask,
}

/// A line of the helper.
#[derive(Debug, Deserialize)]
pub(super) struct Line {
    pub(super) ready: Option<Ready>,
    /// Why it cannot be used. It ends then.
    pub(super) unusable: Option<String>,
    #[serde(default)]
    pub(super) kind: ErrorKind,
    /// What it found of another helper, and brought to rest.
    pub(super) recovered: Option<Vec<Value>>,
    pub(super) id: Option<u64>,
    #[serde(default)]
    pub(super) ok: Value,
    pub(super) error: Option<HelperError>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Ready {
    pub(super) version: String,
    /// The version of NVIDIA's driver, where it is known.
    pub(super) driver: Option<String>,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct HelperError {
    pub(super) message: String,
    #[serde(default)]
    pub(super) kind: ErrorKind,
    /// Processes that are not as they were.
    #[serde(default)]
    pub(super) left: Vec<Value>,
}

/// As far as it matters here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ErrorKind {
    NoSuchProcess,
    NoDevice,
    Obstacles,
    Unsupported,
    OutOfDeviceMemory,
    /// The driver does not say now whether it could come back.
    NoFigures,
    /// What the helper remembers cannot be read or written.
    Journal,
    /// There is no helper to ask now.
    NoHelper,
    /// There will be none with this command, on this machine as it is.
    Unusable,
    #[default]
    #[serde(other)]
    Other,
}

impl HelperError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), kind: ErrorKind::Other, left: Vec::new() }
    }

    pub(super) fn no_helper(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::NoHelper, ..Self::new(message) }
    }

    /// Of a helper that says so of itself.
    pub(super) fn unusable(message: impl Into<String>, kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Unsupported => Self { kind: ErrorKind::Unusable, ..Self::new(message) },
            _ => Self::no_helper(message),
        }
    }

    /// Whether nothing has changed, so that an engine that hibernates can be let be.
    pub(super) fn is_for_later(&self) -> bool {
        use ErrorKind::{Journal, NoFigures, NoHelper, OutOfDeviceMemory, Unusable};
        matches!(self.kind, Journal | NoFigures | NoHelper | OutOfDeviceMemory | Unusable)
            && self.left.is_empty()
    }

    /// Whether its GPUs have too little memory, and nothing has changed.
    pub(super) fn needs_more(&self) -> bool {
        self.kind == ErrorKind::OutOfDeviceMemory && self.left.is_empty()
    }

    /// Whether no helper has answered, which says nothing of the engine.
    pub(super) fn is_without_helper(&self) -> bool {
        self.kind == ErrorKind::NoHelper
    }

    /// Whether the process has nothing on a GPU.
    pub(super) fn is_without_gpu(&self) -> bool {
        matches!(self.kind, ErrorKind::NoDevice | ErrorKind::NoSuchProcess)
    }

    /// Whether the process cannot hibernate, and nothing has changed.
    pub(super) fn is_impossible(&self) -> bool {
        use ErrorKind::{Obstacles, Unsupported, Unusable};
        matches!(self.kind, Obstacles | Unsupported | Unusable) && self.left.is_empty()
    }
}

impl fmt::Display for HelperError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// What hibernation would take of a process, and what is against it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inspected {
    pub(super) state: Option<ProcessState>,
    pub(super) host_bytes: u64,
    /// Whether a device has no figure for it.
    pub(super) is_unmeasured: bool,
    pub(super) obstacles: Vec<String>,
}

/// The answer's part about the one process that was asked for.
fn of_one(answer: &Value) -> &Value {
    answer.get("processes").and_then(|all| all.get(0)).unwrap_or(answer)
}

/// Of one process. A later helper may say what is no state here.
pub(super) fn state_of(answer: &Value) -> Result<Option<ProcessState>, HelperError> {
    let state = of_one(answer).get("state").filter(|state| state.is_string());
    let state = state.ok_or_else(|| unexpected(answer))?;
    Ok(ProcessState::deserialize(state).ok())
}

/// Of one process.
pub(super) fn inspected(answer: &Value) -> Result<Inspected, HelperError> {
    let one = of_one(answer);
    let held = one.get("held").and_then(Value::as_array).ok_or_else(|| unexpected(answer))?;
    let bytes = held.iter().filter_map(|held| held.get("used_bytes")?.as_u64());
    let obstacles = one.get("obstacles").and_then(Value::as_array).into_iter().flatten().map(obstacle);
    Ok(Inspected {
        state: state_of(answer)?,
        host_bytes: bytes.fold(0, u64::saturating_add),
        is_unmeasured: held.iter().any(|held| held.get("used_bytes").is_none_or(Value::is_null)),
        obstacles: obstacles.collect(),
    })
}

fn obstacle(value: &Value) -> String {
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let kind = text("kind").or(value.as_str()).unwrap_or("an obstacle").replace('_', " ");
    text("what").map_or_else(|| kind.clone(), |what| format!("{kind} ({what})"))
}

fn unexpected(answer: &Value) -> HelperError {
    let text: String = answer.to_string().chars().take(200).collect();
    HelperError::new(format!("the helper's answer is not understood: {text}; use one of this version"))
}
