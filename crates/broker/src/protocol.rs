//! What clients and the broker say to each other, as JSON. [`Ask`], [`Asked`] and [`BrokerStatus`] are what users see of it.
//!
//! A client sends a request and reads one answer. The first request names the version; another version is refused.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The version of the protocol. The name of the socket has it as well.
pub const VERSION: u32 = 1;

/// Longer names of devices and lenders are refused. A host device's is the path of a folder.
pub(crate) const NAME_BYTES_MAX: usize = 4096 + 64;

/// More bytes of a lender are refused: sums stay far from what a number holds.
pub(crate) const LENDER_BYTES_MAX: u64 = 1 << 50;

/// More spared processes are refused.
pub(crate) const SPARED_MAX: usize = 4096;

/// Longer waits for owners are refused.
pub(crate) const WITHIN_MS_MAX: u64 = 600_000;

/// A chunk's id and bytes, and whether its bytes were dropped.
pub(crate) type ChunkLine = (u64, u64, bool);

/// Of the first request: what every version has.
#[derive(Debug, Deserialize)]
pub(crate) struct AnyHello {
    pub(crate) version: u32,
}

/// What a client sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// The first of a client.
    Hello { version: u32, device: String, name: String },
    /// The first of a client's second connection, on which it is asked to give up memory.
    Events { version: u32, client: u64 },
    /// A descriptor for each comes along.
    Lend { chunks: Vec<ChunkLine> },
    /// What is still there of these; without ids, of all.
    TakeBack { ids: Option<Vec<u64>> },
    /// What the client could give up if asked.
    Announce { bytes: u64 },
    /// See [`Ask`].
    Ask { bytes: u64, spared: Spared, within_ms: u64 },
    /// What there is.
    Status,
    /// Answers [`Answer::GiveUp`].
    GaveUp { ask: u64, bytes: u64 },
}

/// What the broker sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    Welcome {
        client: u64,
    },
    Refused {
        refusal: Refusal,
    },
    Done,
    /// A descriptor for each comes along.
    Chunks {
        chunks: Vec<ChunkLine>,
    },
    Asked(Asked),
    Status {
        status: BrokerStatus,
    },
    /// The request was not fulfilled.
    Bad {
        why: String,
    },
    /// Not an answer: an owner is asked, on its second connection.
    GiveUp {
        ask: u64,
        bytes: u64,
    },
}

/// Why a connection is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub(crate) enum Refusal {
    User { broker: u32, client: u32 },
    Version { broker: u32, client: u32 },
    Full { connections: usize },
    Ending,
}

/// Who keeps what they have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spared {
    pub(crate) processes: Vec<u32>,
    pub(crate) asker: bool,
}

/// Memory that is wanted on a client's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// How much. [`Ask::ALL`] is all of the device.
    pub bytes: u64,
    /// Processes that keep what they have.
    pub spared: Vec<u32>,
    /// The asker keeps what it lends. Otherwise that goes after what others lend.
    pub spares_asker: bool,
    /// How long to wait for owners that have announced memory. Zero: they are not asked.
    pub within: Duration,
}

impl Ask {
    /// All that lenders and owners have on the device.
    pub const ALL: u64 = u64::MAX;

    /// So many bytes, freed, of what is lent now.
    #[must_use]
    pub fn freeing(bytes: u64) -> Self {
        Self { bytes, spared: Vec::new(), spares_asker: false, within: Duration::ZERO }
    }

    /// These processes keep what they have.
    #[must_use]
    pub fn sparing(mut self, processes: Vec<u32>) -> Self {
        self.spared = processes;
        self
    }

    /// Sets [`Self::spares_asker`].
    #[must_use]
    pub fn of_others(mut self) -> Self {
        self.spares_asker = true;
        self
    }

    /// Owners that announced memory are asked as well, and have so long.
    #[must_use]
    pub fn waiting(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }
}

/// What came of an [`Ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Asked {
    /// Memory whose descriptors the broker has closed.
    pub freed_bytes: u64,
    /// Memory that owners gave up.
    pub given_up_bytes: u64,
    /// What is still lacking. Of [`Ask::ALL`]: what owners that were asked did not give up.
    pub missing_bytes: u64,
}

/// What a broker has, and what it has done since it began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BrokerStatus {
    /// Its process.
    pub pid: u32,
    /// Clients that lend or have announced something, by their connections' age.
    pub lenders: Vec<LenderStatus>,
    /// Sums since the broker began.
    pub totals: BrokerTotals,
    /// Why a connection was last refused or ended by the broker.
    pub last_problem: Option<String>,
}

impl BrokerStatus {
    /// What can be had of a device: lent or announced.
    #[must_use]
    pub fn reclaimable_bytes(&self, device: &str) -> u64 {
        let near = self.lenders.iter().filter(|lender| lender.device == device);
        near.map(|lender| lender.lent_bytes.saturating_add(lender.announced_bytes)).sum()
    }
}

/// What a client lends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LenderStatus {
    /// The device that all of it is on.
    pub device: String,
    /// Its name for people.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// What is still there.
    pub lent_bytes: u64,
    /// In how many chunks.
    pub chunks: usize,
    /// What it could give up besides.
    pub announced_bytes: u64,
    /// How long it has been lending. `None`: nothing of it is there.
    pub lent_s: Option<u64>,
}

/// Sums since a broker began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BrokerTotals {
    /// What was lent.
    pub lent_bytes: u64,
    /// What of it was freed for those who asked.
    pub taken_bytes: u64,
    /// What of it lenders took back.
    pub brought_back_bytes: u64,
    /// What owners gave up when asked.
    pub given_up_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        for (request, text) in [
            (
                Request::Hello { version: 1, device: "GPU-1".into(), name: "a".into() },
                r#"{"request":"hello","version":1,"device":"GPU-1","name":"a"}"#,
            ),
            (
                Request::Lend { chunks: vec![(7, u64::MAX, true)] },
                r#"{"request":"lend","chunks":[[7,18446744073709551615,true]]}"#,
            ),
            (Request::TakeBack { ids: Some(vec![7]) }, r#"{"request":"take_back","ids":[7]}"#),
            (
                Request::Ask { bytes: 9, spared: Spared { processes: vec![2], asker: true }, within_ms: 3 },
                r#"{"request":"ask","bytes":9,"spared":{"processes":[2],"asker":true},"within_ms":3}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        for text in ["", "{}", r#"{"request":"steal"}"#, r#"{"request":"announce","bytes":-1}"#, "[1]"] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }
}
