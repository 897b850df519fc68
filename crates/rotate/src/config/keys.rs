//! API keys of clients and operators.

use std::fmt;
use std::fs;

use http::HeaderValue;
use subtle::ConstantTimeEq;

/// An API key. `Debug` hides it, and comparison takes constant time.
#[derive(Clone)]
pub struct Key(String);

impl Key {
    /// Trims `text` and checks that it is printable ASCII.
    pub(super) fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let is_plain = !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        if is_plain {
            Ok(Self(text.to_owned()))
        } else {
            Err("it has to be printable ASCII, without blanks".to_owned())
        }
    }

    /// For `Authorization`, marked as sensitive.
    pub(crate) fn header_value(&self) -> HeaderValue {
        let mut value =
            HeaderValue::try_from(format!("Bearer {}", self.0)).expect("a key is printable ASCII");
        value.set_sensitive(true);
        value
    }

    /// Compares in constant time for keys of the same length.
    #[must_use]
    pub fn matches(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.matches(&other.0)
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// The source is `env:NAME` or `file:PATH`.
pub(super) fn from_source(source: &str) -> Result<String, String> {
    if let Some(name) = source.strip_prefix("env:") {
        return std::env::var(name).map_err(|error| format!("the environment variable {name}: {error}"));
    }
    if let Some(path) = source.strip_prefix("file:") {
        return fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    }
    // The value may be the key itself, so the message does not repeat it.
    Err("keys are not written here; use env:NAME or file:PATH".to_owned())
}
