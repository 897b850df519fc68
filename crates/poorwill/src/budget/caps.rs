//! Caps of several devices in one text: `0.92`, or `cuda:0=20GiB,cuda:1=0.92`.

use std::fmt;
use std::str::FromStr;

use poorwill_core::budget::{Cap, InvalidCap};

use crate::device::{DeviceSpec, ParseDeviceError};

/// The user's caps: one for all devices, one for each, or both.
///
/// ```
/// use poorwill::budget::Caps;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let caps: Caps = "0.9,cuda:1=20GiB".parse()?;
/// assert_eq!(caps.of(&"cuda:0".parse()?), Some("0.9".parse()?));
/// assert_eq!(caps.of(&"cuda:1".parse()?), Some("20GiB".parse()?));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Caps {
    others: Option<Cap>,
    named: Vec<(String, Cap)>,
}

/// Why a text is not a list of caps.
///
/// ```
/// use poorwill::budget::{Caps, InvalidCaps};
///
/// let error = "cuda:0=1GiB,cuda:0=2GiB".parse::<Caps>().unwrap_err();
/// assert!(matches!(error, InvalidCaps::Twice { .. }));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCaps {
    /// A cap is malformed.
    #[error("{}{error}", whole(text, error))]
    Cap {
        /// The text.
        text: String,
        /// The error in a part of it.
        error: InvalidCap,
    },
    /// The text before `=` names no device.
    #[error(transparent)]
    Device(#[from] ParseDeviceError),
    /// Two caps for one device.
    #[error("`{text}`: two budgets for {device}; write one each, like cuda:0=20GiB,cuda:1=0.92")]
    Twice {
        /// The text.
        text: String,
        /// The device.
        device: String,
    },
}

fn shown(text: &str) -> String {
    text.escape_debug().take(128).collect()
}

fn whole(text: &str, error: &InvalidCap) -> String {
    if text == error.text { String::new() } else { format!("`{text}`: ") }
}

impl Caps {
    /// The device's own cap, or the one for all devices.
    #[must_use]
    pub fn of(&self, device: &DeviceSpec) -> Option<Cap> {
        let id = device.id();
        self.named.iter().find(|(named, _)| *named == id).map(|(_, cap)| *cap).or(self.others)
    }

    /// The named devices, in order.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(device, _)| device.as_str())
    }

    fn add(&mut self, text: &str, device: Option<String>, cap: Cap) -> Result<(), InvalidCaps> {
        let twice = |device: &str| InvalidCaps::Twice { text: shown(text), device: device.to_owned() };
        match device {
            Some(device) if self.devices().any(|named| named == device) => Err(twice(&device)),
            Some(device) => {
                self.named.push((device, cap));
                Ok(())
            }
            None if self.others.is_some() => Err(twice("all devices")),
            None => {
                self.others = Some(cap);
                Ok(())
            }
        }
    }
}

impl From<Cap> for Caps {
    fn from(cap: Cap) -> Self {
        Self { others: Some(cap), named: Vec::new() }
    }
}

impl FromStr for Caps {
    type Err = InvalidCaps;

    fn from_str(text: &str) -> Result<Self, InvalidCaps> {
        let mut caps = Self::default();
        for entry in text.split(',') {
            let (device, cap) = match entry.split_once('=') {
                None => (None, entry),
                Some((device, cap)) => (Some(device.trim().parse::<DeviceSpec>()?.id()), cap),
            };
            let cap = cap.parse().map_err(|error| InvalidCaps::Cap { text: shown(text), error })?;
            caps.add(text, device, cap)?;
        }
        Ok(caps)
    }
}

impl fmt::Display for Caps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = self.others.map(|cap| cap.to_string());
        let named = self.named.iter().map(|(device, cap)| format!("{device}={cap}"));
        f.write_str(&others.into_iter().chain(named).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(caps: &str, device: &str) -> Option<String> {
        let caps: Caps = caps.parse().unwrap();
        assert_eq!(caps.to_string().parse(), Ok(caps.clone()), "{caps}");
        caps.of(&device.parse().unwrap()).map(|cap| cap.to_string())
    }

    #[test]
    fn one_for_all_or_one_each() {
        for device in ["cuda:0", "cuda:7", "host", "host:1GiB"] {
            assert_eq!(of("0.92", device).as_deref(), Some("0.92"));
        }
        let each = "cuda:0=20GiB, cuda:1 = 92%";
        assert_eq!(of(each, "cuda:0").as_deref(), Some("20 GiB"));
        assert_eq!(of(each, "cuda:1").as_deref(), Some("0.92"));
        assert_eq!(of(each, "cuda:2"), None);
        assert_eq!(of("0.5,cuda=0.25,host=1GiB", "cuda:0").as_deref(), Some("0.25"));
        assert_eq!(of("0.5,cuda=0.25,host=1GiB", "cuda:1").as_deref(), Some("0.5"));
        assert_eq!(of("0.5,cuda=0.25,host=1GiB", "host:8GiB").as_deref(), Some("1 GiB"));
        assert_eq!("cuda:1=0.5,0.9".parse::<Caps>().unwrap().devices().collect::<Vec<_>>(), ["cuda:1"]);
        assert_eq!(Caps::default().of(&"host".parse().unwrap()), None);
    }

    #[test]
    fn the_rest_is_refused_by_name() {
        for (text, words) in [
            ("", "no budget"),
            ("0.5,", "no budget"),
            ("cuda:0=", "no budget"),
            ("gpu=0.5", "names no device"),
            ("=0.5", "names no device"),
            ("cuda:0=0.5=0.6", "no budget"),
            ("hip:0=0.5", "AMD"),
            ("0.5,0.6", "two budgets for all devices"),
            ("cuda=0.5,cuda:0=0.6", "two budgets for cuda:0"),
            ("cuda:0=1.5", "at most 1.0"),
        ] {
            let error = text.parse::<Caps>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
