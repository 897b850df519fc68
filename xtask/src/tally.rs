//! Counts of tests that passed, failed and were ignored.

use std::fmt;
use std::ops::AddAssign;

/// The sums over all result lines of test programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Tally {
    pub(crate) const ONE_PASSED: Self = Self::of(1, 0, 0);
    pub(crate) const ONE_FAILED: Self = Self::of(0, 1, 0);
    pub(crate) const ONE_SKIPPED: Self = Self::of(0, 0, 1);

    pub(crate) const fn of(passed: u64, failed: u64, skipped: u64) -> Self {
        Self { passed, failed, skipped }
    }

    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The number of tests that were run.
    pub(crate) fn all(&self) -> u64 {
        self.passed + self.failed + self.skipped
    }

    /// Adds a result line of cargo's or of a test program's.
    pub(crate) fn add(&mut self, line: &str) {
        if let Some((_, result)) = line.split_once("test result: ") {
            self.add_counts(result);
        }
    }

    /// The same for the last line of pytest: `=== 2 passed, 1 skipped in 0.10s ===`.
    pub(crate) fn add_pytest(&mut self, line: &str) {
        let line = line.trim_matches(['=', ' ']);
        let Some((counts, took)) = line.rsplit_once(" in ") else { return };
        let seconds = took.split(' ').next().and_then(|took| took.strip_suffix('s'));
        if seconds.is_some_and(|seconds| seconds.parse::<f64>().is_ok()) {
            self.add_counts(counts);
        }
    }

    fn add_counts(&mut self, result: &str) {
        let words: Vec<&str> = result.split([' ', ';', ',', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" | "error" | "errors" => self.failed += count,
                "ignored" | "skipped" | "xfailed" => self.skipped += count,
                _ => {}
            }
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.02s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "test passed ... ok",
        ] {
            tally.add(line);
        }
        assert_eq!(tally, Tally { passed: 5, failed: 1, skipped: 1 });
        tally += tally;
        assert_eq!(tally.to_string(), "10 passed, 2 failed, 2 skipped");
    }

    #[test]
    fn results_of_pytest_are_summed() {
        let mut tally = Tally::default();
        for line in [
            "collected 3 items in 0.1s",
            "========= 1 failed, 22 passed, 2 skipped, 1 xfailed, 3 warnings, 1 error in 0.08s ==========",
            "5 passed in 61.00s (0:01:01)",
            "tests/test_sizes.py ..F.  9 passed in time",
        ] {
            tally.add_pytest(line);
        }
        assert_eq!(tally, Tally { passed: 27, failed: 2, skipped: 3 });
    }
}
