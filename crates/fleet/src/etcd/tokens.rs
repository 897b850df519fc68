//! The token of a user: etcd gives it for the password, and each call shows it.

use std::time::{Duration, Instant};

use http::HeaderValue;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Mutex;

use super::error::EtcdError;
use super::http::{AUTHENTICATE, Call};
use super::members::Members;
use super::user::User;

/// How long a refused password is not tried again. Each attempt costs etcd a slow hash.
const REFUSED_FOR: Duration = Duration::from_secs(5);

/// `None` where etcd has no users.
pub(super) type Token = Option<HeaderValue>;

pub(super) struct Tokens {
    user: Option<User>,
    known: Mutex<Known>,
}

enum Known {
    Nothing,
    Token(Token),
    Refused { at: Instant, error: EtcdError },
}

#[derive(Deserialize)]
struct Authenticated {
    token: String,
}

impl Tokens {
    pub(super) fn of(user: Option<User>) -> Self {
        Self { user, known: Mutex::new(Known::Nothing) }
    }

    /// What a call shows.
    pub(super) async fn token(&self, members: &Members) -> Result<Token, EtcdError> {
        let Some(user) = &self.user else { return Ok(None) };
        self.known.lock().await.token(user, members).await
    }

    /// What it shows after it failed with `used`: another token, if it was for that.
    pub(super) async fn renew(
        &self,
        members: &Members,
        used: &Token,
        error: EtcdError,
    ) -> Result<Token, EtcdError> {
        let is_of_token = error.is_of_token(used.is_some());
        let Some(user) = self.user.as_ref().filter(|_| is_of_token) else { return Err(error) };
        let mut known = self.known.lock().await;
        if matches!(&*known, Known::Token(token) if token == used) {
            *known = Known::Nothing;
        }
        known.token(user, members).await
    }
}

impl Known {
    async fn token(&mut self, user: &User, members: &Members) -> Result<Token, EtcdError> {
        match self {
            Self::Token(token) => return Ok(token.clone()),
            Self::Refused { at, error } if at.elapsed() < REFUSED_FOR => return Err(error.clone()),
            Self::Refused { .. } | Self::Nothing => {}
        }
        let call = Call::new(AUTHENTICATE, &json!({ "name": user.name(), "password": user.password() }));
        match members.hedge::<Authenticated>(&call).await {
            Ok(Authenticated { token }) => {
                let mut token = HeaderValue::try_from(token).map_err(|_| EtcdError::Answer {
                    endpoint: "etcd".to_owned(),
                    path: AUTHENTICATE,
                    answer: "a token that is no text".to_owned(),
                })?;
                token.set_sensitive(true);
                *self = Self::Token(Some(token.clone()));
                Ok(Some(token))
            }
            Err(error) if error.has_no_users() => {
                tracing::warn!(user = user.name(), "etcd has no users enabled; everybody may write to it");
                *self = Self::Token(None);
                Ok(None)
            }
            Err(error) => {
                if !error.is_unreachable() {
                    *self = Self::Refused { at: Instant::now(), error: error.clone() };
                }
                Err(error)
            }
        }
    }
}
