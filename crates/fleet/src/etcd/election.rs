//! Elections: of all that stand for one, the first leads until its lease ends. Then the next one does.

use super::client::Etcd;
use super::error::EtcdError;
use super::keys::Txn;
use super::lease::LeaseId;

/// That one stands for an election. It leads once no other key below the election's is older than its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidacy {
    key: String,
    revision: u64,
}

impl Candidacy {
    /// What is there as long as it stands.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Since when it stands. Each that leads has a greater one than those before.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// A transaction that writes only while this candidacy lasts. One that leads writes with it.
    #[must_use]
    pub fn fence(&self) -> Txn {
        Txn::new().if_created_at(&self.key, self.revision)
    }
}

impl Etcd {
    /// Stands for the election with this key, as long as the lease lives. Where it does already, nothing is written.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn stand(&self, election: &str, lease: LeaseId, who: &str) -> Result<Candidacy, EtcdError> {
        let key = format!("{election}/{lease}");
        let stand = Txn::new().if_created_at(&key, 0).put(&key, who, Some(lease)).or_get(&key);
        let answer = self.commit(&stand).await?;
        let revision = answer.found.first().map_or(answer.revision, |found| found.create_revision);
        Ok(Candidacy { key, revision })
    }
}
