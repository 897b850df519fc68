//! Leases: what is written under one is gone when it ends.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::client::Etcd;
use super::entry::Entry;
use super::error::EtcdError;
use super::wire::number;

/// A lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseId(pub(super) i64);

impl LeaseId {
    /// As entries have it.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0
    }

    /// That of an entry, if it has one.
    #[must_use]
    pub fn of(entry: &Entry) -> Option<Self> {
        (entry.lease != 0).then_some(Self(entry.lease))
    }
}

impl std::fmt::Display for LeaseId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

#[derive(Deserialize)]
struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    id: i64,
}

#[derive(Deserialize)]
struct Renewed {
    result: RenewedTtl,
}

#[derive(Deserialize)]
struct RenewedTtl {
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    ttl: i64,
}

impl Etcd {
    /// A new lease, which ends so long behind its last renewal. Parts of seconds are left out.
    ///
    /// # Errors
    /// See [`EtcdError`].
    pub async fn grant(&self, ttl: Duration) -> Result<LeaseId, EtcdError> {
        let body = json!({ "TTL": ttl.as_secs().to_string() });
        let granted: Granted = self.call("/v3/lease/grant", &body).await?;
        Ok(LeaseId(granted.id))
    }

    /// Has it last as long as at first, from now on.
    ///
    /// # Errors
    /// [`EtcdError::LeaseEnded`] if it has ended; see [`EtcdError`].
    pub async fn renew(&self, lease: LeaseId, ttl: Duration) -> Result<(), EtcdError> {
        let renewed: Renewed =
            self.call("/v3/lease/keepalive", &json!({ "ID": lease.0.to_string() })).await?;
        if renewed.result.ttl > 0 { Ok(()) } else { Err(EtcdError::LeaseEnded { id: lease.0, ttl }) }
    }

    /// Ends it, and removes what is under it.
    ///
    /// # Errors
    /// See [`EtcdError`]. One that has ended before is none.
    pub async fn revoke(&self, lease: LeaseId) -> Result<(), EtcdError> {
        let revoked: Result<serde_json::Value, EtcdError> =
            self.call("/v3/lease/revoke", &json!({ "ID": lease.0.to_string() })).await;
        match revoked {
            Err(error) if !error.is_lease_gone() => Err(error),
            _ => Ok(()),
        }
    }
}
