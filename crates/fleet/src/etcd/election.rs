//! Elections: of all that campaign under a name, one leads until its lease ends.

use serde::Deserialize;
use serde_json::json;

use super::error::EtcdError;
use super::keys::Txn;
use super::lease::LeaseId;
use super::transport::Etcd;
use super::wire::{encoded, number};

/// That one leads. What is written [`under`](Self::fence) it is refused when another does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leadership {
    key: String,
    revision: u64,
}

#[derive(Deserialize)]
struct Campaign {
    leader: Leader,
}

#[derive(Deserialize)]
struct Leader {
    key: String,
    #[serde(deserialize_with = "number")]
    rev: u64,
}

impl Leadership {
    /// When the election was won. Each winner has a greater one than those before.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// A transaction that writes only while this leadership lasts.
    #[must_use]
    pub fn fence(&self) -> Txn {
        Txn::new().if_created_at(&self.key, self.revision)
    }
}

impl Etcd {
    /// Waits until this lease leads. Dropping the future gives up waiting; what it has written ends with the lease.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn campaign(&self, name: &str, lease: LeaseId, who: &str) -> Result<Leadership, EtcdError> {
        let body = json!({
            "name": encoded(name.as_bytes()), "lease": lease.0.to_string(), "value": encoded(who.as_bytes()),
        });
        let won: Campaign = self.wait("/v3/election/campaign", &body).await?;
        let key = decoded(&won.leader.key)?;
        Ok(Leadership { key, revision: won.leader.rev })
    }
}

fn decoded(key: &str) -> Result<String, EtcdError> {
    use base64::Engine as _;
    let bytes = base64::engine::general_purpose::STANDARD.decode(key).ok();
    bytes.and_then(|bytes| String::from_utf8(bytes).ok()).ok_or_else(|| EtcdError::Answer {
        endpoint: "etcd".to_owned(),
        path: "/v3/election/campaign",
        answer: format!("a leader whose key is `{key}`"),
    })
}
