//! The engine of a mock engine: one that sleeps, wakes, and loads weights again, as vLLM 0.33 does, or lies about it.
//!
//! Whoever moves memory has the engine for itself: what is generated has ended, was aborted, or is kept until the wake.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use http::StatusCode;
use poorwill::PoolError;
use tokio::sync::{RwLock, watch};
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::lie::{Lie, Lies};
use crate::memory::{Contents, Memory, Part};
use crate::metrics::Counts;

/// How much slower a slow engine is.
const SLOWER: u32 = 10;

/// An engine.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) model: String,
    pub(crate) memory: Arc<Memory>,
    pub(crate) lies: Lies,
    pub(crate) counts: Arc<Counts>,
    token_time: Duration,
    /// Held to read by whoever generates, and to write by whoever moves memory.
    pub(crate) turn: Arc<RwLock<()>>,
    /// Counts the sleeps that have ended what was being generated.
    pub(crate) aborts: watch::Sender<u64>,
    /// Whether what is being generated is to wait for the wake.
    pub(crate) is_keeping: watch::Sender<bool>,
    state: Mutex<State>,
    /// Ends everything that goes on here.
    pub(crate) end: CancellationToken,
    crash: OnceLock<Lie>,
}

/// What the engine believes of itself.
#[derive(Debug, Clone, Copy, Default)]
struct State {
    weights_sleep: bool,
    kv_cache_sleeps: bool,
    /// A sleep of level 0 stops this, and nothing else.
    scheduling_stopped: bool,
    /// How deep the last sleep was.
    level: u8,
    /// Whether weights come back wrong until the next wake.
    is_spoilt: bool,
}

impl State {
    fn is_asleep(self) -> bool {
        self.weights_sleep || self.kv_cache_sleeps || self.scheduling_stopped
    }

    fn sleeps(self, part: Part) -> bool {
        match part {
            Part::Weights => self.weights_sleep,
            Part::KvCache => self.kv_cache_sleeps,
        }
    }

    fn set(&mut self, part: Part, sleeps: bool) {
        match part {
            Part::Weights => self.weights_sleep = sleeps,
            Part::KvCache => self.kv_cache_sleeps = sleeps,
        }
    }

    fn contents(self) -> Contents {
        if self.is_spoilt { Contents::Wrong } else { Contents::Right }
    }
}

/// What a sleep does with what is being generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It ends, with `finish_reason` saying `abort`.
    Abort,
    /// The sleep waits for it.
    Wait,
    /// It goes on after the wake.
    Keep,
}

impl Engine {
    pub(crate) fn new(model: String, memory: Memory, lies: Lies, token_time: Duration) -> Self {
        Self {
            model,
            memory: Arc::new(memory),
            lies,
            counts: Arc::default(),
            token_time,
            turn: Arc::default(),
            aborts: watch::Sender::new(0),
            is_keeping: watch::Sender::new(false),
            state: Mutex::default(),
            end: CancellationToken::new(),
            crash: OnceLock::new(),
        }
    }

    /// Sleeps at a level.
    pub(crate) async fn sleep(&self, level: u8, mode: Mode) -> Result<(), Failure> {
        self.may_refuse("sleep")?;
        match mode {
            Mode::Abort => self.aborts.send_modify(|aborts| *aborts += 1),
            Mode::Wait => {}
            Mode::Keep => self.is_keeping.send_modify(|is_keeping| *is_keeping = true),
        }
        let slept = self.sleep_alone(level).await;
        if slept.is_err() {
            // What was to be kept goes on.
            self.is_keeping.send_replace(false);
        }
        slept
    }

    async fn sleep_alone(&self, level: u8) -> Result<(), Failure> {
        let _turn = self.turn.write().await;
        self.may_hang(Lie::HangsInSleep).await;
        if level == 0 {
            self.state().scheduling_stopped = true;
            return Ok(());
        }
        if self.state().weights_sleep {
            // vLLM says in its log that it sleeps already, and 200.
            return Ok(());
        }
        if self.lies.tells(Lie::CrashesInSleep) {
            self.with_memory(|memory| memory.release(&[Part::Weights])).await?;
            return self.crash(Lie::CrashesInSleep).await;
        }
        let released: &'static [Part] = if self.lies.tells(Lie::KeepsMemory) {
            &[]
        } else if self.lies.tells(Lie::KeepsSome) {
            &[Part::Weights]
        } else {
            &Part::ALL
        };
        let leaks = self.lies.tells(Lie::Leaks);
        self.with_memory(move |memory| {
            if leaks {
                memory.leak();
            }
            memory.release(released)
        })
        .await?;
        let mut state = self.state();
        Part::ALL.into_iter().for_each(|part| state.set(part, true));
        state.level = level;
        Ok(())
    }

    /// Wakes what sleeps, or some of it, and says whether all is awake.
    pub(crate) async fn wake(&self, tags: Option<&[String]>) -> Result<bool, Failure> {
        self.may_refuse("wake_up")?;
        let _turn = self.turn.write().await;
        self.may_hang(Lie::HangsInWake).await;
        let before = *self.state();
        let named: Option<Vec<&str>> =
            tags.map(|tags| tags.iter().map(String::as_str).filter(|tag| *tag != "scheduling").collect());
        let sleepers: Vec<Part> = Part::ALL.into_iter().filter(|part| before.sleeps(*part)).collect();
        let is_sleeper = |name: &&str| sleepers.iter().any(|part| part.name() == *name);
        if named.as_ref().is_some_and(|named| !named.iter().all(is_sleeper)) {
            // vLLM says in its log that this does not sleep, and 200.
            return Ok(!before.is_asleep());
        }
        let is_wanted =
            |part: &Part| named.as_ref().is_none_or(|named| named.iter().any(|name| *name == part.name()));
        let wanted: Vec<Part> = sleepers.iter().copied().filter(is_wanted).collect();
        let by_half = !wanted.is_empty() && self.wake_parts(&wanted, before.level).await?;
        let mut state = self.state();
        let woken = wanted.iter().filter(|part| !(by_half && **part == Part::KvCache));
        woken.for_each(|part| state.set(*part, false));
        if !(state.weights_sleep || state.kv_cache_sleeps) {
            state.scheduling_stopped = false;
            self.is_keeping.send_replace(false);
        }
        Ok(by_half || !state.is_asleep())
    }

    /// Whether it was by half.
    async fn wake_parts(&self, wanted: &[Part], level: u8) -> Result<bool, Failure> {
        let mut woken = wanted.to_vec();
        if woken.contains(&Part::Weights) {
            let is_spoilt = self.lies.tells(Lie::Gibberish);
            self.state().is_spoilt = is_spoilt;
        }
        let contents = if level == 2 { Contents::Undefined } else { self.state().contents() };
        if self.lies.tells(Lie::CrashesInWake) {
            self.with_memory(move |memory| memory.bring_back(&[Part::Weights], contents)).await?;
            return self.crash(Lie::CrashesInWake).await;
        }
        let by_half = self.lies.tells(Lie::WakesByHalf);
        if by_half {
            woken.retain(|part| *part != Part::KvCache);
        }
        if !self.lies.tells(Lie::WakesEmpty) {
            self.with_memory(move |memory| memory.bring_back(&woken, contents)).await?;
        }
        Ok(by_half)
    }

    /// Loads the weights again, as after a sleep of level 2.
    pub(crate) async fn reload_weights(&self) -> Result<(), Failure> {
        let _turn = self.turn.write().await;
        let state = *self.state();
        if state.weights_sleep {
            let reason = "reload_weights needs the weights, which sleep: POST /wake_up?tags=weights first";
            return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason));
        }
        self.with_memory(move |memory| memory.load_weights(state.contents())).await
    }

    /// Whether it sleeps, wholly or by half.
    pub(crate) fn is_asleep(&self) -> bool {
        self.state().is_asleep()
    }

    /// The state of sleep that vLLM's metrics tell.
    pub(crate) fn sleep_state(&self) -> &'static str {
        let state = self.state();
        match (state.weights_sleep || state.kv_cache_sleeps, state.level) {
            (false, _) => "awake",
            (true, 2) => "discard_all",
            (true, _) => "weights_offloaded",
        }
    }

    /// How long each token of a request takes that begins now.
    pub(crate) fn token_time(&self) -> Duration {
        let slower = if self.lies.tells(Lie::Slow) { SLOWER } else { 1 };
        self.token_time.saturating_mul(slower)
    }

    /// The lie that has ended it, if one has.
    pub(crate) fn crashed(&self) -> Option<Lie> {
        self.crash.get().copied()
    }

    /// Ends everything at once. What comes behind it never happens.
    pub(crate) async fn crash<T>(&self, lie: Lie) -> T {
        // Whoever crashes first has crashed it.
        let _ = self.crash.set(lie);
        self.end.cancel();
        std::future::pending().await
    }

    /// Does something with the memory on a thread that may be blocked.
    pub(crate) async fn with_memory<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Memory) -> Result<T, PoolError> + Send + 'static,
    ) -> Result<T, Failure> {
        let memory = Arc::clone(&self.memory);
        let acted = tokio::task::spawn_blocking(move || act(&memory)).await;
        let broke = |error| {
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("a thread of the engine ended: {error}"))
        };
        Ok(acted.map_err(broke)??)
    }

    fn may_refuse(&self, asked: &str) -> Result<(), Failure> {
        if self.lies.tells(Lie::Refuses) {
            let reason = format!("{asked} failed: this engine was told to refuse");
            return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason));
        }
        Ok(())
    }

    async fn may_hang(&self, lie: Lie) {
        if self.lies.tells(lie) {
            self.lies.taken_back(lie).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lie::Telling;

    #[test]
    fn a_slow_one_takes_ten_times_as_long() {
        let memory = Memory::open("one", 1 << 20).unwrap();
        let engine = Engine::new("one".into(), memory, Lies::new(Vec::new(), 0), Duration::from_millis(5));
        assert_eq!(engine.token_time(), Duration::from_millis(5));
        engine.lies.replace(vec![Telling::always(Lie::Slow)]);
        assert_eq!(engine.token_time(), Duration::from_millis(50));
    }
}
