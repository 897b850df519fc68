//! Reading and writing of records.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::keys::Key;

/// The newest format that this version reads, and the one that it writes.
pub const FORMAT: u32 = 1;

/// Most bytes of a record. etcd itself takes no more than 1.5 MiB.
const RECORD_BYTES_MAX: usize = 1 << 20;

/// What is kept as JSON under a key.
///
/// ```
/// use poorwill_fleet::records::{Goal, Placement, Record};
///
/// let mut placement = Placement::new(7, Goal::Hot, 0, "it is pinned");
/// assert_eq!(placement.problem(), None);
/// placement.fence = 0;
/// assert!(placement.problem().is_some());
/// ```
pub trait Record: Serialize + DeserializeOwned {
    /// What contradicts itself in it, if anything does.
    fn problem(&self) -> Option<String>;
}

/// A record, or what is known of one that this version does not understand.
///
/// ```
/// use poorwill_fleet::{keys::Key, records::{Drain, Reading, read}};
///
/// let key = Key::Drain("gpu-17".parse()?);
/// let newer: Reading<Drain> = read(&key, br#"{"format": 99}"#)?;
/// assert_eq!(newer, Reading::Newer { format: 99 });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading<T> {
    /// It was read.
    Known(T),
    /// It is for readers of a newer format. What it is about is left as it is.
    Newer {
        /// That format.
        format: u32,
    },
}

impl<T> Reading<T> {
    /// The record, unless it is newer.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(record) => Some(record),
            Self::Newer { .. } => None,
        }
    }
}

/// Why a record cannot be read.
///
/// ```
/// use poorwill_fleet::{keys::Key, records::{Placement, read}};
///
/// let key = Key::Placement { model: "qwen".parse()?, node: "gpu-17".parse()? };
/// let error = read::<Placement>(&key, b"{}").unwrap_err();
/// assert!(error.to_string().starts_with("record `placements/qwen/gpu-17`: "));
/// # Ok::<(), poorwill_fleet::name::NameError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[error("record `{key}`: {problem}")]
pub struct RecordError {
    /// Where it lies, without its fleet.
    pub key: Key,
    /// What is wrong with it.
    pub problem: RecordProblem,
}

/// What is wrong with a record.
///
/// ```
/// use poorwill_fleet::records::RecordProblem;
///
/// let problem = RecordProblem::Contradiction("fence is 0".to_owned());
/// assert_eq!(problem.to_string(), "fence is 0");
/// ```
#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    /// It is too long.
    #[error("it has {bytes} bytes, and {RECORD_BYTES_MAX} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It is not JSON, a field has the wrong type, or one is missing.
    #[error("{0}")]
    Json(serde_json::Error),
    /// Its fields contradict each other.
    #[error("{0}")]
    Contradiction(String),
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

/// Reads the record under `key`.
///
/// # Errors
/// It is too long, not JSON, lacks a field, or contradicts itself.
///
/// ```
/// use poorwill_fleet::{keys::Key, records::{Pin, read}};
///
/// let key = Key::Pin("qwen".parse()?);
/// let pin = read::<Pin>(&key, br#"{"format": 1, "copies": 2, "unknown": []}"#)?;
/// assert_eq!(pin.known().map(|pin| pin.copies), Some(2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read<T: Record>(key: &Key, json: &[u8]) -> Result<Reading<T>, RecordError> {
    let wrong = |problem| RecordError { key: key.clone(), problem };
    if json.len() > RECORD_BYTES_MAX {
        return Err(wrong(RecordProblem::TooLong { bytes: json.len() }));
    }
    let json_error = |error| wrong(RecordProblem::Json(error));
    let FormatOnly { format } = serde_json::from_slice(json).map_err(json_error)?;
    if format > FORMAT {
        return Ok(Reading::Newer { format });
    }
    let record: T = serde_json::from_slice(json).map_err(json_error)?;
    match record.problem() {
        Some(problem) => Err(wrong(RecordProblem::Contradiction(problem))),
        None => Ok(Reading::Known(record)),
    }
}

/// A record as JSON.
///
/// # Errors
/// It contradicts itself, and no reader would take it.
///
/// ```
/// use poorwill_fleet::{keys::Key, records::{Drain, write}};
///
/// let json = write(&Key::Drain("gpu-17".parse()?), &Drain::new("new memory"))?;
/// assert_eq!(json, r#"{"format":1,"why":"new memory"}"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write<T: Record>(key: &Key, record: &T) -> Result<String, RecordError> {
    let wrong = |problem| RecordError { key: key.clone(), problem };
    if let Some(problem) = record.problem() {
        return Err(wrong(RecordProblem::Contradiction(problem)));
    }
    serde_json::to_string(record).map_err(|error| wrong(RecordProblem::Json(error)))
}
