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
    /// It has users, and its gateway takes no certificate with a name.
    #[error(
        "{endpoint} refuses {path}: with users, etcd's gateway takes no client certificate with a common name; use one \
         without, or an etcd without --client-cert-auth"
    )]
    CommonName {
        /// Where.
        endpoint: String,
        /// The call.
        path: &'static str,
    },
    /// It refuses a watch.
    #[error("etcd ended the watch: {reason}")]
    WatchRefused {
        /// Its words.
        reason: String,
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
/// gRPC's code of what is not permitted.
const DENIED: u32 = 7;
/// gRPC's code of a token that is not known, or not any more.
const UNAUTHENTICATED: u32 = 16;
/// What versions of etcd say of a call without a token, and of a token that is older than the last change of users.
const OF_TOKEN: [&str; 3] =
    ["user name is empty", "revision in header is old", "revision of auth store is old"];

impl EtcdError {
    /// Whether another member might answer.
    pub(super) fn is_of_member(&self) -> bool {
        matches!(self, Self::Refused { code, .. } if ELSEWHERE.contains(code)) || self.is_unreachable()
    }

    /// Whether it was refused for its token, or for having none, and may succeed with another one.
    pub(super) fn is_of_token(&self, has_token: bool) -> bool {
        let Self::Refused { code, message, .. } = self else { return false };
        // Without a token, a gateway with a certificate is a user of that name.
        *code == UNAUTHENTICATED
            || *code == DENIED && !has_token
            || OF_TOKEN.iter().any(|words| message.contains(words))
    }

    /// Whether a password was refused because no user has to be known.
    pub(super) fn has_no_users(&self) -> bool {
        matches!(self, Self::Refused { message, .. } if message.contains("authentication is not enabled"))
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

#[test]
fn a_refusal_for_a_token_is_known() {
    let refused =
        |code, words: &str| EtcdError::Refused { path: "/v3/kv/range", code, message: words.to_owned() };
    for (code, words, with_token, without_token) in [
        (16, "etcdserver: invalid auth token", true, true),
        (3, "etcdserver: user name is empty; etcd has users", true, true),
        (2, "auth: revision in header is old", true, true),
        (3, "etcdserver: revision of auth store is old", true, true),
        (7, "etcdserver: permission denied", false, true),
        (3, "etcdserver: key is not provided", false, false),
    ] {
        let error = refused(code, words);
        assert_eq!(
            (error.is_of_token(true), error.is_of_token(false)),
            (with_token, without_token),
            "{words}"
        );
    }
    assert!(refused(9, "etcdserver: authentication is not enabled").has_no_users());
}
