//! A user of etcd.

use std::fmt;

/// A user with a password, which is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct User {
    name: String,
    password: String,
}

impl User {
    /// Of the configuration's keys `etcd_user` and `etcd_password`, the source of a secret, which `secret` resolves.
    ///
    /// # Errors
    /// One of them is missing, or the password cannot be read.
    pub fn configured(
        name: Option<String>,
        password: Option<String>,
        secret: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<Option<Self>, String> {
        let (name, source) = match (name, password) {
            (None, None) => return Ok(None),
            (Some(_), None) => {
                return Err("etcd_user needs etcd_password; say etcd_password = \"env:NAME\"".to_owned());
            }
            (None, Some(_)) => return Err("etcd_password needs etcd_user; name the user".to_owned()),
            (Some(name), Some(source)) => (name, source),
        };
        if name.is_empty() {
            return Err("etcd_user is empty; etcd has no such user".to_owned());
        }
        let user = secret(&source).and_then(|password| Self::new(&name, &password));
        user.map(Some).map_err(|why| format!("etcd_password: {why}"))
    }

    /// A user with this password.
    ///
    /// # Errors
    /// The password is empty.
    pub fn new(name: &str, password: &str) -> Result<Self, String> {
        // Editors end a file with a line.
        let password = password.trim_end_matches(['\r', '\n']);
        if password.is_empty() {
            return Err("it is empty".to_owned());
        }
        Ok(Self { name: name.to_owned(), password: password.to_owned() })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn password(&self) -> &str {
        &self.password
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("name", &self.name).finish_non_exhaustive()
    }
}

#[test]
fn a_user_has_a_name_and_a_password_that_is_not_shown() {
    let some = |text: &str| Some(text.to_owned());
    let secret = |source: &str| match source {
        "file:pw" => Ok("two words\r\n".to_owned()),
        "file:empty" => Ok("\n".to_owned()),
        _ => Err("it is not set".to_owned()),
    };
    let user = User::configured(some("poor"), some("file:pw"), &secret).unwrap().unwrap();
    assert_eq!((user.name(), user.password()), ("poor", "two words"));
    assert_eq!(format!("{user:?}"), "User { name: \"poor\", .. }");
    assert_eq!(User::configured(None, None, &secret), Ok(None));
    for (name, password, words) in [
        (some("poor"), None, "etcd_user needs etcd_password"),
        (None, some("file:pw"), "etcd_password needs etcd_user"),
        (some("poor"), some("env:PW"), "etcd_password: it is not set"),
        (some("poor"), some("file:empty"), "etcd_password: it is empty"),
        (some(""), some("file:pw"), "etcd_user is empty"),
    ] {
        let error = User::configured(name, password, &secret).unwrap_err();
        assert!(error.starts_with(words), "{error}");
    }
}
