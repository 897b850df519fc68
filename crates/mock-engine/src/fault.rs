//! Faults of real engines that a mock engine can inject, as their operator sees them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use crate::random::SharedRng;

/// A fault of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// A sleep is answered with 200, and `is_sleeping` is true, but `nvidia-smi` shows the memory as before.
    /// Causes: the memory is another allocator's, or the engine runs without sleep mode.
    KeepsMemory,
    /// A sleep releases the weights, but not the key-value cache. Graphs, NCCL buffers or adapter weights
    /// cause this.
    KeepsSome,
    /// A wake is answered with 200 and `"status": "awake"`, but the key-value cache sleeps: `is_sleeping`
    /// stays true, and requests are refused.
    WakesByHalf,
    /// A wake is answered with 200, and `is_sleeping` is false, but the memory is missing, and the text is
    /// gibberish.
    WakesEmpty,
    /// After a wake all figures are right, but the text is gibberish: weights came back wrong, or were not
    /// reloaded after level 2.
    Gibberish,
    /// `POST /sleep` is not answered until the fault is cleared, while `/health` answers 200: as when ranks
    /// wait for each other.
    HangsInSleep,
    /// The same for `POST /wake_up`.
    HangsInWake,
    /// A request is accepted, and never gets a token; `/health` answers 200.
    HangsInAnswer,
    /// `/health` is not answered until the fault is cleared, while requests are: as of a server with few threads.
    HangsInHealth,
    /// The process crashes during generation, as by an illegal memory access: connections break.
    CrashesInStream,
    /// The process crashes during a sleep, with half of the memory released.
    CrashesInSleep,
    /// The process crashes during a wake, with half of the memory mapped: as when out of memory.
    CrashesInWake,
    /// Tokens take ten times as long: the GPU is throttled or shared.
    Slow,
    /// Each sleep leaks a few MiB, until other engines lack memory.
    Leaks,
    /// `is_sleeping` reports the opposite.
    SaysAsleep,
    /// `POST /sleep` and `POST /wake_up` do nothing and are answered with 500.
    Refuses,
    /// `POST /sleep?mode=keep` is answered with 501: it cannot keep its requests in a sleep.
    KeepsNoRequests,
    /// Its process is not taken off its device: the driver refuses.
    HibernateRefuses,
    /// Its process is taken off, but what it held stays: another process holds it.
    ResidueStays,
    /// Its process is not put back.
    ResumeFails,
    /// It has a communicator with another rank, which keeps its process on its device.
    Communicator,
    /// Its health is answered with 503, and requests with 500: as after an error of the device.
    Unhealthy,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 22] = [
        Self::KeepsMemory,
        Self::KeepsSome,
        Self::WakesByHalf,
        Self::WakesEmpty,
        Self::Gibberish,
        Self::HangsInSleep,
        Self::HangsInWake,
        Self::HangsInAnswer,
        Self::HangsInHealth,
        Self::CrashesInStream,
        Self::CrashesInSleep,
        Self::CrashesInWake,
        Self::Slow,
        Self::Leaks,
        Self::SaysAsleep,
        Self::Refuses,
        Self::KeepsNoRequests,
        Self::HibernateRefuses,
        Self::ResidueStays,
        Self::ResumeFails,
        Self::Communicator,
        Self::Unhealthy,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::KeepsMemory => "keeps-memory",
            Self::KeepsSome => "keeps-some",
            Self::WakesByHalf => "wakes-by-half",
            Self::WakesEmpty => "wakes-empty",
            Self::Gibberish => "gibberish",
            Self::HangsInSleep => "hangs-in-sleep",
            Self::HangsInWake => "hangs-in-wake",
            Self::HangsInAnswer => "hangs-in-answer",
            Self::HangsInHealth => "hangs-in-health",
            Self::CrashesInStream => "crashes-in-stream",
            Self::CrashesInSleep => "crashes-in-sleep",
            Self::CrashesInWake => "crashes-in-wake",
            Self::Slow => "slow",
            Self::Leaks => "leaks",
            Self::SaysAsleep => "says-asleep",
            Self::Refuses => "refuses",
            Self::KeepsNoRequests => "keeps-no-requests",
            Self::HibernateRefuses => "hibernate-refuses",
            Self::ResidueStays => "residue-stays",
            Self::ResumeFails => "resume-fails",
            Self::Communicator => "communicator",
            Self::Unhealthy => "unhealthy",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Fault {
    type Err = ParseFaultError;

    fn from_str(name: &str) -> Result<Self, ParseFaultError> {
        let known = Self::ALL.into_iter().find(|fault| fault.name() == name);
        known.ok_or_else(|| ParseFaultError::Unknown { name: shortened(name) })
    }
}

/// A fault, and its probability wherever it can occur.
///
/// As text: `gibberish`, or with a probability `slow=0.25`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FaultSpec {
    fault: Fault,
    probability: f64,
}

impl FaultSpec {
    /// A fault that always occurs.
    #[must_use]
    pub const fn always(fault: Fault) -> Self {
        Self { fault, probability: 1.0 }
    }

    /// A fault with this probability.
    ///
    /// # Errors
    /// `Probability` if it is outside 0 to 1.
    pub fn with_probability(fault: Fault, probability: f64) -> Result<Self, ParseFaultError> {
        if (0.0..=1.0).contains(&probability) {
            Ok(Self { fault, probability })
        } else {
            Err(ParseFaultError::Probability { fault, text: probability.to_string() })
        }
    }

    /// The fault.
    #[must_use]
    pub const fn fault(&self) -> Fault {
        self.fault
    }

    /// Its probability, from 0 to 1.
    #[must_use]
    pub const fn probability(&self) -> f64 {
        self.probability
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.probability >= 1.0 {
            write!(f, "{}", self.fault)
        } else {
            write!(f, "{}={}", self.fault, self.probability)
        }
    }
}

impl FromStr for FaultSpec {
    type Err = ParseFaultError;

    fn from_str(text: &str) -> Result<Self, ParseFaultError> {
        let Some((name, probability)) = text.split_once('=') else {
            return Ok(Self::always(text.parse()?));
        };
        let fault: Fault = name.parse()?;
        let invalid = || ParseFaultError::Probability { fault, text: shortened(probability) };
        Self::with_probability(fault, probability.parse().map_err(|_| invalid())?).map_err(|_| invalid())
    }
}

/// A text that names no fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseFaultError {
    /// The fault is unknown.
    #[error("there is no fault `{name}`; there are {}", Fault::ALL.map(Fault::name).join(", "))]
    Unknown {
        /// The text, shortened.
        name: String,
    },
    /// The probability is not a number from 0 to 1.
    #[error("`{text}` is not a probability; write it like {fault}=0.25, from 0 to 1")]
    Probability {
        /// Its fault.
        fault: Fault,
        /// The text, shortened.
        text: String,
    },
}

fn shortened(text: &str) -> String {
    text.escape_debug().take(64).collect()
}

/// The active faults, and the random numbers that decide when they occur.
#[derive(Debug)]
pub(crate) struct Faults {
    active: watch::Sender<Vec<FaultSpec>>,
    rng: SharedRng,
    /// How often each has occurred.
    counts: Mutex<BTreeMap<Fault, u64>>,
}

impl Faults {
    pub(crate) fn new(active: Vec<FaultSpec>, seed: u64) -> Self {
        Self { active: watch::Sender::new(active), rng: SharedRng::new(seed), counts: Mutex::default() }
    }

    /// Whether this fault occurs now; if so, counts it.
    pub(crate) fn occurs(&self, fault: Fault) -> bool {
        // The last of several entries for a fault wins.
        let probability =
            self.active.borrow().iter().rev().find(|spec| spec.fault == fault).map(|spec| spec.probability);
        let occurs = probability.is_some_and(|probability| self.rng.happens(probability));
        if occurs {
            tracing::info!(%fault, "the mock engine injects a fault");
            *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(fault).or_default() += 1;
        }
        occurs
    }

    /// Waits until this fault is no longer active.
    pub(crate) async fn wait_until_cleared(&self, fault: Fault) {
        let mut active = self.active.subscribe();
        // `self` holds the sender, so it cannot close.
        let _ = active.wait_for(|specs| specs.iter().all(|spec| spec.fault != fault)).await;
    }

    pub(crate) fn replace(&self, active: Vec<FaultSpec>) {
        self.active.send_replace(active);
    }

    pub(crate) fn count(&self, fault: Fault) -> u64 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&fault).copied().unwrap_or(0)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.active.borrow().iter().map(FaultSpec::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for fault in Fault::ALL {
            assert_eq!(fault.name().parse(), Ok(fault));
            for spec in [FaultSpec::always(fault), FaultSpec::with_probability(fault, 0.25).unwrap()] {
                assert_eq!(spec.to_string().parse(), Ok(spec));
            }
        }
    }

    #[test]
    fn an_unknown_fault_is_refused_with_the_known_ones() {
        for text in ["", "faults", "slow=", "slow=x", "slow=1.5", "slow=-1", "slow=NaN", "=1", "Slow"] {
            let error = text.parse::<FaultSpec>().unwrap_err().to_string();
            assert!(error.contains("slow"), "{text}: {error}");
        }
        assert!(FaultSpec::with_probability(Fault::Slow, f64::NAN).is_err());
    }

    #[test]
    fn the_last_of_two_specs_of_a_fault_wins() {
        let faults = Faults::new(
            vec![FaultSpec::always(Fault::Slow), FaultSpec::with_probability(Fault::Slow, 0.0).unwrap()],
            1,
        );
        assert!(!faults.occurs(Fault::Slow) && !faults.occurs(Fault::Leaks));
        faults.replace(vec![FaultSpec::always(Fault::Leaks)]);
        assert!(!faults.occurs(Fault::Slow) && faults.occurs(Fault::Leaks));
        assert_eq!(faults.names(), ["leaks"]);
    }
}
