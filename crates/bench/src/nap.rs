//! A checkpoint in an arena, put to sleep and woken again and again, and compared with its files each time.
//!
//! [`run`] loads the checkpoint and takes a key-value cache beside it, which is written before each sleep. After each
//! wake every byte and every address of the weights is held against the files and where it was, and the cache against
//! zeros; the first that differs ends the run.

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

use crate::blocks::{Blocks, Through};
use crate::cycle::{self, Content, How, Moment};
use crate::figures::timed;

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The arena's device, for the report.
    pub device: DeviceSpec,
    /// How many times to sleep and wake.
    pub cycles: u32,
    /// How to sleep: at level 2 the weights are read from the files again.
    pub level: Level,
    /// Whether the first sleep is prepared in the background.
    pub prepare: bool,
    /// Size of the key-value cache in bytes, if there is one.
    pub kv_cache: Option<NonZeroU64>,
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Reading the weights in.
    Load,
    /// Reading the weights in again.
    Reload,
    /// Comparing the weights with the files.
    Verify,
    /// Writing or looking at the key-value cache.
    KvCache,
    /// Backing up ahead of the first sleep.
    Prepare,
    /// Sleeping.
    Sleep,
    /// Waking.
    Wake,
}

/// What an observer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A stage begins that moves so many bytes, or cannot tell; the one before is over.
    Begin(Stage, Option<u64>),
    /// So many bytes more were moved in this stage.
    Moved(u64),
    /// How far the wake is.
    Woken(WakeProgress),
}

/// Told what is done, from several threads. A wake may tell it after its end.
pub type Observer = Arc<dyn Fn(Event) + Send + Sync>;

/// Why a run failed. Bytes that differ are no failure: the report says it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The weights could not be loaded, or compared.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A call of the pool failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The device would not say what it has free.
    #[error(transparent)]
    Device(#[from] DriverError),
}

/// What a run did. Sizes in bytes, times in seconds. One shape in Rust and JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The device.
    #[serde(serialize_with = "as_text")]
    pub device: DeviceSpec,
    /// How many files the checkpoint has.
    pub files: usize,
    /// How many tensors.
    pub tensors: usize,
    /// Size of the weights.
    pub bytes: u64,
    /// Size of the key-value cache.
    pub kv_cache_bytes: u64,
    /// Allocating and reading the weights.
    pub load_s: f64,
    /// What is held after that.
    pub loaded: Held,
    /// What was backed up before the first sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Prepared>,
    /// Each sleep and wake.
    pub cycles: Vec<Cycle>,
    /// Whether all that was planned was done, and everything was the same.
    pub verified: bool,
    /// What was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
}

/// A sleep that was prepared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prepared {
    /// What the preparation says of itself.
    #[serde(flatten)]
    pub report: PrepareReport,
    /// What is held after it.
    pub held: Held,
}

/// One sleep and one wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cycle {
    /// What the sleep says of itself.
    pub sleep: SleepReport,
    /// What is held after it.
    pub asleep: Held,
    /// What the wake says of itself.
    pub wake: WakeReport,
    /// What is held after it.
    pub awake: Held,
    /// Reading the files again, at level 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reload_s: Option<f64>,
    /// Whether everything was the same after it.
    pub verified: bool,
}

/// What the pool holds at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Of the device.
    pub device_bytes: u64,
    /// Of the host.
    pub host_bytes: u64,
}

/// Takes an arena that is used for nothing else through a plan, and closes it.
///
/// # Errors
/// See [`Error`].
pub fn run(
    arena: &Arena,
    checkpoint: &Checkpoint,
    plan: &Plan,
    observer: &Observer,
) -> Result<Report, Error> {
    let moved = |bytes| observer(Event::Moved(bytes));
    observer(Event::Begin(Stage::Load, Some(checkpoint.bytes())));
    let (load_s, model) = timed(|| Model::load(arena, checkpoint, &Tag::weights(), &moved))?;
    let kv_cache = plan.kv_cache.map(|bytes| {
        let mut blocks = Blocks::new(arena, Through::Heap);
        blocks.take(&[bytes.get()], &Tag::kv_cache()).map(|()| KvCache { blocks, bytes: bytes.get() })
    });
    let mut weights = Weights { arena, checkpoint, model, kv_cache: kv_cache.transpose()?, observer };
    // The load is over: what it has left idle is not needed again.
    arena.trim()?;
    let mut report = Report {
        device: plan.device.clone(),
        files: checkpoint.files().len(),
        tensors: checkpoint.tensors().len(),
        bytes: checkpoint.bytes(),
        kv_cache_bytes: plan.kv_cache.map_or(0, NonZeroU64::get),
        load_s,
        loaded: Held::of(&arena.stats()?),
        prepared: None,
        cycles: Vec::new(),
        verified: false,
        mismatch: weights.differs()?,
    };
    if plan.prepare {
        observer(Event::Begin(Stage::Prepare, None));
        let prepared = arena.prepare_sleep(&SleepRequest::all(plan.level))?.wait()?;
        report.prepared = Some(Prepared { report: prepared, held: Held::of(&arena.stats()?) });
    }
    let how = How { level: plan.level, verify: Some(Verify::All), rest: Duration::ZERO, is_compared: true };
    for _ in 0..plan.cycles {
        if report.mismatch.is_some() {
            return Ok(report);
        }
        weights.write_kv_cache()?;
        let done = cycle::run(arena, &mut weights, how)?;
        report.mismatch = done.mismatch.clone();
        report.cycles.push(Cycle::from(done));
    }
    report.verified = report.mismatch.is_none();
    arena.close()?;
    Ok(report)
}

/// The weights of a checkpoint, and the key-value cache beside them.
struct Weights<'a> {
    arena: &'a Arena,
    checkpoint: &'a Checkpoint,
    model: Model<'a>,
    kv_cache: Option<KvCache<'a>>,
    observer: &'a Observer,
}

/// One block: written before each sleep, zeros after each wake.
struct KvCache<'a> {
    blocks: Blocks<'a>,
    bytes: u64,
}

impl Weights<'_> {
    fn write_kv_cache(&mut self) -> Result<(), Error> {
        let Some(KvCache { blocks, bytes }) = &mut self.kv_cache else { return Ok(()) };
        (self.observer)(Event::Begin(Stage::KvCache, Some(*bytes)));
        blocks.fill(&|bytes| (self.observer)(Event::Moved(bytes)))?;
        blocks.rest();
        Ok(())
    }

    /// What of the weights differs from the files, if anything does. Not being able to tell is a failure.
    fn differs(&self) -> Result<Option<String>, Error> {
        (self.observer)(Event::Begin(Stage::Verify, Some(self.checkpoint.bytes())));
        match self.model.verify(&|bytes| (self.observer)(Event::Moved(bytes))) {
            Ok(()) => Ok(None),
            Err(error @ (ModelError::Mismatch { .. } | ModelError::Moved { .. })) => {
                Ok(Some(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Content for Weights<'_> {
    type Error = Error;

    fn sleeps(&self) {
        (self.observer)(Event::Begin(Stage::Sleep, None));
    }

    fn wakes(&self, request: WakeRequest) -> WakeRequest {
        (self.observer)(Event::Begin(Stage::Wake, Some(self.checkpoint.bytes())));
        let observer = Arc::clone(self.observer);
        request.telling(move |progress| observer(Event::Woken(progress)))
    }

    fn restore(&self) -> Result<(), Error> {
        (self.observer)(Event::Begin(Stage::Reload, Some(self.checkpoint.bytes())));
        self.model.read_in(&|bytes| (self.observer)(Event::Moved(bytes)))?;
        self.arena.mark_restored(&[Tag::weights()])?;
        Ok(())
    }

    fn mismatch(&mut self) -> Result<Option<String>, Error> {
        if let Some(mismatch) = self.differs()? {
            return Ok(Some(mismatch));
        }
        let Some(KvCache { blocks, bytes }) = &mut self.kv_cache else { return Ok(None) };
        (self.observer)(Event::Begin(Stage::KvCache, Some(*bytes)));
        let stale = blocks.first_nonzero(&|bytes| (self.observer)(Event::Moved(bytes)))?;
        blocks.rest();
        Ok(stale.map(|stale| format!("the key-value cache has a stale byte at {}", stale.at)))
    }
}

impl From<cycle::Cycle> for Cycle {
    fn from(done: cycle::Cycle) -> Self {
        let held = |moment: &Moment| Held::of(&moment.stats);
        Self {
            asleep: held(&done.asleep),
            awake: held(&done.awake),
            verified: done.mismatch.is_none(),
            reload_s: done.restore_s,
            sleep: done.sleep,
            wake: done.wake,
        }
    }
}

impl Held {
    fn of(stats: &PoolStats) -> Self {
        Self { device_bytes: stats.mapped_bytes, host_bytes: stats.backup_bytes }
    }
}

fn as_text<S: Serializer>(device: &DeviceSpec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(device)
}
