//! What goes wrong with a call.

use std::time::Duration;

use poorwill_net::tls::TlsError;

/// Why a call failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// An endpoint is no URL that can be used.
    #[error("etcd's endpoint `{endpoint}`: {reason}")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A certificate for it cannot be used.
    #[error("TLS to etcd cannot be used")]
    Tls(#[from] TlsError),
    /// No member answered.
    #[error("no etcd answers {path}: {}; see that one of them runs and can be reached", tried.join("; "))]
    Unreachable {
        /// The call.
        path: &'static str,
        /// Each endpoint, with the cause.
        tried: Vec<String>,
    },
    /// It refused the call.
    #[error("etcd refuses {path}: {message} (code {code})")]
    Refused {
        /// The call.
        path: &'static str,
        /// A gRPC code.
        code: u32,
        /// Its words.
        message: String,
    },
    /// It answered what no etcd with this gateway does.
    #[error(
        "{endpoint} answers {path} with {answer}; it has to be etcd 3.4 or newer, with its gRPC gateway on"
    )]
    Answer {
        /// Where.
        endpoint: String,
        /// The call.
        path: &'static str,
        /// What came.
        answer: String,
    },
    /// It has forgotten what it knew.
    #[error(
        "etcd is at revision {has} and was at {had}: it was restored from an older state; start this process again to take \
         that over"
    )]
    Older {
        /// The revision that it has.
        has: u64,
        /// The one that it had.
        had: u64,
    },
    /// A watch tells nothing of changes that there were.
    #[error("the watch of {prefix} is silent at revision {revision}, and etcd is at {has}")]
    Silent {
        /// What is watched.
        prefix: String,
        /// What it showed last.
        revision: u64,
        /// What there is.
        has: u64,
    },
    /// A lease has ended.
    #[error("the lease {id:x} has ended; it was not renewed within {} s", ttl.as_secs())]
    LeaseEnded {
        /// The lease.
        id: i64,
        /// For how long it was granted.
        ttl: Duration,
    },
}

/// gRPC's codes of members that cannot serve a call now, though others might: a deadline, and "unavailable".
const ELSEWHERE: [u32; 2] = [4, 14];
/// gRPC's code of something that does not exist.
const NOT_FOUND: u32 = 5;

impl EtcdError {
    /// Whether another member might answer.
    pub(super) fn is_of_member(&self) -> bool {
        matches!(self, Self::Refused { code, .. } if ELSEWHERE.contains(code)) || self.is_unreachable()
    }

    /// Whether no member answered.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Whether a lease does not exist any more.
    #[must_use]
    pub fn is_lease_gone(&self) -> bool {
        matches!(self, Self::LeaseEnded { .. } | Self::Refused { code: NOT_FOUND, .. })
    }
}
