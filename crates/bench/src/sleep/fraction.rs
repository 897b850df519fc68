//! A fraction, written as people write it.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// A fraction from 0 to 1; parses `1%` or `0.01`, and serializes as a number.
///
/// ```
/// use poorwill_bench::sleep::Fraction;
///
/// assert_eq!("1%".parse::<Fraction>().unwrap(), "0.01".parse().unwrap());
/// assert_eq!("1%".parse::<Fraction>().unwrap().of(250), 3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
pub struct Fraction(f64);

impl Fraction {
    /// Nothing.
    pub const NONE: Self = Self(0.0);
    /// Everything.
    pub const ALL: Self = Self(1.0);
    /// A hundredth.
    pub const HUNDREDTH: Self = Self(0.01);

    /// A number from 0 to 1.
    #[must_use]
    pub fn as_number(self) -> f64 {
        self.0
    }

    /// This part of `count`, rounded; at least one unless the part is nothing.
    #[must_use]
    // Counts are far below 2^53, where a float begins to round.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn of(self, count: usize) -> usize {
        let least = usize::from(self.0 > 0.0);
        ((count as f64 * self.0).round() as usize).max(least).min(count)
    }
}

impl fmt::Display for Fraction {
    /// As percent: `1 %`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Hides the rounding of a float.
        let percent = (self.0 * 1e12).round() / 1e10;
        write!(f, "{percent}\u{a0}%")
    }
}

/// A text that is no fraction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a fraction: {reason}; write it like 1% or 0.01")]
pub struct InvalidFraction {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl FromStr for Fraction {
    type Err = InvalidFraction;

    /// Refuses a whole number without `%`, except 0: 1 could mean a hundredth or everything.
    fn from_str(text: &str) -> Result<Self, InvalidFraction> {
        let fail = |reason| Err(InvalidFraction { text: text.escape_debug().take(128).collect(), reason });
        let trimmed = text.trim();
        let (digits, whole) = match trimmed.strip_suffix('%') {
            Some(percent) => (percent.trim_end(), 100.0),
            None => (trimmed, 1.0),
        };
        if digits.starts_with('-') {
            return fail("it is less than nothing");
        }
        let Some(number) = decimal(digits) else { return fail("it is no number") };
        if trimmed == digits && !digits.contains('.') && number > 0.0 {
            return fail("it could be meant in hundredths or as a whole");
        }
        if number > whole { fail("it is more than everything") } else { Ok(Self(number / whole)) }
    }
}

/// Digits with at most one point.
fn decimal(text: &str) -> Option<f64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if is_plain && text.bytes().any(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_part_and_what_is_none() {
        for (text, number, shown) in [
            ("1%", 0.01, "1\u{a0}%"),
            ("0.01", 0.01, "1\u{a0}%"),
            (" 0.5 % ", 0.005, "0.5\u{a0}%"),
            ("0", 0.0, "0\u{a0}%"),
            ("0%", 0.0, "0\u{a0}%"),
            ("1.0", 1.0, "100\u{a0}%"),
            ("100%", 1.0, "100\u{a0}%"),
            (".07", 0.07, "7\u{a0}%"),
        ] {
            let fraction: Fraction = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!((fraction.as_number() - number).abs() < 1e-15, "{text}");
            assert_eq!(fraction.to_string(), shown, "{text}");
        }
        for (text, word) in [
            ("", "no number"),
            ("x", "no number"),
            ("%", "no number"),
            (".", "no number"),
            ("1e-2", "no number"),
            ("1.2.3", "no number"),
            ("nan", "no number"),
            ("1", "hundredths"),
            ("7", "hundredths"),
            ("200%", "more than everything"),
            ("1.01", "more than everything"),
            ("-1", "less than nothing"),
            ("-1%", "less than nothing"),
        ] {
            let error = text.parse::<Fraction>().expect_err(text).to_string();
            assert!(error.contains(word) && error.contains("like 1% or 0.01"), "{text}: {error}");
        }
    }

    #[test]
    fn parts_of_counts() {
        for (fraction, count, part) in [
            (Fraction::NONE, 100, 0),
            (Fraction::HUNDREDTH, 0, 0),
            (Fraction::HUNDREDTH, 1, 1),
            (Fraction::HUNDREDTH, 149, 1),
            (Fraction::HUNDREDTH, 151, 2),
            (Fraction::HUNDREDTH, 12_400, 124),
            (Fraction::ALL, 7, 7),
        ] {
            assert_eq!(fraction.of(count), part, "{fraction} of {count}");
        }
    }
}
