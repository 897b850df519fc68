//! The engine sleeps, wakes and reloads weights as vLLM 0.33 does, unless a fault is injected.
//!
//! Moving memory excludes generation: requests have ended, were aborted, or are paused until the wake.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use http::StatusCode;
use poorwill::PoolError;
use tokio::sync::{RwLock, watch};
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::fault::{Fault, Faults};
use crate::memory::{Contents, Memory, MemoryPart};
use crate::metrics::{self, Counts, Report};
use crate::residue::Residue;

/// The slowdown of [`Fault::Slow`].
const SLOWDOWN: u32 = 10;

#[derive(Debug)]
pub(crate) struct Engine {
    model: String,
    memory: Arc<Memory>,
    residue: Arc<Residue>,
    faults: Arc<Faults>,
    counts: Arc<Counts>,
    token_time: Duration,
    /// Shared while generating, exclusive while moving memory.
    memory_lock: Arc<RwLock<()>>,
    /// Counts sleeps that aborted requests.
    aborts: watch::Sender<u64>,
    /// Whether requests pause until the wake.
    is_pausing: watch::Sender<bool>,
    state: Mutex<EngineState>,
    /// Ends all tasks.
    end: CancellationToken,
    crash: OnceLock<Fault>,
}

/// The state that the engine reports.
#[derive(Debug, Clone, Copy, Default)]
struct EngineState {
    weights_sleep: bool,
    kv_cache_sleeps: bool,
    /// Set by a sleep of level 0, which does nothing else.
    scheduling_stopped: bool,
    /// The level of the last sleep.
    level: u8,
    /// Whether weights come back wrong until the next wake.
    is_corrupt: bool,
}

impl EngineState {
    fn is_asleep(self) -> bool {
        self.weights_sleep || self.kv_cache_sleeps || self.scheduling_stopped
    }

    fn sleeps(self, part: MemoryPart) -> bool {
        match part {
            MemoryPart::Weights => self.weights_sleep,
            MemoryPart::KvCache => self.kv_cache_sleeps,
        }
    }

    fn set(&mut self, part: MemoryPart, sleeps: bool) {
        match part {
            MemoryPart::Weights => self.weights_sleep = sleeps,
            MemoryPart::KvCache => self.kv_cache_sleeps = sleeps,
        }
    }

    fn contents(self) -> Contents {
        if self.is_corrupt { Contents::Wrong } else { Contents::Right }
    }
}

/// What a sleep does with requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// They end, with `abort` as their `finish_reason`.
    Abort,
    /// The sleep waits for them.
    Wait,
    /// They continue after the wake.
    Keep,
}

impl Engine {
    pub(crate) fn new(
        model: String,
        (memory, residue): (Arc<Memory>, Residue),
        faults: Arc<Faults>,
        token_time: Duration,
    ) -> Self {
        Self {
            model,
            memory,
            residue: Arc::new(residue),
            faults,
            counts: Arc::default(),
            token_time,
            memory_lock: Arc::default(),
            aborts: watch::Sender::new(0),
            is_pausing: watch::Sender::new(false),
            state: Mutex::default(),
            end: CancellationToken::new(),
            crash: OnceLock::new(),
        }
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(crate) fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// Shared while generating, exclusive while moving memory.
    pub(crate) fn memory_lock(&self) -> &Arc<RwLock<()>> {
        &self.memory_lock
    }

    /// Counts sleeps that aborted requests.
    pub(crate) fn aborts(&self) -> &watch::Sender<u64> {
        &self.aborts
    }

    /// Whether requests pause until the wake.
    pub(crate) fn is_pausing(&self) -> &watch::Sender<bool> {
        &self.is_pausing
    }

    /// Ends all tasks.
    pub(crate) fn end(&self) -> &CancellationToken {
        &self.end
    }

    /// In Prometheus' text format.
    pub(crate) async fn metrics(&self) -> Result<String, Failure> {
        let held = self.with_memory(|memory| Ok((memory.held_bytes()?, memory.leaked_bytes()))).await?;
        let (held_bytes, leaked_bytes) = held;
        Ok(metrics::text(&Report {
            model: &self.model,
            counts: &self.counts,
            faults: &self.faults,
            sleep_state: self.sleep_state(),
            held_bytes,
            leaked_bytes,
        }))
    }

    pub(crate) async fn sleep(&self, level: u8, mode: Mode) -> Result<(), Failure> {
        self.maybe_refuse("sleep")?;
        if mode == Mode::Keep && self.faults.occurs(Fault::KeepsNoRequests) {
            let reason = "this engine keeps no requests in a sleep: sleep with mode=wait or abort";
            return Err(Failure::new(StatusCode::NOT_IMPLEMENTED, reason));
        }
        match mode {
            Mode::Abort => self.aborts.send_modify(|aborts| *aborts += 1),
            Mode::Wait => {}
            Mode::Keep => self.is_pausing.send_modify(|is_pausing| *is_pausing = true),
        }
        let result = self.sleep_exclusive(level).await;
        if result.is_err() {
            // Resume the requests that were to pause.
            self.is_pausing.send_replace(false);
        }
        result
    }

    async fn sleep_exclusive(&self, level: u8) -> Result<(), Failure> {
        let _exclusive = self.memory_lock.write().await;
        self.maybe_hang(Fault::HangsInSleep).await;
        if level == 0 {
            self.state().scheduling_stopped = true;
            return Ok(());
        }
        if self.state().weights_sleep {
            // vLLM logs that it sleeps already, and answers 200.
            return Ok(());
        }
        if self.faults.occurs(Fault::CrashesInSleep) {
            self.with_memory(|memory| memory.release(&[MemoryPart::Weights])).await?;
            return self.crash(Fault::CrashesInSleep).await;
        }
        let released: &'static [MemoryPart] = if self.faults.occurs(Fault::KeepsMemory) {
            &[]
        } else if self.faults.occurs(Fault::KeepsSome) {
            &[MemoryPart::Weights]
        } else {
            &MemoryPart::ALL
        };
        let leaks = self.faults.occurs(Fault::Leaks);
        self.with_memory(move |memory| {
            if leaks {
                memory.leak();
            }
            memory.release(released)
        })
        .await?;
        let mut state = self.state();
        MemoryPart::ALL.into_iter().for_each(|part| state.set(part, true));
        state.level = level;
        Ok(())
    }

    /// Wakes all or the named parts; returns whether all is awake.
    pub(crate) async fn wake(&self, tags: Option<&[String]>) -> Result<bool, Failure> {
        if self.residue.is_off() {
            let reason = "wake_up: this engine hibernates; resume its processes first";
            return Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, reason));
        }
        self.maybe_refuse("wake_up")?;
        let _exclusive = self.memory_lock.write().await;
        self.maybe_hang(Fault::HangsInWake).await;
        let before = *self.state();
        let named: Option<Vec<&str>> =
            tags.map(|tags| tags.iter().map(String::as_str).filter(|tag| *tag != "scheduling").collect());
        let sleepers: Vec<MemoryPart> =
            MemoryPart::ALL.into_iter().filter(|part| before.sleeps(*part)).collect();
        let is_sleeper = |name: &&str| sleepers.iter().any(|part| part.name() == *name);
        if named.as_ref().is_some_and(|named| !named.iter().all(is_sleeper)) {
            // vLLM logs that this part does not sleep, and answers 200.
            return Ok(!before.is_asleep());
        }
        let is_wanted = |part: &MemoryPart| {
            named.as_ref().is_none_or(|named| named.iter().any(|name| *name == part.name()))
        };
        let wanted: Vec<MemoryPart> = sleepers.iter().copied().filter(is_wanted).collect();
        let is_partial = !wanted.is_empty() && self.wake_parts(&wanted, before.level).await?;
        let mut state = self.state();
        let woken = wanted.iter().filter(|part| !(is_partial && **part == MemoryPart::KvCache));
        woken.for_each(|part| state.set(*part, false));
        if !(state.weights_sleep || state.kv_cache_sleeps) {
            state.scheduling_stopped = false;
            self.is_pausing.send_replace(false);
        }
        Ok(is_partial || !state.is_asleep())
    }

    /// Returns whether the wake was partial.
    async fn wake_parts(&self, wanted: &[MemoryPart], level: u8) -> Result<bool, Failure> {
        let mut woken = wanted.to_vec();
        if woken.contains(&MemoryPart::Weights) {
            let is_corrupt = self.faults.occurs(Fault::Gibberish);
            self.state().is_corrupt = is_corrupt;
        }
        let contents = if level == 2 { Contents::Undefined } else { self.state().contents() };
        if self.faults.occurs(Fault::CrashesInWake) {
            self.with_memory(move |memory| memory.restore(&[MemoryPart::Weights], contents)).await?;
            return self.crash(Fault::CrashesInWake).await;
        }
        let is_partial = self.faults.occurs(Fault::WakesByHalf);
        if is_partial {
            woken.retain(|part| *part != MemoryPart::KvCache);
        }
        if !self.faults.occurs(Fault::WakesEmpty) {
            self.with_memory(move |memory| memory.restore(&woken, contents)).await?;
        }
        Ok(is_partial)
    }

    /// Loads the weights again, as after a sleep of level 2.
    pub(crate) async fn reload_weights(&self) -> Result<(), Failure> {
        let _exclusive = self.memory_lock.write().await;
        let state = *self.state();
        if state.weights_sleep {
            let reason = "reload_weights needs the weights, which sleep: POST /wake_up?tags=weights first";
            return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason));
        }
        self.with_memory(move |memory| memory.load_weights(state.contents())).await
    }

    /// Whether it sleeps, completely or in part.
    pub(crate) fn is_asleep(&self) -> bool {
        self.state().is_asleep()
    }

    /// The sleep state, as vLLM's metrics name it.
    pub(crate) fn sleep_state(&self) -> &'static str {
        let state = self.state();
        match (state.weights_sleep || state.kv_cache_sleeps, state.level) {
            (false, _) => "awake",
            (true, 2) => "discard_all",
            (true, _) => "weights_offloaded",
        }
    }

    /// Time per token for a request that starts now.
    pub(crate) fn token_time(&self) -> Duration {
        let slowdown = if self.faults.occurs(Fault::Slow) { SLOWDOWN } else { 1 };
        self.token_time.saturating_mul(slowdown)
    }

    pub(crate) fn crashed(&self) -> Option<Fault> {
        self.crash.get().copied()
    }

    /// Ends everything at once, and never returns.
    pub(crate) async fn crash<T>(&self, fault: Fault) -> T {
        // The first crash is the one that is reported.
        let _ = self.crash.set(fault);
        self.end.cancel();
        std::future::pending().await
    }

    /// Runs `act` on a thread that may block.
    pub(crate) async fn with_memory<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Memory) -> Result<T, PoolError> + Send + 'static,
    ) -> Result<T, Failure> {
        let (memory, residue) = (Arc::clone(&self.memory), Arc::clone(&self.residue));
        let joined = tokio::task::spawn_blocking(move || {
            let _call = residue
                .enter()
                .map_err(|lost| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, lost.to_string()))?;
            Ok::<_, Failure>(act(&memory)?)
        });
        let join_error = |error| {
            Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("a thread of the engine ended: {error}"))
        };
        joined.await.map_err(join_error)?
    }

    fn maybe_refuse(&self, path: &str) -> Result<(), Failure> {
        if self.faults.occurs(Fault::Refuses) {
            let reason = format!("{path} failed: this engine is configured to refuse");
            return Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason));
        }
        Ok(())
    }

    async fn maybe_hang(&self, fault: Fault) {
        if self.faults.occurs(fault) {
            self.faults.wait_until_cleared(fault).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::FaultSpec;

    #[test]
    fn a_slow_engine_takes_ten_times_as_long() {
        let memory = Arc::new(Memory::open("one", 1 << 20, None, None).unwrap());
        let faults = Arc::new(Faults::new(Vec::new(), 0));
        let residue = Residue::open(0, None, &memory, &faults).unwrap();
        let engine = Engine::new("one".into(), (memory, residue), faults, Duration::from_millis(5));
        assert_eq!(engine.token_time(), Duration::from_millis(5));
        engine.faults.replace(vec![FaultSpec::always(Fault::Slow)]);
        assert_eq!(engine.token_time(), Duration::from_millis(50));
    }
}
