//! How thorough a test run is: random cases and injected failures.
//!
//! `POORWILL_EFFORT` is `quick` (a developer's run), `usual` (the default, required for every change) or
//! `long` (a night). This module scales each test's usual number.
//!
//! `POORWILL_SEED` is the seed of random tests, so that a failure can be reproduced.

use std::fmt;
use std::str::FromStr;
use std::sync::Once;

/// The environment variable that names the effort.
pub const VARIABLE: &str = "POORWILL_EFFORT";

static PRINTED: Once = Once::new();

/// The environment variable that names the seed.
pub const SEED: &str = "POORWILL_SEED";

/// The seed from the environment, if it is set.
///
/// # Panics
/// If it is not a number.
#[must_use]
pub fn seed_of_this_run() -> Option<u64> {
    let text = std::env::var_os(SEED)?;
    let seed = text.to_str().and_then(|text| text.parse().ok());
    Some(seed.unwrap_or_else(|| panic!("{SEED} is `{}`; it has to be a number", text.display())))
}

/// How thorough a test run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// A tenth of the usual cases.
    Quick,
    /// As many cases as a test states.
    Usual,
    /// Twenty times as many.
    Long,
}

impl Effort {
    /// The effort named by the environment.
    ///
    /// # Panics
    /// If the name is unknown.
    #[must_use]
    pub fn of_this_run() -> Self {
        let effort = match std::env::var(VARIABLE) {
            Ok(text) => text.parse().unwrap_or_else(|error| panic!("{error}")),
            Err(std::env::VarError::NotPresent) => Self::Usual,
            Err(error) => panic!("{VARIABLE}: {error}"),
        };
        // `cargo xtask test --rest` reruns the tests that print this.
        PRINTED.call_once(|| eprintln!("poorwill effort: {effort}"));
        effort
    }

    /// How many of `usual` cases to run: at least one.
    #[must_use]
    pub fn cases(self, usual: u32) -> u32 {
        match self {
            Self::Quick => usual.div_ceil(10),
            Self::Usual => usual,
            Self::Long => usual.saturating_mul(20),
        }
    }
}

impl FromStr for Effort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "quick" => Ok(Self::Quick),
            "usual" => Ok(Self::Usual),
            "long" => Ok(Self::Long),
            _ => Err(format!("{VARIABLE} is `{text}`; it can be quick, usual or long")),
        }
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quick => "quick",
            Self::Usual => "usual",
            Self::Long => "long",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn efforts_have_names() {
        for effort in [Effort::Quick, Effort::Usual, Effort::Long] {
            assert_eq!(effort.to_string().parse(), Ok(effort));
        }
        for text in ["", "Quick", "hard", "10"] {
            let error = text.parse::<Effort>().unwrap_err();
            assert!(error.contains(VARIABLE) && error.contains("quick, usual or long"), "{error}");
        }
    }

    #[test]
    fn fewer_cases_are_still_some() {
        let cases = |usual| [Effort::Quick, Effort::Usual, Effort::Long].map(|effort| effort.cases(usual));
        assert_eq!(cases(100), [10, 100, 2000]);
        assert_eq!(cases(1), [1, 1, 20]);
        assert_eq!(cases(u32::MAX)[2], u32::MAX);
    }
}
