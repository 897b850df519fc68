//! Sizes in bytes as people write and read them.
//!
//! [`ByteSize`] parses `24GiB`, `22g`, `22528m`, `1.53 GiB`, `80GB` or a plain count in integer arithmetic.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A number of bytes. Serializes as a number.
///
/// ```
/// use poorwill::ByteSize;
///
/// assert_eq!("24GiB".parse(), Ok(ByteSize::gib(24)));
/// assert_eq!(ByteSize(1_610_612_736).to_string(), "1.5 GiB");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The largest size, up to this one, that prints exactly: for upper bounds.
    #[must_use]
    pub fn rounded_down(self) -> Self {
        self.readable(|hundredths, _| hundredths)
    }

    /// The smallest size, from this one on, that prints exactly and fits: for lower bounds.
    #[must_use]
    pub fn rounded_up(self) -> Self {
        self.readable(|hundredths, has_rest| hundredths + u128::from(has_rest))
    }

    /// A whole number of hundredths of its unit.
    fn readable(self, choose: impl FnOnce(u128, bool) -> u128) -> Self {
        let Some((_, scale)) = unit(self.0) else { return self };
        let (hundreds, scale) = (u128::from(self.0) * 100, u128::from(scale));
        let hundredths = choose(hundreds / scale, hundreds % scale != 0);
        // Rounded up, so that it prints as this figure.
        u64::try_from((hundredths * scale).div_ceil(100)).map_or(self, Self)
    }
}

fn unit(bytes: u64) -> Option<(&'static str, u64)> {
    BINARY.into_iter().find(|(_, scale)| bytes >= *scale)
}

const BINARY: [(&str, u64); 6] = [
    ("EiB", 1 << 60),
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

impl fmt::Display for ByteSize {
    /// Up to two decimals, rounded to nearest: `23.68 GiB`, `2 MiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((unit, scale)) = unit(self.0) else {
            return f.pad(&format!("{} B", self.0));
        };
        let hundredths = (u128::from(self.0) * 100 + u128::from(scale) / 2) / u128::from(scale);
        let (whole, rest) = (hundredths / 100, hundredths % 100);
        let text = match rest {
            0 => format!("{whole} {unit}"),
            r if r % 10 == 0 => format!("{whole}.{} {unit}", r / 10),
            r => format!("{whole}.{r:02} {unit}"),
        };
        f.pad(&text)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

/// The text is not a size.
///
/// ```
/// use poorwill::ByteSize;
///
/// let error = "24 gallons".parse::<ByteSize>().unwrap_err();
/// assert_eq!(error.text, "24 gallons");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a size: {reason}; write it like 24GiB, 1.5GiB, 512m or 1048576")]
#[non_exhaustive]
pub struct ParseSizeError {
    /// As given.
    pub text: String,
    /// What is wrong.
    pub reason: &'static str,
}

impl ParseSizeError {
    /// An error about `text`.
    #[must_use]
    pub fn new(text: impl Into<String>, reason: &'static str) -> Self {
        Self { text: text.into(), reason }
    }
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    /// Only `kB`, `MB`, `GB`, `TB`, `PB`, `EB` are powers of 1000; `k`, `m`, `g`, `t` and `KiB` … `EiB` are
    /// powers of 1024. Case does not matter. Fractions of a unit round down to a byte; fractions of a byte
    /// are refused.
    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        let fail = |reason| ParseSizeError::new(text, reason);
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        if number.is_empty() {
            return Err(fail("it does not begin with a number"));
        }
        let scale = unit_scale(unit.trim_start()).ok_or_else(|| fail("the unit is not known"))?;
        let (whole, fraction) = match number.split_once('.') {
            None => (number, None),
            Some((whole, fraction)) => (whole, Some(fraction)),
        };
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || fraction.is_some_and(|f| !digits(f)) {
            return Err(fail("the number is malformed"));
        }
        let too_large = || fail("it does not fit into 64 bits");
        let mut bytes = whole
            .parse::<u128>()
            .ok()
            .and_then(|n| n.checked_mul(u128::from(scale)))
            .ok_or_else(too_large)?;
        if let Some(fraction) = fraction.map(|f| f.trim_end_matches('0')).filter(|f| !f.is_empty()) {
            if scale == 1 {
                return Err(fail("it is not a whole number of bytes"));
            }
            let part = fraction_of(fraction, scale).ok_or_else(|| fail("it has too many decimal places"))?;
            bytes = bytes.checked_add(part).ok_or_else(too_large)?;
        }
        u64::try_from(bytes).map(Self).map_err(|_| too_large())
    }
}

/// `0.fraction × scale`, rounded down.
fn fraction_of(fraction: &str, scale: u64) -> Option<u128> {
    let power = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let parts = fraction.parse::<u128>().ok()?.checked_mul(u128::from(scale))?;
    Some(parts / power)
}

fn unit_scale(unit: &str) -> Option<u64> {
    let binary = |n: u32| Some(1u64 << (10 * n));
    let decimal = |n: u32| Some(1000u64.pow(n));
    match unit.to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "ki" | "kib" => binary(1),
        "m" | "mi" | "mib" => binary(2),
        "g" | "gi" | "gib" => binary(3),
        "t" | "ti" | "tib" => binary(4),
        "p" | "pi" | "pib" => binary(5),
        "e" | "ei" | "eib" => binary(6),
        "kb" => decimal(1),
        "mb" => decimal(2),
        "gb" => decimal(3),
        "tb" => decimal(4),
        "pb" => decimal(5),
        "eb" => decimal(6),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512b", 512),
            ("22g", 22 << 30),
            ("22528m", 22 << 30),
            ("22GiB", 22 << 30),
            ("22 GiB", 22 << 30),
            (" 22gib ", 22 << 30),
            ("1.5GiB", 3 << 29),
            ("0.5k", 512),
            ("80GB", 80_000_000_000),
            ("1.53GiB", 1_642_824_990),
            ("15.999EiB", 18_445_591_152_204_944_769),
            ("0.0001k", 0),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_the_rest_and_repeats_it() {
        for text in [
            "",
            " ",
            "GiB",
            "1.5.GiB",
            "1..5g",
            ".5g",
            "1.",
            "-1",
            "+1",
            "1e9",
            "0x10",
            "1,5GiB",
            "1 5",
            "12q",
            "16EiB",
            "99999999999999999999999999999999999999999",
            "1GiBB",
            "٣",
            "1.0000001",
            "1.50",
            "1.5b",
            "0.0000000000000000000000000000000000000000001g",
            "340282366920938463463374607431768211.9kB",
        ] {
            let error = text.parse::<ByteSize>().expect_err(text);
            assert_eq!(error.text, text);
            assert!(error.to_string().contains("write it like"), "{error}");
        }
    }

    #[test]
    fn prints_the_largest_readable_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (2 << 20, "2 MiB"),
            (3 << 29, "1.5 GiB"),
            (25_426_206_392, "23.68 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>10}|", ByteSize::mib(2)), "     2 MiB|");
    }

    #[test]
    fn rounds_to_what_can_be_printed() {
        let gib = |hundredths: u64| (hundredths << 30).div_ceil(100);
        for (bytes, down, up) in [
            (0, 0, 0),
            (1023, 1023, 1023),
            (5 << 30, 5 << 30, 5 << 30),
            (gib(2103) + 1, gib(2103), gib(2104)),
            (gib(2104) - 1, gib(2103), gib(2104)),
            ((1 << 30) - 1, 1_073_731_339, 1 << 30),
        ] {
            let size = ByteSize(bytes);
            assert_eq!((size.rounded_down(), size.rounded_up()), (ByteSize(down), ByteSize(up)), "{bytes}");
        }
        assert_eq!(ByteSize(u64::MAX).rounded_up(), ByteSize(u64::MAX));
        assert_eq!(ByteSize(gib(2103) + 1).rounded_down().to_string(), "21.03 GiB");
        assert_eq!(ByteSize(gib(2103) + 1).rounded_up().to_string(), "21.04 GiB");
    }
}
