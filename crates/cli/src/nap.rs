//! `poorwill nap`: load, then cycles of sleep and wake, each verified against the files.

use std::time::Instant;

use poorwill::checkpoint::Checkpoint;
use poorwill::model::{Model, ModelError};
use poorwill::{
    AllocRequest, Arena, Block, ByteSize, DeviceSpec, Level, PrepareReport, SleepReport, SleepRequest, Tag,
    Verify, WakeReport, WakeRequest,
};
use serde::{Serialize, Serializer};

use crate::args::NapArgs;
use crate::failure::{Failure, Outcome};
use crate::progress::Progress;
use crate::show;

/// What a nap did. Sizes in bytes, times in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct NapReport {
    #[serde(serialize_with = "by_name")]
    pub(crate) device: DeviceSpec,
    pub(crate) files: usize,
    pub(crate) tensors: usize,
    pub(crate) bytes: u64,
    pub(crate) kv_cache_bytes: u64,
    pub(crate) load_s: f64,
    pub(crate) loaded: Holding,
    /// What was backed up before the first sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prepared: Option<Prepared>,
    pub(crate) cycles: Vec<Cycle>,
    pub(crate) verified: bool,
    /// What was wrong, when not everything was verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mismatch: Option<String>,
}

/// A sleep that was prepared.
#[derive(Debug, Serialize)]
pub(crate) struct Prepared {
    #[serde(flatten)]
    pub(crate) report: PrepareReport,
    pub(crate) held: Holding,
}

/// One sleep and one wake.
#[derive(Debug, Serialize)]
pub(crate) struct Cycle {
    pub(crate) sleep: SleepReport,
    pub(crate) asleep: Holding,
    pub(crate) wake: WakeReport,
    pub(crate) awake: Holding,
    /// Reading the files again, at level 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reload_s: Option<f64>,
    pub(crate) verified: bool,
}

/// What the pool holds at one moment, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Holding {
    pub(crate) device_bytes: u64,
    pub(crate) host_bytes: u64,
}

/// What to nap with.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) device: DeviceSpec,
    pub(crate) cycles: u32,
    pub(crate) level: Level,
    /// Whether the first sleep is prepared in the background.
    pub(crate) prepare: bool,
    pub(crate) kv_cache: ByteSize,
}

/// The command.
pub(crate) fn run(args: &NapArgs) -> Result<NapReport, Failure> {
    let checkpoint = Checkpoint::open(&args.checkpoints)?;
    let config = args.budget.open(&args.device).limited_to(args.limit.map(|limit| limit.0));
    nap(
        &Arena::open(config)?,
        &checkpoint,
        &Plan {
            device: args.device.clone(),
            cycles: args.cycles,
            level: if args.level == 2 { Level::Two } else { Level::One },
            prepare: args.prepare,
            kv_cache: args.kv_cache,
        },
    )
}

/// Naps in an arena of its own, and closes it.
pub(crate) fn nap(arena: &Arena, checkpoint: &Checkpoint, plan: &Plan) -> Result<NapReport, Failure> {
    let started = Instant::now();
    let progress = Progress::bytes("loading", checkpoint.bytes());
    let model = Model::load(arena, checkpoint, &Tag::weights(), &|bytes| progress.add(bytes))?;
    drop(progress);
    let load_s = started.elapsed().as_secs_f64();
    let kv_cache = KvCache::alloc(arena, plan.kv_cache.0)?;
    // The load is over: what it has left idle is not needed again.
    arena.trim()?;
    let mut report = NapReport {
        device: plan.device.clone(),
        files: checkpoint.files().len(),
        tensors: checkpoint.tensors().len(),
        bytes: checkpoint.bytes(),
        kv_cache_bytes: plan.kv_cache.0,
        load_s,
        loaded: Holding::of(arena)?,
        prepared: None,
        cycles: Vec::new(),
        verified: false,
        mismatch: None,
    };
    report.mismatch = verify(checkpoint, &model)?;
    if plan.prepare {
        report.prepared = Some(prepare(arena, plan.level)?);
    }
    for _ in 0..plan.cycles {
        if report.mismatch.is_some() {
            return Ok(report);
        }
        let (cycle, mismatch) = cycle(arena, checkpoint, &model, kv_cache.as_ref(), plan.level)?;
        report.cycles.push(cycle);
        report.mismatch = mismatch;
    }
    report.verified = report.mismatch.is_none();
    arena.close()?;
    Ok(report)
}

/// Backs up what the first sleep would, and waits: a nap has nothing else to do meanwhile.
fn prepare(arena: &Arena, level: Level) -> Result<Prepared, Failure> {
    let progress = Progress::waiting("preparing");
    let report = arena.prepare_sleep(&SleepRequest::all(level))?.wait()?;
    drop(progress);
    Ok(Prepared { report, held: Holding::of(arena)? })
}

fn cycle(
    arena: &Arena,
    checkpoint: &Checkpoint,
    model: &Model<'_>,
    kv_cache: Option<&KvCache>,
    level: Level,
) -> Result<(Cycle, Option<String>), Failure> {
    kv_cache.map_or(Ok(()), |kv_cache| kv_cache.write(arena))?;
    let progress = Progress::waiting("sleeping");
    let sleep = arena.sleep(&SleepRequest::all(level))?;
    drop(progress);
    let asleep = Holding::of(arena)?;
    let progress = Progress::bytes("waking", checkpoint.bytes());
    let request = WakeRequest::all().verifying(Verify::All).telling(progress.teller());
    let wake = arena.wake(&request)?;
    drop(progress);
    let reload_s =
        if wake.undefined_tags.is_empty() { None } else { Some(reload(arena, checkpoint, model)?) };
    let awake = Holding::of(arena)?;
    let mut mismatch = verify(checkpoint, model)?;
    if let Some(kv_cache) = kv_cache.filter(|_| mismatch.is_none()) {
        mismatch = kv_cache.find_stale(arena)?;
    }
    let verified = mismatch.is_none();
    Ok((Cycle { sleep, asleep, wake, awake, reload_s, verified }, mismatch))
}

fn reload(arena: &Arena, checkpoint: &Checkpoint, model: &Model<'_>) -> Result<f64, Failure> {
    let started = Instant::now();
    let progress = Progress::bytes("reloading", checkpoint.bytes());
    model.read_in(&|bytes| progress.add(bytes))?;
    arena.mark_restored(&[Tag::weights()])?;
    Ok(started.elapsed().as_secs_f64())
}

/// What differs from the files, if anything does. Not being able to tell is a failure.
fn verify(checkpoint: &Checkpoint, model: &Model<'_>) -> Result<Option<String>, Failure> {
    let progress = Progress::bytes("verifying", checkpoint.bytes());
    match model.verify(&|bytes| progress.add(bytes)) {
        Ok(()) => Ok(None),
        Err(error @ (ModelError::Mismatch { .. } | ModelError::Moved { .. })) => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// A key-value cache: written before each sleep, zeros after each wake.
struct KvCache {
    block: Block,
}

impl KvCache {
    const PIECE_BYTES: usize = 8 << 20;
    const STALE: u8 = 0xA5;

    fn alloc(arena: &Arena, bytes: u64) -> Result<Option<Self>, Failure> {
        if bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Self { block: arena.alloc(&AllocRequest::new(bytes, Tag::kv_cache()))? }))
    }

    fn write(&self, arena: &Arena) -> Result<(), Failure> {
        let stale = vec![Self::STALE; Self::PIECE_BYTES];
        let progress = Progress::bytes("kv cache", self.block.requested_bytes);
        for (offset, bytes) in self.pieces() {
            arena.write_all(self.block.id, offset, &stale[..bytes])?;
            progress.add(bytes as u64);
        }
        Ok(())
    }

    fn find_stale(&self, arena: &Arena) -> Result<Option<String>, Failure> {
        let progress = Progress::bytes("kv cache", self.block.requested_bytes);
        for (offset, bytes) in self.pieces() {
            progress.add(bytes as u64);
            let read = arena.read_vec(self.block.id, offset, bytes as u64)?;
            if let Some(at) = read.iter().position(|byte| *byte != 0) {
                return Ok(Some(format!("the key-value cache has a stale byte at {}", offset + at as u64)));
            }
        }
        Ok(None)
    }

    fn pieces(&self) -> impl Iterator<Item = (u64, usize)> {
        let bytes = self.block.requested_bytes;
        let piece = Self::PIECE_BYTES;
        (0..bytes)
            .step_by(piece)
            .map(move |at| (at, usize::try_from(bytes - at).map_or(piece, |rest| rest.min(piece))))
    }
}

impl Holding {
    fn of(arena: &Arena) -> Result<Self, Failure> {
        let stats = arena.stats()?;
        Ok(Self { device_bytes: stats.mapped_bytes, host_bytes: stats.backup_bytes })
    }
}

impl Outcome for NapReport {
    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::nap(self)
    }
}

fn by_name<S: Serializer>(device: &DeviceSpec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(device)
}
