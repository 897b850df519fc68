//! API keys of clients and operators.

use std::fmt::{self, Write as _};

use http::HeaderValue;
use ring::hmac;
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

/// Signatures, by which one holder of a key shows another one that it has the key.
impl Key {
    /// HMAC-SHA256 over a text, as hexadecimal. It does not show the key, but who reads it can try guesses.
    #[must_use]
    pub fn signature(&self, text: &str) -> String {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.text.as_bytes());
        let tag = hmac::sign(&key, text.as_bytes());
        tag.as_ref().iter().fold(String::new(), |mut hex, byte| {
            // Cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// Whether one of these is this key's over the text.
    #[must_use]
    pub fn has_signed(&self, text: &str, signatures: &[String]) -> bool {
        let own = self.signature(text);
        signatures.iter().any(|signature| bool::from(own.as_bytes().ct_eq(signature.as_bytes())))
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

#[test]
fn signatures_are_of_a_key_and_a_text() {
    let key = |text: &str| Key::new(text, None).unwrap();
    // The second test case of RFC 4231.
    let text = "what do ya want for nothing?";
    let known = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843".to_owned();
    assert_eq!(key("Jefe").signature(text), known);
    assert!(key("Jefe").has_signed(text, &[String::new(), known.clone()]));
    assert!(!key("Jeff").has_signed(text, std::slice::from_ref(&known)));
    assert!(!key("Jefe").has_signed("what", std::slice::from_ref(&known)));
    assert!(!key("Jefe").has_signed(text, &[]));
}
