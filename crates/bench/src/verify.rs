//! A checkpoint in an arena through cycles of sleep and wake.
//!
//! [`run`] loads it and writes a key-value cache before each sleep. After each wake it compares weights and
//! addresses with the files, and the cache with zeros, up to the first difference.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use poorwill::checkpoint::Checkpoint;
use poorwill::model::{Model, ModelError};
use poorwill::{
    Arena, DeviceSpec, DriverError, Level, PoolError, PoolStats, PrepareReport, SleepReport, SleepRequest,
    Tag, Verify, WakeProgress, WakeReport, WakeRequest,
};
use serde::{Serialize, Serializer};

use crate::blocks::{Blocks, CopyBuffer};
use crate::cycle::{self, Content, CycleOptions, MemoryState};
use crate::figures::timed;

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyPlan {
    /// Device of the arena.
    pub device: DeviceSpec,
    /// How many times to sleep and wake.
    pub cycles: u32,
    /// Level 2 reads the files again.
    pub level: Level,
    /// Whether to prepare the first sleep in the background.
    pub prepare: bool,
    /// Size of the key-value cache in bytes.
    pub kv_cache: Option<NonZeroU64>,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VerifyStage {
    /// Reading the weights.
    Load,
    /// Reading the weights again.
    Reload,
    /// Comparing with the files.
    Compare,
    /// Writing or checking the key-value cache.
    KvCache,
    /// Backing up before the first sleep.
    Prepare,
    /// Sleeping.
    Sleep,
    /// Leaving the device as a whole, and coming back.
    Hibernate,
    /// Waking.
    Wake,
}

/// What an observer receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VerifyEvent {
    /// A stage begins, with its bytes if known.
    Begin(VerifyStage, Option<u64>),
    /// More bytes were moved.
    Moved(u64),
    /// Progress of the wake.
    Woken(WakeProgress),
}

/// Called from several threads; wake progress may arrive late.
pub type VerifyObserver = Arc<dyn Fn(VerifyEvent) + Send + Sync>;

/// Takes this process off its device and puts it back, by another process. An error is a sentence.
pub type WhileAsleep<'a> = dyn Fn() -> Result<Hibernation, String> + 'a;

/// What another process did with this one while it slept. Figures are the driver's, `None` where it has none.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hibernation {
    /// On the devices before.
    pub held_bytes: Option<u64>,
    /// On the devices meanwhile.
    pub left_bytes: Option<u64>,
    /// Host memory that the checkpoint was to take.
    pub host_bytes: Option<u64>,
    /// Until it held nothing.
    pub hibernate_s: f64,
    /// Until it ran again.
    pub resume_s: f64,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Loading or comparing failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A call of the pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Free memory could not be read.
    #[error(transparent)]
    Device(#[from] DriverError),
    /// The process was not taken off its device, or not put back.
    #[error("{0}")]
    Hibernation(String),
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerifyReport {
    /// The device.
    #[serde(serialize_with = "as_text")]
    pub device: DeviceSpec,
    /// Files of the checkpoint.
    pub files: usize,
    /// Tensors of the checkpoint.
    pub tensors: usize,
    /// Size of the weights.
    pub bytes: u64,
    /// Size of the key-value cache.
    pub kv_cache_bytes: u64,
    /// Allocating and reading the weights.
    pub load_s: f64,
    /// Memory after loading.
    pub loaded: PoolMemory,
    /// Backup before the first sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Prepared>,
    /// Each sleep and wake.
    pub cycles: Vec<VerifyCycle>,
    /// Whether the whole plan ran without a difference.
    pub verified: bool,
    /// What differed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
}

/// A prepared sleep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prepared {
    /// Result of the preparation.
    #[serde(flatten)]
    pub report: PrepareReport,
    /// Memory after it.
    pub held: PoolMemory,
}

/// One sleep and one wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VerifyCycle {
    /// Result of the sleep.
    pub sleep: SleepReport,
    /// Memory after the sleep.
    pub asleep: PoolMemory,
    /// What happened to the process meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernation: Option<Hibernation>,
    /// Result of the wake.
    pub wake: WakeReport,
    /// Memory after the wake.
    pub awake: PoolMemory,
    /// Reading the files again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reload_s: Option<f64>,
    /// Whether nothing differed.
    pub verified: bool,
}

/// Memory of the pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PoolMemory {
    /// Mapped on the device.
    pub device_bytes: u64,
    /// Backups on the host.
    pub host_bytes: u64,
}

/// Runs a plan in an otherwise unused arena, and closes it.
///
/// # Errors
/// See [`VerifyError`].
pub fn run(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &VerifyPlan,
    observer: &VerifyObserver,
) -> Result<VerifyReport, VerifyError> {
    run_with(arena, checkpoint, plan, observer, None)
}

/// As [`run`], and calls `while_asleep` between each sleep and its wake.
///
/// # Errors
/// See [`VerifyError`].
pub fn run_with(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &VerifyPlan,
    observer: &VerifyObserver,
    while_asleep: Option<&WhileAsleep<'_>>,
) -> Result<VerifyReport, VerifyError> {
    let moved = |bytes| observer(VerifyEvent::Moved(bytes));
    observer(VerifyEvent::Begin(VerifyStage::Load, Some(checkpoint.bytes())));
    let (load_s, model) = timed(|| Model::load(arena, checkpoint, &Tag::weights(), &moved))?;
    let kv_cache = plan.kv_cache.map(|bytes| {
        let mut blocks = Blocks::new(arena, CopyBuffer::Heap);
        blocks.alloc(&[bytes.get()], &Tag::kv_cache()).map(|()| KvCache { blocks, bytes: bytes.get() })
    });
    let mut weights = Weights {
        arena,
        checkpoint,
        model,
        kv_cache: kv_cache.transpose()?,
        observer,
        while_asleep,
        hibernation: None,
    };
    // The load's free memory is not needed again.
    arena.trim()?;
    let mut report = VerifyReport {
        device: plan.device.clone(),
        files: checkpoint.files().len(),
        tensors: checkpoint.tensors().len(),
        bytes: checkpoint.bytes(),
        kv_cache_bytes: plan.kv_cache.map_or(0, NonZeroU64::get),
        load_s,
        loaded: PoolMemory::of(&arena.stats()?),
        prepared: None,
        cycles: Vec::new(),
        verified: false,
        mismatch: weights.first_difference()?,
    };
    if plan.prepare {
        observer(VerifyEvent::Begin(VerifyStage::Prepare, None));
        let prepared = arena.prepare_sleep(&SleepRequest::all(plan.level))?.wait()?;
        report.prepared = Some(Prepared { report: prepared, held: PoolMemory::of(&arena.stats()?) });
    }
    let options =
        CycleOptions { level: plan.level, verify: Some(Verify::All), pause: Duration::ZERO, compare: true };
    for _ in 0..plan.cycles {
        if report.mismatch.is_some() {
            return Ok(report);
        }
        weights.write_kv_cache()?;
        let done = cycle::run(arena, &mut weights, options)?;
        report.mismatch = done.mismatch.clone();
        report
            .cycles
            .push(VerifyCycle { hibernation: weights.hibernation.take(), ..VerifyCycle::from(done) });
    }
    report.verified = report.mismatch.is_none();
    arena.close()?;
    Ok(report)
}

struct Weights<'a> {
    arena: &'a Arena,
    checkpoint: &'a Checkpoint,
    model: Model<'a>,
    kv_cache: Option<KvCache<'a>>,
    observer: &'a VerifyObserver,
    while_asleep: Option<&'a WhileAsleep<'a>>,
    /// Of the last sleep.
    hibernation: Option<Hibernation>,
}

/// One block: written before each sleep, zeros after each wake.
struct KvCache<'a> {
    blocks: Blocks<'a>,
    bytes: u64,
}

impl Weights<'_> {
    fn write_kv_cache(&mut self) -> Result<(), VerifyError> {
        let Some(KvCache { blocks, bytes }) = &mut self.kv_cache else { return Ok(()) };
        (self.observer)(VerifyEvent::Begin(VerifyStage::KvCache, Some(*bytes)));
        blocks.fill(&|bytes| (self.observer)(VerifyEvent::Moved(bytes)))?;
        blocks.release_buffer();
        Ok(())
    }

    fn first_difference(&self) -> Result<Option<String>, VerifyError> {
        (self.observer)(VerifyEvent::Begin(VerifyStage::Compare, Some(self.checkpoint.bytes())));
        match self.model.verify(&|bytes| (self.observer)(VerifyEvent::Moved(bytes))) {
            Ok(()) => Ok(None),
            Err(error @ (ModelError::Mismatch { .. } | ModelError::Moved { .. })) => {
                Ok(Some(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Content for Weights<'_> {
    type Error = VerifyError;

    fn before_sleep(&self) {
        (self.observer)(VerifyEvent::Begin(VerifyStage::Sleep, None));
    }

    fn while_asleep(&mut self) -> Result<(), VerifyError> {
        let Some(hibernate) = self.while_asleep else { return Ok(()) };
        (self.observer)(VerifyEvent::Begin(VerifyStage::Hibernate, None));
        self.hibernation = Some(hibernate().map_err(VerifyError::Hibernation)?);
        Ok(())
    }

    fn before_wake(&self, request: WakeRequest) -> WakeRequest {
        (self.observer)(VerifyEvent::Begin(VerifyStage::Wake, Some(self.checkpoint.bytes())));
        let observer = Arc::clone(self.observer);
        request.telling(move |progress| observer(VerifyEvent::Woken(progress)))
    }

    fn restore(&self) -> Result<(), VerifyError> {
        (self.observer)(VerifyEvent::Begin(VerifyStage::Reload, Some(self.checkpoint.bytes())));
        self.model.read_in(&|bytes| (self.observer)(VerifyEvent::Moved(bytes)))?;
        self.arena.mark_restored(&[Tag::weights()])?;
        Ok(())
    }

    fn mismatch(&mut self) -> Result<Option<String>, VerifyError> {
        if let Some(mismatch) = self.first_difference()? {
            return Ok(Some(mismatch));
        }
        let Some(KvCache { blocks, bytes }) = &mut self.kv_cache else { return Ok(None) };
        (self.observer)(VerifyEvent::Begin(VerifyStage::KvCache, Some(*bytes)));
        let stale = blocks.first_nonzero(&|bytes| (self.observer)(VerifyEvent::Moved(bytes)))?;
        blocks.release_buffer();
        Ok(stale.map(|stale| format!("the key-value cache has a stale byte at {}", stale.offset)))
    }
}

impl From<cycle::CycleOutcome> for VerifyCycle {
    fn from(done: cycle::CycleOutcome) -> Self {
        let memory = |moment: &MemoryState| PoolMemory::of(&moment.stats);
        Self {
            asleep: memory(&done.asleep),
            hibernation: None,
            awake: memory(&done.awake),
            verified: done.mismatch.is_none(),
            reload_s: done.restore_s,
            sleep: done.sleep,
            wake: done.wake,
        }
    }
}

impl PoolMemory {
    fn of(stats: &PoolStats) -> Self {
        Self { device_bytes: stats.mapped_bytes, host_bytes: stats.backup_bytes }
    }
}

fn as_text<S: Serializer>(device: &DeviceSpec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(device)
}
