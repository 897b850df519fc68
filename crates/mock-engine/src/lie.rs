//! What a mock engine may be told to do wrong, each with what an operator of a real engine sees of it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use crate::chance::Chance;

/// Something that engines do wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Lie {
    /// A sleep is answered with 200, and `is_sleeping` is true, but `nvidia-smi` shows the memory as before: an engine
    /// whose memory is another allocator's than the one that sleeps, or one started without sleep mode.
    KeepsMemory,
    /// A sleep gives back half: the weights, while the key-value cache stays (graphs, buffers of NCCL or an adapter's
    /// weights do that to real ones).
    KeepsSome,
    /// A wake is answered with 200 and `"status": "awake"`, but the key-value cache still sleeps: `is_sleeping` stays
    /// true, and requests are refused.
    WakesByHalf,
    /// A wake is answered with 200, and `is_sleeping` is false, but nothing is there: `nvidia-smi` shows a sleeper, and
    /// what is generated is gibberish.
    WakesEmpty,
    /// After a wake all is well by every figure, and the text is gibberish: weights that came back wrong, or were not
    /// loaded again after a sleep of level 2.
    Gibberish,
    /// `POST /sleep` is never answered, and nothing is computed any more; `/health` says 200 all the while. So do ranks
    /// that wait for one another. It goes on when the lie is taken back.
    HangsInSleep,
    /// The same for `POST /wake_up`.
    HangsInWake,
    /// A request is taken, and no token ever comes; `/health` says 200.
    HangsInAnswer,
    /// The process dies in the middle of a generation, as from an illegal memory access: clients see connections that
    /// break, without an end of the stream.
    CrashesInStream,
    /// The process dies in a sleep, with half of the memory given back.
    CrashesInSleep,
    /// The process dies in a wake, with half of the memory there: what being out of memory does.
    CrashesInWake,
    /// Tokens come ten times slower: a GPU that is throttled, or shared with somebody.
    Slow,
    /// Each sleep leaves a few MiB more behind: after enough of them the neighbours have no room.
    Leaks,
    /// `is_sleeping` says the opposite of what is.
    SaysAsleep,
    /// `POST /sleep` and `POST /wake_up` are answered with 500, and nothing is done.
    Refuses,
}

impl Lie {
    /// All there are.
    pub const ALL: [Self; 15] = [
        Self::KeepsMemory,
        Self::KeepsSome,
        Self::WakesByHalf,
        Self::WakesEmpty,
        Self::Gibberish,
        Self::HangsInSleep,
        Self::HangsInWake,
        Self::HangsInAnswer,
        Self::CrashesInStream,
        Self::CrashesInSleep,
        Self::CrashesInWake,
        Self::Slow,
        Self::Leaks,
        Self::SaysAsleep,
        Self::Refuses,
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
            Self::CrashesInStream => "crashes-in-stream",
            Self::CrashesInSleep => "crashes-in-sleep",
            Self::CrashesInWake => "crashes-in-wake",
            Self::Slow => "slow",
            Self::Leaks => "leaks",
            Self::SaysAsleep => "says-asleep",
            Self::Refuses => "refuses",
        }
    }
}

impl fmt::Display for Lie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Lie {
    type Err = ParseLieError;

    fn from_str(name: &str) -> Result<Self, ParseLieError> {
        let known = Self::ALL.into_iter().find(|lie| lie.name() == name);
        known.ok_or_else(|| ParseLieError::Unknown { name: shortened(name) })
    }
}

/// A lie, and how likely it is told on each occasion.
///
/// Its text is the lie's name, and a probability behind `=` unless it is always told: `gibberish`, `slow=0.25`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Telling {
    lie: Lie,
    probability: f64,
}

impl Telling {
    /// One that is always told.
    #[must_use]
    pub const fn always(lie: Lie) -> Self {
        Self { lie, probability: 1.0 }
    }

    /// One that is told with this probability.
    ///
    /// # Errors
    /// `Probability` for what is not in 0 to 1.
    pub fn at_times(lie: Lie, probability: f64) -> Result<Self, ParseLieError> {
        if (0.0..=1.0).contains(&probability) {
            Ok(Self { lie, probability })
        } else {
            Err(ParseLieError::Probability { lie, text: probability.to_string() })
        }
    }

    /// What is told.
    #[must_use]
    pub const fn lie(&self) -> Lie {
        self.lie
    }

    /// How likely, from 0 to 1.
    #[must_use]
    pub const fn probability(&self) -> f64 {
        self.probability
    }
}

impl fmt::Display for Telling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.probability >= 1.0 {
            write!(f, "{}", self.lie)
        } else {
            write!(f, "{}={}", self.lie, self.probability)
        }
    }
}

impl FromStr for Telling {
    type Err = ParseLieError;

    fn from_str(text: &str) -> Result<Self, ParseLieError> {
        let Some((name, probability)) = text.split_once('=') else {
            return Ok(Self::always(text.parse()?));
        };
        let lie: Lie = name.parse()?;
        let wrong = || ParseLieError::Probability { lie, text: shortened(probability) };
        Self::at_times(lie, probability.parse().map_err(|_| wrong())?).map_err(|_| wrong())
    }
}

/// A text that is no lie.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseLieError {
    /// No such lie.
    #[error("there is no lie `{name}`; there are {}", Lie::ALL.map(Lie::name).join(", "))]
    Unknown {
        /// What was given, shortened.
        name: String,
    },
    /// How likely it is told is no probability.
    #[error("`{text}` is no probability; write it like {lie}=0.25, from 0 to 1")]
    Probability {
        /// Of which.
        lie: Lie,
        /// What was given, shortened.
        text: String,
    },
}

fn shortened(text: &str) -> String {
    text.escape_debug().take(64).collect()
}

/// The lies that are told now, and the chance that decides when.
#[derive(Debug)]
pub(crate) struct Lies {
    told: watch::Sender<Vec<Telling>>,
    chance: Chance,
    /// How often each was told.
    counts: Mutex<BTreeMap<Lie, u64>>,
}

impl Lies {
    pub(crate) fn new(told: Vec<Telling>, seed: u64) -> Self {
        Self { told: watch::Sender::new(told), chance: Chance::new(seed), counts: Mutex::default() }
    }

    /// Whether this one is told this time.
    pub(crate) fn tells(&self, lie: Lie) -> bool {
        // Of one that is there more than once, the last counts.
        let probability =
            self.told.borrow().iter().rev().find(|told| told.lie == lie).map(|told| told.probability);
        let tells = probability.is_some_and(|probability| self.chance.happens(probability));
        if tells {
            tracing::info!(%lie, "the mock engine lies");
            *self.counts.lock().unwrap_or_else(PoisonError::into_inner).entry(lie).or_default() += 1;
        }
        tells
    }

    /// Waits until this one is not told any more.
    pub(crate) async fn taken_back(&self, lie: Lie) {
        let mut told = self.told.subscribe();
        // The sender is here: it cannot be gone.
        let _ = told.wait_for(|told| told.iter().all(|told| told.lie != lie)).await;
    }

    pub(crate) fn replace(&self, told: Vec<Telling>) {
        self.told.send_replace(told);
    }

    /// How often this one was told.
    pub(crate) fn count(&self, lie: Lie) -> u64 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.get(&lie).copied().unwrap_or(0)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.told.borrow().iter().map(Telling::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for lie in Lie::ALL {
            assert_eq!(lie.name().parse(), Ok(lie));
            for telling in [Telling::always(lie), Telling::at_times(lie, 0.25).unwrap()] {
                assert_eq!(telling.to_string().parse(), Ok(telling));
            }
        }
    }

    #[test]
    fn what_is_no_lie_is_refused_with_what_would_be_one() {
        for text in ["", "lies", "slow=", "slow=x", "slow=1.5", "slow=-1", "slow=NaN", "=1", "Slow"] {
            let error = text.parse::<Telling>().unwrap_err().to_string();
            assert!(error.contains("slow"), "{text}: {error}");
        }
        assert!(Telling::at_times(Lie::Slow, f64::NAN).is_err());
    }

    #[test]
    fn of_two_tellings_of_a_lie_the_last_counts() {
        let lies = Lies::new(vec![Telling::always(Lie::Slow), Telling::at_times(Lie::Slow, 0.0).unwrap()], 1);
        assert!(!lies.tells(Lie::Slow) && !lies.tells(Lie::Leaks));
        lies.replace(vec![Telling::always(Lie::Leaks)]);
        assert!(!lies.tells(Lie::Slow) && lies.tells(Lie::Leaks));
        assert_eq!(lies.names(), ["leaks"]);
    }
}
