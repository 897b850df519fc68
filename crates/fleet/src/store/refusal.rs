//! What a store refuses, by gRPC's codes and in etcd's words.

use std::borrow::Cow;

use http::StatusCode;

/// A call that is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: u32,
    pub(super) message: Cow<'static, str>,
}

const fn etcds(code: u32, message: &'static str) -> Refusal {
    Refusal { code, message: Cow::Borrowed(message) }
}

pub(super) const NO_KEY: Refusal = etcds(3, "etcdserver: key is not provided");
pub(super) const TWICE: Refusal = etcds(3, "etcdserver: duplicate key given in txn request");
pub(super) const TOO_MANY: Refusal = etcds(3, "etcdserver: too many operations in txn request");
pub(super) const TOO_LARGE: Refusal = etcds(3, "etcdserver: request is too large");
pub(super) const NO_LEASE: Refusal = etcds(5, "etcdserver: requested lease not found");
pub(super) const LEASE_EXISTS: Refusal = etcds(9, "etcdserver: lease already exists");
pub(super) const NO_USERS: Refusal = etcds(9, "etcdserver: authentication is not enabled");
pub(super) const LONG_LEASE: Refusal = etcds(11, "etcdserver: too large lease TTL");
pub(super) const COMPACTED: Refusal = etcds(11, "etcdserver: mvcc: required revision has been compacted");
pub(super) const FUTURE: Refusal = etcds(11, "etcdserver: mvcc: required revision is a future revision");
pub(super) const NO_USER: Refusal = etcds(3, "etcdserver: user name is empty");
pub(super) const WRONG_PASSWORD: Refusal =
    etcds(3, "etcdserver: authentication failed, invalid user ID or password");
pub(super) const WRONG_TOKEN: Refusal = etcds(16, "etcdserver: invalid auth token");

impl Refusal {
    /// A call that cannot be read.
    pub(super) fn unreadable(error: &serde_json::Error) -> Self {
        Self { code: 3, message: format!("{error}; this store has a part of etcd's API only").into() }
    }

    /// There is no room for more of what a store keeps.
    pub(super) fn full(most: usize, what: &str) -> Self {
        let words = "etcdserver: mvcc: database space exceeded";
        Self {
            code: 8,
            message: format!("{words}: this store keeps {most} {what} at most; remove some").into(),
        }
    }

    /// There is no room for another watch.
    pub(super) fn busy(most: usize) -> Self {
        let words = "etcdserver: too many requests";
        Self {
            code: 8,
            message: format!("{words}: this store serves {most} watches at most; end some").into(),
        }
    }

    /// Another store is asked instead.
    pub(super) fn unavailable(why: &str) -> Self {
        Self { code: 14, message: format!("unavailable: {why}").into() }
    }

    /// As the gateway translates its code.
    pub(super) fn status(&self) -> StatusCode {
        match self.code {
            5 => StatusCode::NOT_FOUND,
            8 => StatusCode::TOO_MANY_REQUESTS,
            9 => StatusCode::PRECONDITION_FAILED,
            14 => StatusCode::SERVICE_UNAVAILABLE,
            16 => StatusCode::UNAUTHORIZED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}
