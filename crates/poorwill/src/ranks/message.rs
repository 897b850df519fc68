//! What is said over a rank's socket: a line of JSON for each request and each answer.
//!
//! ```text
//! {"protocol":1,"call":"status"}
//! {"protocol":1,"answer":"status","group":"job","rank":0,"world_size":2,"pid":4711,"state":"idle"}
//! {"protocol":1,"call":"sleep","level":1,"tags":["weights"],"decision":"/run/…/decision-1","undo_after_s":60.0}
//! {"protocol":1,"answer":"staged"}
//! {"protocol":1,"call":"decided","decision":"/run/…/decision-1"}
//! {"protocol":1,"answer":"ended","outcome":"done","report":{…}}
//! ```
//!
//! A wake has no level. `tags` and `wait_s` may be left away. An answer to any request may be `refused`, with its `why`.

use std::path::PathBuf;

use poorwill_core::Tag;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::protocol::RankState;
use super::rank::RankOutcome;

/// Of this module. Another one is refused.
pub(super) const PROTOCOL: u32 = 1;

/// Longest request.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Longest answer: a report may name many tags and lost ranges.
pub(super) const ANSWER_BYTES_MAX: usize = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(super) enum Call {
    Status,
    Sleep {
        level: u8,
        #[serde(flatten)]
        stage: StageCall,
    },
    Wake {
        #[serde(flatten)]
        stage: StageCall,
    },
    /// Answered when the verdict is carried out.
    Decided {
        decision: PathBuf,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StageCall {
    /// Missing: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tags: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) wait_s: Option<f64>,
    pub(super) decision: PathBuf,
    pub(super) undo_after_s: f64,
}

impl StageCall {
    pub(super) fn tags(&self) -> Result<Option<Vec<Tag>>, String> {
        let parse = |tags: &Vec<String>| tags.iter().map(|tag| Tag::new(tag)).collect::<Result<_, _>>();
        self.tags.as_ref().map(parse).transpose().map_err(|error| error.to_string())
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(super) enum Answer {
    Status(RankStatus),
    Staged,
    Ended(RankOutcome),
    Refused { why: String },
}

/// Which rank serves there, and where it stands.
///
/// ```
/// use poorwill::ranks::{GroupConfig, RankServer, RankState};
/// use poorwill::{Arena, Config};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().to_owned();
/// let group = GroupConfig::new("job", 1)?.in_folder(folder);
/// let server = RankServer::start(&group, 0, Arena::open(Config::on("host:64MiB".parse()?))?)?;
/// let status = server.status();
/// assert_eq!((status.rank, status.state, status.problem), (0, RankState::Idle, None));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankStatus {
    /// The group.
    pub group: String,
    /// The rank.
    pub rank: u32,
    /// Size of the group.
    pub world_size: u32,
    /// Its process.
    pub pid: u32,
    /// Where it stands.
    pub state: RankState,
    /// Why it keeps what it staged: its decision cannot be reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Versioned<T> {
    protocol: u32,
    #[serde(flatten)]
    rest: T,
}

/// A line, without its end.
pub(super) fn write<T: Serialize>(message: &T) -> Result<Vec<u8>, String> {
    let versioned = Versioned { protocol: PROTOCOL, rest: message };
    serde_json::to_vec(&versioned).map_err(|error| format!("it cannot be sent: {error}"))
}

/// What a line says, or what is wrong with it.
pub(super) fn read<T: DeserializeOwned>(line: &[u8]) -> Result<T, String> {
    let text = str::from_utf8(line).map_err(|error| format!("the line is not UTF-8: {error}"))?;
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("the line is not JSON: {error}"))?;
    match value.get("protocol").and_then(Value::as_u64) {
        Some(protocol) if protocol == u64::from(PROTOCOL) => {}
        Some(other) => {
            return Err(format!(
                "it speaks protocol {other}, and this is protocol {PROTOCOL}: use one version of poorwill in all processes"
            ));
        }
        None => return Err(format!("the line does not say `\"protocol\":{PROTOCOL}`")),
    }
    let versioned: Versioned<T> = serde_json::from_value(value)
        .map_err(|error| format!("the line is no message of this protocol: {error}"))?;
    Ok(versioned.rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_written() {
        let stage = StageCall {
            tags: Some(vec!["weights".into()]),
            wait_s: None,
            decision: "/d".into(),
            undo_after_s: 1.5,
        };
        let calls = [
            Call::Status,
            Call::Sleep { level: 2, stage: stage.clone() },
            Call::Wake { stage },
            Call::Decided { decision: "/d".into() },
        ];
        for call in calls {
            let line = write(&call).unwrap();
            let again: Call = read(&line).unwrap();
            assert_eq!(format!("{again:?}"), format!("{call:?}"));
        }
        let status = RankStatus {
            group: "g".into(),
            rank: 0,
            world_size: 2,
            pid: 7,
            state: RankState::Staged,
            problem: None,
        };
        let outcomes = [
            RankOutcome::Done { report: serde_json::json!({"seconds": 1.0}) },
            RankOutcome::Undone { why: "so".into() },
            RankOutcome::Failed { why: "so".into() },
        ];
        let answers = outcomes.map(Answer::Ended).into_iter();
        for answer in
            answers.chain([Answer::Status(status), Answer::Staged, Answer::Refused { why: "x".into() }])
        {
            let line = write(&answer).unwrap();
            let again: Answer = read(&line).unwrap();
            assert_eq!(format!("{again:?}"), format!("{answer:?}"));
        }
        let text = write(&Answer::Ended(RankOutcome::Undone { why: "so".into() })).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            r#"{"protocol":1,"answer":"ended","outcome":"undone","why":"so"}"#
        );
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        for (line, word) in [
            (&b"\xff\xfe"[..], "UTF-8"),
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"7", "protocol"),
            (br#"{"call":"status"}"#, "protocol"),
            (br#"{"protocol":"1","call":"status"}"#, "protocol"),
            (br#"{"protocol":2,"call":"status"}"#, "speaks protocol 2"),
            (br#"{"protocol":1}"#, "call"),
            (br#"{"protocol":1,"call":"dance"}"#, "dance"),
            (br#"{"protocol":1,"call":"decided","decision":7}"#, "invalid type"),
            (br#"{"protocol":1,"call":"wake","decision":"/d"}"#, "undo_after_s"),
            (
                br#"{"protocol":1,"call":"wake","decision":"/d","undo_after_s":1,"tags":"weights"}"#,
                "sequence",
            ),
            (br#"{"protocol":1,"call":"sleep","level":-1,"decision":"/d","undo_after_s":1}"#, "-1"),
            (
                br#"{"protocol":1,"call":"sleep","level":"1","decision":"/d","undo_after_s":1}"#,
                "invalid type",
            ),
        ] {
            let error = read::<Call>(line).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}
