//! The tiers of tests, and how hard they try on this machine.

use std::fmt;
use std::num::NonZero;
use std::thread;
use std::time::Duration;

use crate::steps::Failure;

/// The effort of random tests; `poorwill_testkit::effort` reads it.
pub(crate) const EFFORT: &str = "POORWILL_EFFORT";

/// Which tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    /// What a developer runs.
    Quick,
    /// Everything.
    Full,
    /// What a `Quick` run leaves of `Full`.
    Rest,
}

/// No step takes this long with the usual effort, even on a slow machine.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(60 * 60);

const EFFORTS: [&str; 3] = ["quick", "usual", "long"];

/// Exists if NVIDIA's kernel driver has a GPU.
pub(crate) const GPU_IS_HERE: &str = "/dev/nvidiactl";

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Quick => "quick; `--full` is everything",
            Tier::Full => "full",
            Tier::Rest => "rest",
        })
    }
}

/// The effort of random tests: from the environment, otherwise from the tier.
pub(crate) fn effort(tier: Tier) -> Result<String, Failure> {
    effort_of(tier, std::env::var(EFFORT).ok())
}

/// After which time a step with this effort is stuck.
pub(crate) fn stuck_after(effort: &str) -> Duration {
    STUCK_AFTER * if effort == "long" { 20 } else { 1 }
}

fn effort_of(tier: Tier, named: Option<String>) -> Result<String, Failure> {
    match named {
        Some(named) if EFFORTS.contains(&&*named) => Ok(named),
        Some(named) => Err(Failure::Usage {
            problem: format!("{EFFORT} is `{named}`; it can be {}", EFFORTS.join(", ")),
        }),
        None if tier == Tier::Quick => Ok("quick".to_owned()),
        None => Ok("usual".to_owned()),
    }
}

/// Twice as many parallel tests as cores, since many of them wait.
pub(crate) fn jobs() -> usize {
    thread::available_parallelism().map_or(2, NonZero::get) * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effort_is_the_environments_or_the_tiers() {
        for (tier, own) in [(Tier::Quick, "quick"), (Tier::Full, "usual"), (Tier::Rest, "usual")] {
            assert_eq!(effort_of(tier, None).unwrap(), own);
            assert_eq!(effort_of(tier, Some("long".to_owned())).unwrap(), "long");
            let message = effort_of(tier, Some("hard".to_owned())).unwrap_err().to_string();
            assert_eq!(message, "POORWILL_EFFORT is `hard`; it can be quick, usual, long");
        }
    }
}
