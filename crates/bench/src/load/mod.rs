//! Loading a checkpoint into host memory: time and peak memory, beside the storage's best rate.
//!
//! [`run`] alternates between loads and direct reads without keeping the bytes. Direct readers are as many as
//! the load's, twice or half of it. Odd rounds reverse the order. Before each pass the page cache drops the
//! files. Lower caches (disk, host of a virtual machine) are unknown; alternating evens them out. Each load
//! allocates again; the fastest of each kind counts. At the end the bytes are compared with the files.

mod peak;

use std::fs::File;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::ControlFlow;
use std::time::Instant;

use poorwill::Device;
use poorwill::checkpoint::{Checkpoint, Tensor};
use poorwill::offload::{HostCheckpoint, LoadError, LoadOptions, LoadReport, ReadMethod, read_directly};
use serde::Serialize;

use self::peak::Peak;
use crate::figures::{rate, ratio};

const GIB: f64 = 1_073_741_824.0;

/// Bytes per comparison.
const COMPARE_BYTES: usize = 4 << 20;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct LoadPlan {
    /// How to load.
    pub options: LoadOptions,
    /// Loads, and direct reads.
    pub rounds: NonZeroU32,
}

impl Default for LoadPlan {
    fn default() -> Self {
        Self { options: LoadOptions::default(), rounds: NonZeroU32::MIN.saturating_add(3) }
    }
}

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadStage {
    /// Direct reading.
    Direct,
    /// Loading.
    Load,
    /// Comparing the loaded bytes.
    Verify,
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadBenchReport {
    /// Size of all tensors.
    pub bytes: u64,
    /// The fastest load, with allocation.
    pub load_s: f64,
    /// Its rate.
    pub load_gib_per_s: f64,
    /// Fastest direct read; `None` where impossible.
    pub direct_gib_per_s: Option<f64>,
    /// Load rate over direct rate.
    pub ratio: Option<f64>,
    /// Peak memory of the first load, with the page cache if a control group counts it.
    pub peak_bytes: Option<u64>,
    /// Peak over size.
    pub peak_ratio: Option<f64>,
    /// How the peak was measured.
    pub peak_how: String,
    /// Peak of the process's own pages.
    pub peak_resident_bytes: Option<u64>,
    /// How most bytes were read.
    pub how_read: ReadMethod,
    /// Whether the loaded bytes are right.
    pub verified: bool,
    /// What differed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch: Option<String>,
    /// Device of the host memory.
    pub device: String,
    /// Its name.
    pub device_name: String,
    /// All passes, in order.
    pub passes: Vec<Pass>,
    /// Result of the fastest load.
    pub load: LoadReport,
}

/// One pass over the files.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Pass {
    /// Kind of pass.
    pub kind: PassKind,
    /// Concurrent readers.
    pub readers: usize,
    /// Duration.
    pub seconds: f64,
    /// Rate.
    pub gib_per_s: f64,
}

/// Kind of pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PassKind {
    /// A direct read.
    Direct,
    /// A load.
    Load,
}

/// Measures loading.
///
/// # Errors
/// Loading or reading failed; all memory is released.
pub fn run(
    device: &Device,
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    observer: &mut dyn FnMut(LoadStage),
) -> Result<LoadBenchReport, LoadError> {
    let mut run = LoadRun { device, checkpoint, plan, passes: Vec::new(), quickest: None, peak: None };
    let mut loaded = None;
    for round in 0..plan.rounds.get() {
        let mut kinds = [PassKind::Direct, PassKind::Load];
        if round % 2 == 1 {
            kinds.reverse();
        }
        for kind in kinds {
            // Nothing may be cached.
            drop(loaded.take());
            device.driver().host_trim().map_err(|source| LoadError::Memory {
                bytes: 0,
                buffers: 0,
                source,
            })?;
            if kind == PassKind::Load {
                observer(LoadStage::Load);
                loaded = Some(run.load()?);
            } else {
                observer(LoadStage::Direct);
                run.read(round)?;
            }
        }
    }
    observer(LoadStage::Verify);
    // An even number of rounds ends with a direct read.
    let loaded = match loaded {
        Some(loaded) => loaded,
        None => run.host_checkpoint()?,
    };
    let mismatch = first_difference(checkpoint, &loaded)?;
    Ok(run.report(&loaded, mismatch))
}

/// Passes so far.
struct LoadRun<'a> {
    device: &'a Device,
    checkpoint: &'a Checkpoint,
    plan: &'a LoadPlan,
    passes: Vec<Pass>,
    quickest: Option<LoadReport>,
    /// Of the first load.
    peak: Option<Peak>,
}

impl LoadRun<'_> {
    fn host_checkpoint(&self) -> Result<HostCheckpoint, LoadError> {
        let go_on = &mut |_| ControlFlow::Continue(());
        HostCheckpoint::load(self.device, self.checkpoint, &self.plan.options, go_on)
    }

    fn load(&mut self) -> Result<HostCheckpoint, LoadError> {
        let (host, peak) = peak::measure(|| self.host_checkpoint());
        let host = host?;
        self.peak.get_or_insert(peak);
        let report = host.report();
        self.passes.push(Pass::of(PassKind::Load, report.readers, report.bytes, report.seconds));
        if self.quickest.as_ref().is_none_or(|quickest| report.seconds < quickest.seconds) {
            self.quickest = Some(report.clone());
        }
        Ok(host)
    }

    fn read(&mut self, round: u32) -> Result<(), LoadError> {
        let chosen = self.plan.options.readers_for(self.checkpoint);
        let readers = match round % 4 {
            1 => chosen * 2,
            2 => chosen.div_ceil(2),
            _ => chosen,
        };
        self.passes.extend(direct(self.checkpoint, readers)?);
        Ok(())
    }

    fn best(&self, kind: PassKind) -> Option<f64> {
        let rates = self.passes.iter().filter(|pass| pass.kind == kind).map(|pass| pass.gib_per_s);
        rates.reduce(f64::max)
    }

    fn report(self, loaded: &HostCheckpoint, mismatch: Option<String>) -> LoadBenchReport {
        let load_gib_per_s = self.best(PassKind::Load).unwrap_or_default();
        let direct_gib_per_s = self.best(PassKind::Direct);
        let load = self.quickest.unwrap_or_else(|| loaded.report().clone());
        let (group_bytes, resident_bytes, how) =
            self.peak.map_or((None, None, "nothing was loaded".to_owned()), |peak| {
                (peak.group_bytes, peak.resident_bytes, peak.how)
            });
        // The group includes this process; others in it may have released memory meanwhile.
        let peak_bytes = group_bytes.max(resident_bytes);
        let peak_how = if group_bytes.is_some() { how } else { format!("{how}; pages of the process's own") };
        let info = self.device.driver();
        let info = info.info();
        LoadBenchReport {
            bytes: load.bytes,
            load_s: load.seconds,
            load_gib_per_s,
            direct_gib_per_s,
            ratio: direct_gib_per_s.map(|direct| load_gib_per_s / direct),
            peak_bytes,
            peak_ratio: peak_bytes.and_then(|bytes| ratio(bytes, load.bytes.max(1))),
            peak_how,
            peak_resident_bytes: resident_bytes,
            how_read: if load.buffered_bytes > load.bytes / 2 {
                ReadMethod::Buffered
            } else {
                ReadMethod::Direct
            },
            verified: mismatch.is_none(),
            mismatch,
            device: info.id.clone(),
            device_name: info.name.clone(),
            passes: self.passes,
            load,
        }
    }
}

impl Pass {
    fn of(kind: PassKind, readers: usize, bytes: u64, seconds: f64) -> Self {
        Self { kind, readers, seconds, gib_per_s: rate(bytes, seconds) / GIB }
    }
}

/// `None` if any file cannot be read directly.
fn direct(checkpoint: &Checkpoint, readers: usize) -> Result<Option<Pass>, LoadError> {
    let readers = NonZeroUsize::new(readers).unwrap_or(NonZeroUsize::MIN);
    let started = Instant::now();
    let read = read_directly(checkpoint, readers)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(read.map(|bytes| Pass::of(PassKind::Direct, readers.get(), bytes, seconds)))
}

fn first_difference(checkpoint: &Checkpoint, loaded: &HostCheckpoint) -> Result<Option<String>, LoadError> {
    let mut stored = vec![0; COMPARE_BYTES];
    let files: Vec<Option<File>> =
        checkpoint.files().iter().map(|file| File::open(&file.path).ok()).collect();
    for (tensor, host) in checkpoint.tensors().iter().zip(loaded.tensors()) {
        let bytes = loaded.bytes_of(host);
        if bytes.len() as u64 != tensor.bytes || host.name != tensor.name {
            return Ok(Some(format!(
                "{} has {} bytes of {}",
                quoted_name(tensor),
                bytes.len(),
                tensor.bytes
            )));
        }
        for (nth, part) in bytes.chunks(stored.len()).enumerate() {
            let offset = (nth * stored.len()) as u64;
            let stored = &mut stored[..part.len()];
            checkpoint.read_exact_at(tensor, offset, stored)?;
            if let Some(file) = &files[tensor.file] {
                // Without it the page cache holds these bytes a second time.
                let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
            }
            if part != stored {
                let at = part.iter().zip(stored.iter()).position(|(a, b)| a != b).unwrap_or_default();
                let at = offset + at as u64;
                return Ok(Some(format!("{} differs from its file at byte {at}", quoted_name(tensor))));
            }
        }
    }
    Ok(None)
}

/// Quoted, truncated, without terminal escapes.
fn quoted_name(tensor: &Tensor) -> String {
    format!("tensor {:?}", tensor.name.chars().take(96).collect::<String>())
}
