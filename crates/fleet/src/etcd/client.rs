//! The client: its members, and the token that its calls show.

use std::fmt;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::access::Access;
use super::error::EtcdError;
use super::http::{Call, Http, Lines};
use super::members::{Limits, Members};
use super::tokens::Tokens;

/// An etcd, by its members. Clones share their connections.
#[derive(Clone)]
pub struct Etcd(Arc<Inner>);

struct Inner {
    members: Members,
    tokens: Tokens,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("endpoints", &self.0.members.endpoints()).finish_non_exhaustive()
    }
}

impl Etcd {
    /// For the members at these URLs, without TLS and users.
    ///
    /// # Errors
    /// See [`Access::new`].
    pub fn new(endpoints: &[String], limits: Limits) -> Result<Self, EtcdError> {
        Self::open(&Access::new(endpoints, None, None)?, limits)
    }

    /// Nothing is connected before the first call.
    ///
    /// # Errors
    /// [`EtcdError::Tls`] if a file of TLS cannot be used.
    pub fn open(access: &Access, limits: Limits) -> Result<Self, EtcdError> {
        let (endpoints, tls, user) = access.clone().into_parts();
        let members = Members::new(endpoints, limits, Http::new(limits.connect, tls)?);
        Ok(Self(Arc::new(Inner { members, tokens: Tokens::of(user) })))
    }

    /// One call with one answer, which may be carried out twice.
    pub(super) async fn call<T: DeserializeOwned + Send>(
        &self,
        path: &'static str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        self.ask(Call::new(path, body), true).await
    }

    /// The same, of a call that must not overtake a later one.
    pub(super) async fn call_in_turn<T: DeserializeOwned + Send>(
        &self,
        path: &'static str,
        body: &Value,
    ) -> Result<T, EtcdError> {
        self.ask(Call::new(path, body), false).await
    }

    async fn ask<T: DeserializeOwned + Send>(&self, call: Call, is_hedged: bool) -> Result<T, EtcdError> {
        let Inner { members, tokens } = &*self.0;
        let mut token = tokens.token(members).await?;
        let mut was_renewed = false;
        loop {
            let call = call.with_token(token.clone());
            let answered = match is_hedged {
                true => members.hedge(&call).await,
                false => members.ask_in_turn(&call).await,
            };
            match answered {
                Err(error) if !was_renewed => token = tokens.renew(members, &token, error).await?,
                done => return done,
            }
            was_renewed = true;
        }
    }

    /// A call whose answer is a stream.
    pub(super) async fn stream(&self, path: &'static str, body: &Value) -> Result<Lines, EtcdError> {
        let Inner { members, tokens } = &*self.0;
        let (call, token) = (Call::new(path, body), tokens.token(members).await?);
        match members.stream(&call.with_token(token.clone())).await {
            Err(error) => {
                let token = tokens.renew(members, &token, error).await?;
                members.stream(&call.with_token(token)).await
            }
            done => done,
        }
    }

    /// Begins with the next member from now on. For one that answers, and is cut off from the others.
    pub fn avoid_member(&self) {
        self.0.members.avoid();
    }
}
