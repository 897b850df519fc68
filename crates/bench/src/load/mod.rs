//! How fast a checkpoint gets into host memory, beside what its storage reads at best, and how much memory that takes.
//!
//! [`run`] takes turns: in each round the files are read directly into nothing, by as many readers as the load has or
//! by twice or half as many, and are loaded, the one first in every other round. Before each pass the page cache of
//! this machine lets go of the files; what caches lie behind that (a disk's, a host's of this machine) is not known,
//! and taking turns has both find the same. Loads make all of their memory each time. The quickest of each counts.
//! At the end all that was loaded is compared with the files.

mod peak;

use std::fs::File;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use std::time::Instant;

use poorwill::Device;
use poorwill::checkpoint::{Checkpoint, Tensor};
use poorwill::offload::{HostCheckpoint, How, LoadError, LoadOptions, LoadReport, read_directly};
use serde::Serialize;

use crate::figures::{rate, ratio};

const GIB: f64 = 1_073_741_824.0;

/// What is compared at a time.
const PIECE_BYTES: usize = 4 << 20;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// How to load.
    pub options: LoadOptions,
    /// How often to load, and to read directly.
    pub rounds: NonZeroU32,
}

impl Default for Plan {
    fn default() -> Self {
        Self { options: LoadOptions::default(), rounds: NonZeroU32::MIN.saturating_add(3) }
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// Reading the files into nothing.
    Direct,
    /// Loading.
    Load,
    /// Comparing what was loaded.
    Verify,
}

/// What a run found. Sizes in bytes, times in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Of all tensors.
    pub bytes: u64,
    /// The quickest load, with making its memory.
    pub load_s: f64,
    /// Its rate.
    pub load_gib_per_s: f64,
    /// The rate of the quickest direct reading; `None` where the files are not read directly.
    pub direct_gib_per_s: Option<f64>,
    /// The one by the other.
    pub ratio: Option<f64>,
    /// The most memory that the first load took, page cache included where a control group counts it.
    pub peak_bytes: Option<u64>,
    /// By `bytes`.
    pub peak_ratio: Option<f64>,
    /// How it was measured.
    pub peak_how: String,
    /// The same by the process's own pages, without the page cache.
    pub peak_resident_bytes: Option<u64>,
    /// How all files were read, or how most bytes were.
    pub how_read: How,
    /// Whether what was loaded last is what the files hold.
    pub verified: bool,
    /// What was wrong, if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// Whose host memory it is.
    pub device: String,
    /// What it is called.
    pub device_name: String,
    /// All passes, in their order.
    pub passes: Vec<Pass>,
    /// What the quickest load did.
    pub load: LoadReport,
}

/// One pass over the files.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Pass {
    /// What it did.
    pub kind: PassKind,
    /// By how many readers.
    pub readers: usize,
    /// How long it took.
    pub seconds: f64,
    /// Its rate.
    pub gib_per_s: f64,
}

/// What a pass did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PassKind {
    /// It read the files directly, into nothing.
    Direct,
    /// It loaded them.
    Load,
}

/// Measures loading. The observer is told what comes next.
///
/// # Errors
/// What loading or reading failed with. Nothing stays.
pub fn run(
    device: &Device,
    checkpoint: &Checkpoint,
    plan: &Plan,
    observer: &mut dyn FnMut(Stage),
) -> Result<Report, LoadError> {
    let mut passes: Vec<Pass> = Vec::new();
    let mut quickest: Option<LoadReport> = None;
    let mut taken = None;
    let mut loaded = None;
    let chosen = plan.options.readers_for(checkpoint);
    for round in 0..plan.rounds.get() {
        let mut kinds = [PassKind::Direct, PassKind::Load];
        if round % 2 == 1 {
            kinds.reverse();
        }
        for kind in kinds {
            // Before anything else, and with nothing kept: every load makes its memory.
            drop(loaded.take());
            device.driver().host_trim().map_err(|source| LoadError::Memory {
                bytes: 0,
                buffers: 0,
                source,
            })?;
            if kind == PassKind::Load {
                observer(Stage::Load);
                let go_on = &mut |_| ControlFlow::Continue(());
                let load = || HostCheckpoint::load(device, checkpoint, &plan.options, go_on);
                let (made, peak) = peak::during(load);
                let made = made?;
                taken.get_or_insert(peak);
                let report = made.report();
                passes.push(Pass::of(kind, report.readers, report.bytes, report.seconds));
                if quickest.as_ref().is_none_or(|quickest| report.seconds < quickest.seconds) {
                    quickest = Some(report.clone());
                }
                loaded = Some(made);
            } else {
                observer(Stage::Direct);
                let readers = match round % 4 {
                    1 => chosen * 2,
                    2 => chosen.div_ceil(2),
                    _ => chosen,
                };
                passes.extend(direct(checkpoint, readers)?);
            }
        }
    }
    observer(Stage::Verify);
    // The last pass of an even number of rounds is a direct one.
    let loaded = match loaded {
        Some(loaded) => loaded,
        None => HostCheckpoint::load(device, checkpoint, &plan.options, &mut |_| ControlFlow::Continue(()))?,
    };
    let mismatch = differs(checkpoint, &loaded)?;
    let load = quickest.unwrap_or_else(|| loaded.report().clone());
    let best = |kind| {
        let rates = passes.iter().filter(|pass| pass.kind == kind).map(|pass| pass.gib_per_s);
        rates.reduce(f64::max)
    };
    let load_gib_per_s = best(PassKind::Load).unwrap_or_default();
    let direct_gib_per_s = best(PassKind::Direct);
    let (group_bytes, resident_bytes, how) = taken
        .map_or((None, None, "nothing was loaded".to_owned()), |peak| {
            (peak.group_bytes, peak.resident_bytes, peak.how)
        });
    // The group's has the process's in it. Where it is less, others of the group gave back meanwhile.
    let peak_bytes = group_bytes.max(resident_bytes);
    let peak_how = if group_bytes.is_some() { how } else { format!("{how}; pages of the process's own") };
    let info = device.driver();
    let info = info.info();
    Ok(Report {
        bytes: load.bytes,
        load_s: load.seconds,
        load_gib_per_s,
        direct_gib_per_s,
        ratio: direct_gib_per_s.map(|direct| load_gib_per_s / direct),
        peak_bytes,
        peak_ratio: peak_bytes.and_then(|bytes| ratio(bytes, load.bytes.max(1))),
        peak_how,
        peak_resident_bytes: resident_bytes,
        how_read: if load.buffered_bytes > load.bytes / 2 { How::Buffered } else { How::Direct },
        verified: mismatch.is_none(),
        mismatch,
        device: info.id.clone(),
        device_name: info.name.clone(),
        passes,
        load,
    })
}

impl Pass {
    fn of(kind: PassKind, readers: usize, bytes: u64, seconds: f64) -> Self {
        Self { kind, readers, seconds, gib_per_s: rate(bytes, seconds) / GIB }
    }
}

/// Reads all files directly, into nothing; nothing where one of them is not read so.
fn direct(checkpoint: &Checkpoint, readers: usize) -> Result<Option<Pass>, LoadError> {
    let readers = NonZeroUsize::new(readers).unwrap_or(NonZeroUsize::MIN);
    let started = Instant::now();
    let read = read_directly(checkpoint, readers)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(read.map(|bytes| Pass::of(PassKind::Direct, readers.get(), bytes, seconds)))
}

/// What of the loaded is not as in the files, if anything is.
fn differs(checkpoint: &Checkpoint, loaded: &HostCheckpoint) -> Result<Option<String>, LoadError> {
    let mut stored = vec![0; PIECE_BYTES];
    let files: Vec<Option<File>> =
        checkpoint.files().iter().map(|file| File::open(&file.path).ok()).collect();
    for (tensor, host) in checkpoint.tensors().iter().zip(loaded.tensors()) {
        let bytes = loaded.bytes_of(host);
        if bytes.len() as u64 != tensor.bytes || host.name != tensor.name {
            return Ok(Some(format!("{} has {} bytes of {}", named(tensor), bytes.len(), tensor.bytes)));
        }
        for (nth, piece) in bytes.chunks(stored.len()).enumerate() {
            let offset = (nth * stored.len()) as u64;
            let stored = &mut stored[..piece.len()];
            checkpoint.read_exact_at(tensor, offset, stored)?;
            if let Some(file) = &files[tensor.file] {
                // Advice: where it is not taken, the page cache holds these bytes a second time.
                let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
            }
            if piece != stored {
                let at = piece.iter().zip(stored.iter()).position(|(a, b)| a != b).unwrap_or_default();
                let at = offset + at as u64;
                return Ok(Some(format!("{} differs from its file at byte {at}", named(tensor))));
            }
        }
    }
    Ok(None)
}

/// The beginning of its name, in quotes and without what a terminal acts on.
fn named(tensor: &Tensor) -> String {
    format!("tensor {:?}", tensor.name.chars().take(96).collect::<String>())
}
