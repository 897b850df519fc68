//! The password of a store, and the token that a client gets for it.

use std::fmt;

use http::{HeaderMap, header};

use super::calls::PasswordCall;
use super::refusal::{NO_USER, Refusal, WRONG_PASSWORD, WRONG_TOKEN};
use crate::etcd::User;

/// A password, and the token for it, which ends with the process.
pub struct Lock {
    password: String,
    token: String,
}

impl Lock {
    /// The token has to be random.
    #[must_use]
    pub fn new(user: &User, token: u128) -> Self {
        Self { password: user.password().to_owned(), token: format!("{token:032x}") }
    }

    /// The token, for the password with any user's name.
    pub(super) fn authenticate(&self, call: &PasswordCall) -> Result<&str, Refusal> {
        if call.name.is_empty() {
            return Err(NO_USER);
        }
        if is_same(&call.password, &self.password) { Ok(&self.token) } else { Err(WRONG_PASSWORD) }
    }

    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let given = headers.get(header::AUTHORIZATION).ok_or(NO_USER)?;
        let given = given.to_str().unwrap_or_default();
        let given = given.strip_prefix("Bearer ").unwrap_or(given);
        if is_same(given, &self.token) { Ok(()) } else { Err(WRONG_TOKEN) }
    }
}

/// In a time that says nothing of where they differ.
fn is_same(one: &str, other: &str) -> bool {
    let differs = one.bytes().zip(other.bytes()).fold(0, |differs, (one, other)| differs | (one ^ other));
    one.len() == other.len() && std::hint::black_box(differs) == 0
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

#[test]
fn only_the_password_has_a_token_and_only_the_token_opens() {
    let lock = Lock::new(&User::new("store", "right").unwrap(), 0xab);
    let call = |name: &str, password: &str| PasswordCall { name: name.into(), password: password.into() };
    let token = lock.authenticate(&call("poor", "right")).unwrap().to_owned();
    assert_eq!(token, format!("{:032x}", 0xab));
    assert_eq!(lock.authenticate(&call("", "right")), Err(NO_USER));
    for wrong in ["", "righ", "rights", "wrong"] {
        assert_eq!(lock.authenticate(&call("poor", wrong)), Err(WRONG_PASSWORD), "{wrong}");
    }
    let check =
        |token: &str| lock.check(&HeaderMap::from_iter([(header::AUTHORIZATION, token.parse().unwrap())]));
    assert_eq!(lock.check(&HeaderMap::new()), Err(NO_USER));
    assert_eq!((check(&token), check("right"), check("")), (Ok(()), Err(WRONG_TOKEN), Err(WRONG_TOKEN)));
    assert!(!format!("{lock:?}").contains("right"));
}
