//! A machine with one GPU, and engines on it that lie when they are told to.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use poorwill_rotate::config::Model;
use poorwill_rotate::engine::{Answer, Engine, EngineError};
use poorwill_rotate::measure::{Measured, Memory, Meter, MeterError};
use poorwill_rotate::policy::{Found, Gpu};

/// What an engine does other than it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    KeepsMemory,
    WakesByHalf,
    Gibberish,
    HangsInSleep,
    HangsInWake,
    HangsInAnswer,
    SaysAsleep,
    Refuses,
}

impl Lie {
    pub(crate) const ALL: [Self; 8] = [
        Self::KeepsMemory,
        Self::WakesByHalf,
        Self::Gibberish,
        Self::HangsInSleep,
        Self::HangsInWake,
        Self::HangsInAnswer,
        Self::SaysAsleep,
        Self::Refuses,
    ];
}

#[derive(Debug)]
pub(crate) struct Machine {
    total: u64,
    each: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    engines: BTreeMap<String, OneEngine>,
    awake_at_most: usize,
    /// Somebody woke though there was no room.
    was_too_full: bool,
}

#[derive(Debug, Default)]
struct OneEngine {
    is_awake: bool,
    has_memory: bool,
    is_well: bool,
    lie: Option<Lie>,
}

impl Machine {
    /// A GPU of `total` bytes for engines of `each`.
    pub(crate) fn new(total: u64, each: u64) -> Arc<Self> {
        Arc::new(Self { total, each, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn with<T>(&self, url: &str, act: impl FnOnce(&mut OneEngine) -> T) -> T {
        let mut state = self.state();
        let done = act(state.engines.entry(url.to_owned()).or_default());
        let awake = state.engines.values().filter(|one| one.has_memory).count();
        state.awake_at_most = state.awake_at_most.max(awake);
        state.was_too_full |= awake as u64 * self.each > self.total;
        done
    }

    pub(crate) fn wake(&self, url: &str) {
        self.with(url, |one| (one.is_awake, one.has_memory, one.is_well) = (true, true, true));
    }

    /// It sleeps, and nobody has asked the rotation.
    pub(crate) fn doze(&self, url: &str) {
        self.with(url, |one| (one.is_awake, one.has_memory, one.is_well) = (false, false, false));
    }

    pub(crate) fn lie(&self, url: &str, lie: Lie) {
        self.with(url, |one| one.lie = Some(lie));
    }

    /// It is honest from now on. One that is not well was started again by somebody, and has gone to sleep.
    pub(crate) fn be_honest(&self, url: &str) {
        self.with(url, |one| {
            one.lie = None;
            if !(one.is_awake && one.has_memory && one.is_well) {
                *one = OneEngine::default();
            }
        });
    }

    pub(crate) fn is_right(&self, url: &str) -> bool {
        self.with(url, |one| one.is_awake && one.has_memory && one.is_well)
    }

    pub(crate) fn awake_at_most(&self) -> usize {
        self.state().awake_at_most
    }

    pub(crate) fn was_too_full(&self) -> bool {
        self.state().was_too_full
    }

    pub(crate) fn meter(self: &Arc<Self>) -> Arc<dyn Meter> {
        Arc::new(Gauge(Arc::clone(self)))
    }

    #[allow(clippy::type_complexity)]
    pub(crate) fn connect(
        self: &Arc<Self>,
    ) -> Box<dyn Fn(&Model) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync> {
        let machine = Arc::clone(self);
        Box::new(move |model: &Model| {
            machine.with(&model.url, |_| ());
            Ok(Arc::new(Wire { machine: Arc::clone(&machine), url: model.url.clone() }) as Arc<dyn Engine>)
        })
    }
}

#[derive(Debug)]
struct Gauge(Arc<Machine>);

impl Meter for Gauge {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        Box::pin(async move {
            let used =
                self.0.state().engines.values().filter(|one| one.has_memory).count() as u64 * self.0.each;
            let Some(free_bytes) = self.0.total.checked_sub(used) else {
                let reason = format!("{used} bytes are in use of {}", self.0.total);
                return Err(MeterError { gpu: gpus[0], reason });
            };
            Ok(gpus.iter().map(|_| Memory { free_bytes, total_bytes: self.0.total }).collect())
        })
    }
}

#[derive(Debug)]
struct Wire {
    machine: Arc<Machine>,
    url: String,
}

impl Wire {
    fn refused(&self) -> EngineError {
        EngineError::Refused { asked: self.url.clone(), status: 500, words: "no".to_owned() }
    }
}

async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(3)).await;
}

async fn for_ever() {
    std::future::pending::<()>().await;
}

impl Engine for Wire {
    fn look(&self) -> Answer<'_, Found> {
        Box::pin(async {
            let awake = self.is_awake().await?;
            Ok(if awake { Found::Awake } else { Found::Asleep })
        })
    }

    fn sleep(&self) -> Answer<'_, ()> {
        Box::pin(async {
            a_moment().await;
            match self.machine.with(&self.url, |one| one.lie) {
                Some(Lie::HangsInSleep) => for_ever().await,
                Some(Lie::Refuses) => return Err(self.refused()),
                _ => {}
            }
            self.machine.with(&self.url, |one| {
                (one.is_awake, one.is_well) = (false, false);
                one.has_memory &= one.lie == Some(Lie::KeepsMemory);
            });
            Ok(())
        })
    }

    fn wake(&self) -> Answer<'_, ()> {
        Box::pin(async {
            a_moment().await;
            match self.machine.with(&self.url, |one| one.lie) {
                Some(Lie::HangsInWake) => for_ever().await,
                Some(Lie::Refuses) => return Err(self.refused()),
                _ => {}
            }
            self.machine.with(&self.url, |one| {
                one.has_memory = true;
                one.is_awake = one.lie != Some(Lie::WakesByHalf);
                one.is_well = one.lie != Some(Lie::Gibberish);
            });
            Ok(())
        })
    }

    fn is_awake(&self) -> Answer<'_, bool> {
        Box::pin(async {
            a_moment().await;
            Ok(self.machine.with(&self.url, |one| one.is_awake != (one.lie == Some(Lie::SaysAsleep))))
        })
    }

    fn generate(&self) -> Answer<'_, String> {
        Box::pin(async {
            a_moment().await;
            if self.machine.with(&self.url, |one| one.lie) == Some(Lie::HangsInAnswer) {
                for_ever().await;
            }
            let well = self.machine.with(&self.url, |one| one.is_well && one.has_memory);
            Ok(if well { format!("I am {}", self.url) } else { "#".to_owned() })
        })
    }
}
