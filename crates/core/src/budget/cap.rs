//! What the user allows: bytes, or a share of the total.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::bytes::ByteSize;

/// Smaller numbers without a unit are refused: 22 does not mean 22 bytes.
const UNITLESS_BYTES_MIN: u64 = 1 << 20;

/// Parts of a whole.
const WHOLE: u64 = 1_000_000_000_000;

/// Decimal places of [`WHOLE`].
const PLACES: usize = 12;

/// Most memory to use. Reads `20GiB`, `22528m`, `0.92` or `92%`; serializes as it prints.
///
/// ```
/// use poorwill_core::budget::Cap;
///
/// let total_bytes = 23 << 30;
/// assert_eq!("20GiB".parse::<Cap>().unwrap().of(total_bytes), 20 << 30);
/// assert_eq!("0.5".parse::<Cap>().unwrap().of(total_bytes), 23 << 29);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cap {
    /// At least one.
    Bytes(u64),
    /// Of the total.
    Share(Share),
}

impl Cap {
    /// The cap in bytes, which may exceed the total. A share is rounded down.
    #[must_use]
    pub fn of(self, total_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Share(share) => share.of(total_bytes),
        }
    }
}

impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Rounded only where the text reads back exactly.
            Self::Bytes(bytes) => {
                let short = ByteSize(*bytes).to_string();
                let is_exact = short.parse() == Ok(ByteSize(*bytes));
                f.pad(&if is_exact { short } else { format!("{bytes} B") })
            }
            Self::Share(share) => share.fmt(f),
        }
    }
}

impl Serialize for Cap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// More than nothing, at most all. Exact to twelve decimal places.
///
/// ```
/// use poorwill::Cap;
///
/// let Cap::Share(share) = "92%".parse()? else { panic!("a part of the total") };
/// assert_eq!(share.of(1000), 920);
/// # Ok::<(), poorwill::budget::InvalidCap>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u64);

impl Share {
    /// This part of `bytes`, rounded down.
    #[must_use]
    pub fn of(self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.0) / u128::from(WHOLE);
        u64::try_from(part).unwrap_or(bytes)
    }

    /// The smallest share of two decimal places with at least `bytes`. `None` for 0, or for more than the
    /// total.
    #[must_use]
    pub fn at_least(bytes: u64, total_bytes: u64) -> Option<Self> {
        if bytes == 0 || bytes > total_bytes {
            return None;
        }
        // People write 0.92.
        [WHOLE / 100, WHOLE / 1000, 1].into_iter().find_map(|step| {
            let parts = (u128::from(bytes) * u128::from(WHOLE)).div_ceil(u128::from(total_bytes));
            let rounded = parts.div_ceil(u128::from(step)) * u128::from(step);
            u64::try_from(rounded).ok().filter(|parts| *parts <= WHOLE).map(Self)
        })
    }

    /// The largest share of two decimal places within `bytes`. `None` below 0.01.
    #[must_use]
    pub fn within(bytes: u64, total_bytes: u64) -> Option<Self> {
        let hundredths = u128::from(bytes) * 100 / u128::from(total_bytes.max(1));
        let hundredths = u64::try_from(hundredths.min(100)).unwrap_or(100);
        (hundredths > 0).then_some(Self(hundredths * (WHOLE / 100)))
    }
}

impl fmt::Display for Share {
    /// As a decimal fraction: `0.92`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:0PLACES$}", self.0 % WHOLE);
        let fraction = fraction.trim_end_matches('0');
        let fraction = if fraction.is_empty() { "0" } else { fraction };
        f.pad(&format!("{}.{fraction}", self.0 / WHOLE))
    }
}

/// The text is not a cap.
///
/// ```
/// use poorwill::Cap;
///
/// let error = "22".parse::<Cap>().unwrap_err(); // Of what unit?
/// assert_eq!(error.text, "22");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no budget: {reason}; write bytes like 20GiB or 22528m, or a share of the total like 0.92"
)]
#[non_exhaustive]
pub struct InvalidCap {
    /// As given.
    pub text: String,
    /// What is wrong.
    pub reason: String,
}

impl InvalidCap {
    /// An error about `text`.
    #[must_use]
    pub fn new(text: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { text: text.into(), reason: reason.into() }
    }
}

impl FromStr for Cap {
    type Err = InvalidCap;

    /// A decimal fraction without a unit, or a number with `%`, is a share; all else is a [`ByteSize`]. Small
    /// whole numbers without a unit are refused.
    fn from_str(text: &str) -> Result<Self, InvalidCap> {
        let fail = |reason: &str| InvalidCap {
            text: text.escape_debug().take(128).collect(),
            reason: reason.into(),
        };
        let trimmed = text.trim();
        if let Some(percent) = trimmed.strip_suffix('%') {
            return share(percent.trim_end(), PLACES - 2).map(Self::Share).map_err(fail);
        }
        let is_unitless = !trimmed.is_empty() && trimmed.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        if is_unitless && trimmed.contains('.') {
            return share(trimmed, PLACES).map(Self::Share).map_err(fail);
        }
        let bytes = trimmed.parse::<ByteSize>().map_err(|error| fail(error.reason))?.0;
        match bytes {
            0 => Err(fail("with nothing to use, nothing can be loaded")),
            1 if is_unitless => Err(fail("it is one byte; all there is, is 1.0 or 100%")),
            _ if is_unitless && bytes < UNITLESS_BYTES_MIN => {
                Err(fail("without a unit it is that many bytes"))
            }
            _ => Ok(Self::Bytes(bytes)),
        }
    }
}

/// A decimal number in units of `10^-places` of a whole.
fn share(number: &str, places: usize) -> Result<Share, &'static str> {
    const MALFORMED: &str = "the number is malformed";
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) || whole.is_empty() && fraction.is_empty() {
        return Err(MALFORMED);
    }
    let too_much = "a share is at most 1.0, which is 100%; with a unit it would be a number of bytes";
    let scale = 10u64.pow(u32::try_from(places).map_err(|_| MALFORMED)?);
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_much)? };
    let (kept, rest) = fraction.split_at(fraction.len().min(places));
    // Missing places are zeros; excess ones are dropped.
    let kept: u64 = format!("{kept:0<places$}").parse().map_err(|_| MALFORMED)?;
    let parts = whole.checked_mul(scale).and_then(|parts| parts.checked_add(kept)).ok_or(too_much)?;
    let has_rest = rest.bytes().any(|b| b != b'0');
    if parts > WHOLE || parts == WHOLE && has_rest {
        return Err(too_much);
    }
    if parts == 0 {
        return Err("with nothing to use, nothing can be loaded");
    }
    Ok(Share(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn cap(text: &str) -> Cap {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn bytes_in_all_spellings() {
        for text in ["22GiB", "22g", "22528m", "22 GiB", " 22gib ", "23622320128"] {
            assert_eq!(cap(text), Cap::Bytes(22 * GIB), "{text}");
        }
        assert_eq!(cap("1.5GiB"), Cap::Bytes(3 * GIB / 2));
        assert_eq!(cap("22GiB").of(GIB), 22 * GIB);
        for bytes in [22 * GIB, 22 * GIB + 1, 1_642_824_990, 1_642_824_991, 1 << 20, (1 << 20) + 1] {
            let shown = Cap::Bytes(bytes).to_string();
            assert_eq!(cap(&shown), Cap::Bytes(bytes), "{shown} is another budget");
        }
    }

    #[test]
    fn shares_in_all_spellings() {
        for (text, printed) in [
            ("0.92", "0.92"),
            (".92", "0.92"),
            ("92%", "0.92"),
            ("92.0 %", "0.92"),
            ("0.9200", "0.92"),
            ("1.0", "1.0"),
            ("1.", "1.0"),
            ("100%", "1.0"),
            ("0.5", "0.5"),
            ("0.000000000001", "0.000000000001"),
            ("0.30000000000000004", "0.3"),
            ("12.5%", "0.125"),
        ] {
            let share = cap(text);
            assert!(matches!(share, Cap::Share(_)), "{text}");
            assert_eq!(share.to_string(), printed, "{text}");
            assert_eq!(cap(&share.to_string()), share, "{text} does not read back");
        }
    }

    #[test]
    fn a_share_is_exact_and_rounded_down() {
        assert_eq!(cap("1.0").of(u64::MAX), u64::MAX);
        assert_eq!(cap("0.5").of(3), 1);
        assert_eq!(cap("0.92").of(100), 92);
        assert_eq!(cap("0.000000000001").of(100), 0);
        let limits = ["0.95", "0.92", "0.88"].map(|text| cap(text).of(23 * GIB));
        assert_eq!(limits, [23_461_258_854, 22_720_376_995, 21_732_534_517]);
    }

    #[test]
    fn the_rest_is_refused_with_a_hint() {
        for (text, words) in [
            ("", "begin with a number"),
            ("%", "malformed"),
            (".", "malformed"),
            ("0", "nothing"),
            ("0.0", "nothing"),
            ("0%", "nothing"),
            ("0GiB", "nothing"),
            ("0.0000000000001", "nothing"),
            ("1", "one byte"),
            ("22", "without a unit"),
            ("1048575", "without a unit"),
            ("1.5", "at most 1.0"),
            ("1.0000000000001", "at most 1.0"),
            ("101%", "at most 1.0"),
            ("99999999999999999999999.9", "at most 1.0"),
            ("-0.5", "begin with a number"),
            ("0.9.2", "malformed"),
            ("0,92", "unit is not known"),
            ("1e-1", "unit is not known"),
            ("NaN", "begin with a number"),
            ("20GB/s", "unit is not known"),
            ("16EiB", "64 bits"),
        ] {
            let error = text.parse::<Cap>().expect_err(text).to_string();
            assert!(error.contains(words) && error.contains("like 0.92"), "{text}: {error}");
            assert!(error.starts_with(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn shares_for_people() {
        let makes = |bytes, total| Share::at_least(bytes, total).map(|share| share.to_string());
        assert_eq!(makes(21 * GIB + 32_212_255, 23 * GIB).as_deref(), Some("0.92"));
        assert_eq!(makes(23 * GIB, 23 * GIB).as_deref(), Some("1.0"));
        assert_eq!(makes(23 * GIB - 1, 23 * GIB).as_deref(), Some("1.0"));
        assert_eq!((makes(0, GIB), makes(GIB + 1, GIB), makes(1, 0)), (None, None, None));
        for bytes in [1, GIB / 3, GIB - 1, GIB] {
            assert!(Share::at_least(bytes, GIB).unwrap().of(GIB) >= bytes, "{bytes}");
        }
        let within = |bytes, total| Share::within(bytes, total).map(|share| share.to_string());
        assert_eq!(within(22 * GIB, 23 * GIB).as_deref(), Some("0.95"));
        assert_eq!((within(0, GIB), within(1, 0).as_deref()), (None, Some("1.0")));
    }
}
