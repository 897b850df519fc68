//! What a node says of a model that it has.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::reading::{FORMAT, Record};

/// A model of a node's configuration, as long as the node's lease lives.
///
/// ```
/// use poorwill_fleet::records::{ModelRecord, Record, Stage};
///
/// let mut model = ModelRecord::new(Stage::Asleep, vec![0, 1]);
/// model.need_bytes = Some(vec![40 << 30, 40 << 30]);
/// assert_eq!(model.problem(), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// The oldest format whose readers understand it.
    pub format: u32,
    /// Where its engine is in its cycle.
    pub stage: Stage,
    /// The GPUs of its engine, by position on the node.
    pub gpus: Vec<usize>,
    /// What it takes of each of these while awake; absent until measured, if it is not configured.
    #[serde(default)]
    pub need_bytes: Option<Vec<u64>>,
    /// Host memory that it keeps while asleep.
    #[serde(default)]
    pub host_bytes: u64,
    /// Its requests on this node.
    #[serde(default)]
    pub requests: Requests,
    /// How many requests reach it on this node.
    #[serde(default)]
    pub rate: Rate,
    /// What its swaps take.
    #[serde(default)]
    pub costs: Costs,
    /// Whether the node's own configuration keeps it awake.
    #[serde(default)]
    pub pinned: bool,
    /// Other names of it in requests: aliases, and adapters.
    #[serde(default)]
    pub names: Vec<String>,
}

/// Where an engine is in its cycle.
///
/// ```
/// use poorwill_fleet::records::Stage;
///
/// assert_eq!(serde_json::to_string(&Stage::OnDisk)?, r#""on_disk""#);
/// assert_eq!(serde_json::from_str::<Stage>(r#""levitating""#)?, Stage::Unknown);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It takes requests.
    Awake,
    /// It will soon.
    Waking,
    /// It falls asleep.
    Sleeping,
    /// Its weights are in host memory, or are read again by a wake.
    Asleep,
    /// Its processes are off their GPUs.
    Hibernating,
    /// It sleeps, and its backups are on disk.
    OnDisk,
    /// It has no process.
    Stopped,
    /// Its process starts.
    Starting,
    /// It was left alone after failures.
    Failed,
    /// A newer version knows what this is.
    #[serde(other)]
    Unknown,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Awake,
        Self::Waking,
        Self::Sleeping,
        Self::Asleep,
        Self::Hibernating,
        Self::OnDisk,
        Self::Stopped,
        Self::Starting,
        Self::Failed,
        Self::Unknown,
    ];

    /// As records have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Awake => "awake",
            Self::Waking => "waking",
            Self::Sleeping => "sleeping",
            Self::Asleep => "asleep",
            Self::Hibernating => "hibernating",
            Self::OnDisk => "on_disk",
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }

    /// Whether it is awake, or can be without a start.
    #[must_use]
    pub const fn is_ready(self) -> bool {
        matches!(
            self,
            Self::Awake | Self::Waking | Self::Sleeping | Self::Asleep | Self::Hibernating | Self::OnDisk
        )
    }

    /// Whether a placement there is of no use for now.
    #[must_use]
    pub const fn is_out(self) -> bool {
        matches!(self, Self::Failed | Self::Unknown)
    }

    /// Whether its backups are in host memory, or soon will be.
    #[must_use]
    pub const fn holds_host(self) -> bool {
        matches!(self, Self::Awake | Self::Waking | Self::Sleeping | Self::Asleep | Self::Hibernating)
    }
}

/// For people.
impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::OnDisk { "on disk" } else { self.as_str() })
    }
}

/// Requests of a model on a node.
///
/// ```
/// use poorwill_fleet::records::Requests;
///
/// assert_eq!(Requests { running: 3, queued: 2 }.all(), 5);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Requests {
    /// Being answered.
    pub running: u32,
    /// Waiting.
    pub queued: u32,
}

impl Requests {
    /// Both together.
    #[must_use]
    pub const fn all(self) -> u64 {
        self.running as u64 + self.queued as u64
    }
}

/// What moves of a model take, as measured on its node; absent until then.
///
/// ```
/// use poorwill_fleet::records::Costs;
///
/// let costs: Costs = serde_json::from_str(r#"{"wake_ms": 900}"#)?;
/// assert_eq!((costs.wake_ms, costs.start_ms), (Some(900), None));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Costs {
    /// A wake from host memory.
    pub wake_ms: Option<u64>,
    /// Falling asleep.
    pub sleep_ms: Option<u64>,
    /// Coming back from hibernation, with the wake.
    pub resume_ms: Option<u64>,
    /// A wake that reads its backups from disk.
    pub reload_ms: Option<u64>,
    /// A start of the engine.
    pub start_ms: Option<u64>,
}

impl Costs {
    /// Until a model in this stage takes requests: as measured, or else as usual.
    #[must_use]
    pub fn ready_ms(self, stage: Stage, usual: Self) -> u64 {
        let one = |measured: Option<u64>, usual: Option<u64>| measured.or(usual).unwrap_or_default();
        let wake_ms = one(self.wake_ms, usual.wake_ms);
        match stage {
            Stage::Awake => 0,
            Stage::Waking | Stage::Asleep => wake_ms,
            Stage::Sleeping => one(self.sleep_ms, usual.sleep_ms).saturating_add(wake_ms),
            Stage::Hibernating => one(self.resume_ms, usual.resume_ms),
            Stage::OnDisk => one(self.reload_ms, usual.reload_ms),
            Stage::Stopped | Stage::Starting | Stage::Failed | Stage::Unknown => {
                one(self.start_ms, usual.start_ms)
            }
        }
    }
}

/// Requests per second, decayed by its node. JSON has it as a number.
///
/// ```
/// use poorwill_fleet::records::Rate;
///
/// let rate: Rate = serde_json::from_str("0.25")?;
/// assert_eq!(rate, Rate::from_micros(250_000));
/// assert!(serde_json::from_str::<Rate>("-1").is_err());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u64);

impl Rate {
    /// Most millionths: beyond it, JSON's numbers are not exact.
    const MICROS_MAX: u64 = 1 << 52;

    /// In millionths of a request per second; at most 4.5 thousand million requests.
    #[must_use]
    pub fn from_micros(micros: u64) -> Self {
        Self(micros.min(Self::MICROS_MAX))
    }

    /// In millionths of a request per second.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}/s", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

impl Serialize for Rate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[allow(clippy::cast_precision_loss, reason = "at most 2^52")]
        serializer.serialize_f64(self.0 as f64 / 1e6)
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let per_second = f64::deserialize(deserializer)?;
        if !(per_second >= 0.0 && per_second.is_finite()) {
            return Err(serde::de::Error::custom(format!("a rate of {per_second} is none")));
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
        Ok(Self::from_micros((per_second * 1e6).round() as u64))
    }
}

impl ModelRecord {
    /// A model without requests and measurements.
    #[must_use]
    pub fn new(stage: Stage, gpus: Vec<usize>) -> Self {
        Self {
            format: FORMAT,
            stage,
            gpus,
            need_bytes: None,
            host_bytes: 0,
            requests: Requests::default(),
            rate: Rate::default(),
            costs: Costs::default(),
            pinned: false,
            names: Vec::new(),
        }
    }
}

impl Record for ModelRecord {
    fn problem(&self) -> Option<String> {
        let gpus = self.gpus.len();
        let different: BTreeSet<usize> = self.gpus.iter().copied().collect();
        if different.len() < gpus {
            return Some(format!("gpus has one twice: {:?}", self.gpus));
        }
        let needs = self.need_bytes.as_ref().map(Vec::len).filter(|needs| *needs != gpus)?;
        Some(format!("need_bytes has {needs} entries for {gpus} GPUs"))
    }
}

#[test]
fn stages_are_written_as_they_are_named() {
    for stage in Stage::ALL {
        assert_eq!(serde_json::to_string(&stage).unwrap(), format!("\"{}\"", stage.as_str()));
    }
}
