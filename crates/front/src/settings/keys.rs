//! API keys of clients and operators.

use std::fmt;

use http::HeaderValue;
use subtle::ConstantTimeEq;

/// An API key. `Debug` hides it, and comparison takes constant time.
#[derive(Clone)]
pub struct Key {
    text: String,
    share: Option<KeyShare>,
}

/// What the holders of a key may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyShare {
    /// Shown in logs. Keys of the same name share their requests.
    pub name: String,
    /// Most requests at a time; `None` for as many as everybody.
    pub requests_max: Option<usize>,
    /// Added to the priority of the model of each request.
    pub priority: i32,
}

impl Key {
    /// Trims `text` and checks that it is printable ASCII.
    ///
    /// # Errors
    /// It is not.
    pub fn new(text: &str, share: Option<KeyShare>) -> Result<Self, String> {
        let text = text.trim();
        let is_plain = !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic());
        if is_plain {
            Ok(Self { text: text.to_owned(), share })
        } else {
            Err("it has to be printable ASCII, without blanks".to_owned())
        }
    }

    /// For `Authorization`, marked as sensitive.
    #[must_use]
    pub fn header_value(&self) -> HeaderValue {
        let mut value =
            HeaderValue::try_from(format!("Bearer {}", self.text)).expect("a key is printable ASCII");
        value.set_sensitive(true);
        value
    }

    /// `None` for a key without a name.
    #[must_use]
    pub fn share(&self) -> Option<&KeyShare> {
        self.share.as_ref()
    }

    /// Compares in constant time for keys of the same length.
    #[must_use]
    pub fn matches(&self, given: &str) -> bool {
        self.text.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.matches(&other.text) && self.share == other.share
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}
