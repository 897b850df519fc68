//! A machine with one GPU, and mock engines whose faults a test sets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use poorwill_rotate::config::{CanaryKind, Model};
use poorwill_rotate::engine::{Answer, Content, Engine, EngineError, EngineFuture};
use poorwill_rotate::lending::{LendError, Lender, Lenders, Lent, LentTotals};
use poorwill_rotate::measure::{GpuMemory, LentAs, Measured, Meter, MeterError, WithLent};
use poorwill_rotation_policy::{EngineState, Gpu};

/// The name of its GPU's memory.
pub(crate) const MEMORY: &str = "GPU-0";

/// A fault of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    KeepsMemory,
    WakesByHalf,
    Gibberish,
    HangsInSleep,
    HangsInWake,
    HangsInAnswer,
    SaysAsleep,
    Refuses,
    /// Its health is not answered.
    Silent,
    /// Its health answers that it is not well.
    Unwell,
    /// It sleeps and wakes, and does not answer that.
    AnswersNoMove,
}

impl Fault {
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
    /// What each engine holds besides, unless it hibernates.
    residue: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    engines: BTreeMap<String, OneEngine>,
    /// The URL of each model.
    urls: BTreeMap<String, String>,
    awake_at_most: usize,
    hibernations: usize,
    /// An engine was asked for something while it hibernated.
    was_asked_off: bool,
    /// An engine woke without enough free memory.
    was_overcommitted: bool,
    /// Whether engines lend what they hold when they sleep.
    lends: bool,
    /// What was lent, and what of it was freed for others.
    totals: LentTotals,
}

#[derive(Debug, Default)]
pub(crate) struct OneEngine {
    is_awake: bool,
    pub(crate) is_off: bool,
    pub(crate) has_memory: bool,
    /// It sleeps, and its memory is still there.
    is_lent: bool,
    is_well: bool,
    set_fault: Option<Fault>,
}

impl Machine {
    /// A GPU of `total` bytes for engines of `each`.
    pub(crate) fn new(total: u64, each: u64) -> Arc<Self> {
        Self::with_residue(total, each, 0)
    }

    /// Each engine holds `residue` besides, unless it hibernates.
    pub(crate) fn with_residue(total: u64, each: u64, residue: u64) -> Arc<Self> {
        Arc::new(Self { total, each, residue, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn with<T>(&self, url: &str, act: impl FnOnce(&mut OneEngine) -> T) -> T {
        let mut state = self.state();
        let done = act(state.engines.entry(url.to_owned()).or_default());
        let awake = state.engines.values().filter(|one| one.has_memory).count();
        state.awake_at_most = state.awake_at_most.max(awake);
        state.was_overcommitted |= self.used(&state) > self.total;
        done
    }

    fn used(&self, state: &State) -> u64 {
        let held = |one: &OneEngine| {
            u64::from(one.has_memory || one.is_lent) * self.each + u64::from(!one.is_off) * self.residue
        };
        state.engines.values().map(held).sum()
    }

    /// The same for a request of the rotation, which a hibernating engine must not get.
    fn asked<T>(&self, url: &str, act: impl FnOnce(&mut OneEngine) -> T) -> T {
        let (is_off, done) = self.with(url, |one| (one.is_off, act(one)));
        self.state().was_asked_off |= is_off;
        done
    }

    pub(crate) fn hibernations(&self) -> usize {
        self.state().hibernations
    }

    pub(crate) fn was_asked_off(&self) -> bool {
        self.state().was_asked_off
    }

    pub(crate) fn is_off(&self, model: &str) -> bool {
        self.off(model, |one| one.is_off)
    }

    /// By the helper for hibernation.
    pub(crate) fn off<T>(&self, model: &str, act: impl FnOnce(&mut OneEngine) -> T) -> T {
        let url = self.state().urls[model].clone();
        self.with(&url, act)
    }

    pub(crate) fn count_hibernation(&self) {
        self.state().hibernations += 1;
    }

    pub(crate) fn wake(&self, url: &str) {
        self.with(url, |one| (one.is_awake, one.has_memory, one.is_well) = (true, true, true));
    }

    /// It sleeps without a command of the rotation.
    pub(crate) fn fall_asleep(&self, url: &str) {
        self.with(url, |one| (one.is_awake, one.has_memory, one.is_well) = (false, false, false));
    }

    pub(crate) fn set_fault(&self, url: &str, set_fault: Fault) {
        self.with(url, |one| one.set_fault = Some(set_fault));
    }

    /// Removes its fault. An unhealthy engine was restarted from outside, and sleeps.
    pub(crate) fn clear_faults(&self, url: &str) {
        self.with(url, |one| {
            one.set_fault = None;
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

    pub(crate) fn was_overcommitted(&self) -> bool {
        self.state().was_overcommitted
    }

    pub(crate) fn meter(self: &Arc<Self>) -> Arc<dyn Meter> {
        Arc::new(Gauge(Arc::clone(self)))
    }

    /// From now on engines lend, as long as there is a broker. The meter knows of it.
    pub(crate) fn lending_meter(self: &Arc<Self>) -> Arc<dyn Meter> {
        self.state().lends = true;
        let name = |_: Gpu| Some(MEMORY.to_owned());
        Arc::new(WithLent::new(self.meter(), LentAs::Used, Arc::<Self>::clone(self), Arc::new(name)))
    }

    /// The broker ends, and with it all that is lent. Engines release what they hold from now on.
    pub(crate) fn end_broker(&self) {
        let mut state = self.state();
        state.lends = false;
        state.engines.values_mut().for_each(|one| one.is_lent = false);
    }

    pub(crate) fn lent_totals(&self) -> LentTotals {
        self.state().totals
    }

    #[allow(clippy::type_complexity)]
    pub(crate) fn connect(
        self: &Arc<Self>,
    ) -> Box<dyn Fn(&Model) -> Result<Arc<dyn Engine>, EngineError> + Send + Sync> {
        let machine = Arc::clone(self);
        Box::new(move |model: &Model| {
            machine.with(&model.url, |_| ());
            machine.state().urls.insert(model.name.clone(), model.url.clone());
            Ok(Arc::new(Wire { machine: Arc::clone(&machine), url: model.url.clone() }) as Arc<dyn Engine>)
        })
    }
}

impl Lenders for Machine {
    fn lent(&self) -> Result<Lent, LendError> {
        let state = self.state();
        if !state.lends {
            return Err(LendError("no broker".to_owned()));
        }
        let lending = (0..).zip(state.engines.values()).filter(|(_, one)| one.is_lent);
        let lender = |pid| Lender { memory: MEMORY.to_owned(), pid, reclaimable_bytes: self.each };
        Ok(Lent { lenders: lending.map(|(pid, _)| lender(pid)).collect(), totals: state.totals })
    }

    fn free(&self, memory: &str, bytes: u64, spared: &[u32]) -> Result<u64, LendError> {
        if memory != MEMORY {
            return Err(LendError(format!("nothing is lent of {memory}")));
        }
        let mut state = self.state();
        let mut freed = 0;
        for (pid, one) in (0..).zip(state.engines.values_mut()) {
            if one.is_lent && !spared.contains(&pid) && freed < bytes {
                (one.is_lent, freed) = (false, freed + self.each);
            }
        }
        state.totals.taken_bytes += freed;
        Ok(freed)
    }
}

#[derive(Debug)]
struct Gauge(Arc<Machine>);

impl Meter for Gauge {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        Box::pin(async move {
            let used = self.0.used(&self.0.state());
            let Some(free_bytes) = self.0.total.checked_sub(used) else {
                let reason = format!("{used} bytes are in use of {}", self.0.total);
                return Err(MeterError { gpu: gpus[0], reason });
            };
            Ok(gpus.iter().map(|_| GpuMemory::new(free_bytes, self.0.total)).collect())
        })
    }
}

#[derive(Debug)]
struct Wire {
    machine: Arc<Machine>,
    url: String,
}

impl Wire {
    /// The answer to a sleep or a wake.
    async fn answered(&self) -> Result<(), EngineError> {
        if self.machine.asked(&self.url, |one| one.set_fault) == Some(Fault::AnswersNoMove) {
            for_ever().await;
        }
        Ok(())
    }

    fn refused(&self) -> EngineError {
        EngineError::Refused { request_line: self.url.clone(), status: 500, message: "no".to_owned() }
    }
}

async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(3)).await;
}

async fn for_ever() {
    std::future::pending::<()>().await;
}

impl Engine for Wire {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        Box::pin(async {
            match self.machine.with(&self.url, |one| one.set_fault) {
                Some(Fault::Silent) => for_ever().await,
                Some(Fault::Unwell) => return Err(self.refused()),
                _ => {}
            }
            let awake = self.is_awake().await?;
            Ok(if awake { EngineState::Awake } else { EngineState::Asleep })
        })
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            a_moment().await;
            match self.machine.asked(&self.url, |one| one.set_fault) {
                Some(Fault::HangsInSleep) => for_ever().await,
                Some(Fault::Refuses) => return Err(self.refused()),
                _ => {}
            }
            let lends = self.machine.state().lends;
            self.machine.asked(&self.url, |one| {
                (one.is_awake, one.is_well) = (false, false);
                one.is_lent |= lends && one.has_memory;
                one.has_memory &= one.set_fault == Some(Fault::KeepsMemory);
            });
            self.machine.state().totals.lent_bytes += u64::from(lends) * self.machine.each;
            self.answered().await
        })
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            a_moment().await;
            match self.machine.asked(&self.url, |one| one.set_fault) {
                Some(Fault::HangsInWake) => for_ever().await,
                Some(Fault::Refuses) => return Err(self.refused()),
                _ => {}
            }
            self.machine.asked(&self.url, |one| {
                (one.has_memory, one.is_lent) = (true, false);
                one.is_awake = one.set_fault != Some(Fault::WakesByHalf);
                one.is_well = one.set_fault != Some(Fault::Gibberish);
            });
            self.answered().await
        })
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(async {
            a_moment().await;
            Ok(self
                .machine
                .asked(&self.url, |one| one.is_awake != (one.set_fault == Some(Fault::SaysAsleep))))
        })
    }

    fn generate(&self, _known: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        Box::pin(async {
            a_moment().await;
            if self.machine.asked(&self.url, |one| one.set_fault) == Some(Fault::HangsInAnswer) {
                for_ever().await;
            }
            let well = self.machine.asked(&self.url, |one| one.is_well && one.has_memory);
            let text = if well { format!("I am {}", self.url) } else { "#".to_owned() };
            Ok(Answer { kind: CanaryKind::Completion, content: Content::Text(text) })
        })
    }
}
