//! Taking processes off their GPUs, so that an engine that sleeps leaves nothing there, and putting them back.
//!
//! A [`Hibernator`] works on other processes, never on its own. It takes a *set*: all go, or none. A journal on disk
//! remembers each set while its processes are not as they were. So [`Hibernator::recover`] brings back what a killed
//! helper has left. Calls on the same process wait for each other, also across helpers with one journal.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use poorwill::hibernation::{HibernateRequest, Hibernator, HibernatorOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let hibernator = Hibernator::open(&HibernatorOptions::default())?;
//! for process in hibernator.recover()? {
//!     println!("{process}");
//! }
//! let engine = [4711]; // Its processes that use a GPU. They sleep already.
//! let held = hibernator.inspect(engine[0])?;
//! println!("it takes {:?} bytes of host memory", held.host_bytes());
//!
//! let report = hibernator.hibernate(&engine, &HibernateRequest::within(Duration::from_secs(5)))?;
//! println!("{:?} bytes are free", report.processes[0].released_bytes);
//! hibernator.resume(&engine)?;
//! # Ok(())
//! # }
//! ```

mod error;
mod host_memory;
mod identity;
mod journal;
mod locks;
mod processes;
mod report;

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::hibernation::plan::{JournalEntry, ProcessKey, SetPlan, SetProcess};
use poorwill_driver::cuda::CudaCheckpointer;
use poorwill_driver::host::HostCheckpointer;
use poorwill_driver::nvml::Nvml;

use self::host_memory::HostMemoryPlan;
use self::identity::key_of;
use self::journal::JournalFolder;
use self::locks::Locks;

pub use self::error::{HibernateError, HostMemorySource};
pub use self::processes::Processes;
pub use self::report::{HibernateReport, HibernatedProcess, ResumeReport, ResumedProcess};
pub use poorwill_core::hibernation::plan::{self, LeftProcess, Recovered, Recovery, SetError, SetErrorCause};
pub use poorwill_core::hibernation::{
    CheckpointError, CheckpointErrorKind, CheckpointStep, Checkpointer, HeldMemory, Obstacle,
    ProcessInspection, ProcessState,
};

type Result<T> = std::result::Result<T, HibernateError>;

/// How a [`Hibernator`] is opened.
///
/// ```
/// use poorwill::hibernation::{HibernatorOptions, Processes};
///
/// let options = HibernatorOptions::of(Processes::Host("/run/engines".into())).remembering_in("/run/journal");
/// assert!(options.journal.is_some());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HibernatorOptions {
    /// Whose devices.
    pub processes: Processes,
    /// Folder of the journal. `None`: `poorwill/hibernate` in `$XDG_RUNTIME_DIR`, or `/tmp/poorwill-UID/hibernate`.
    pub journal: Option<PathBuf>,
    /// NVIDIA's library, for tests. `None`: the system's `libcuda.so.1`.
    pub library: Option<PathBuf>,
}

impl HibernatorOptions {
    /// Options for these processes.
    #[must_use]
    pub fn of(processes: Processes) -> Self {
        Self { processes, ..Self::default() }
    }

    /// Sets [`Self::journal`].
    #[must_use]
    pub fn remembering_in(mut self, journal: impl Into<PathBuf>) -> Self {
        self.journal = Some(journal.into());
        self
    }

    /// Sets [`Self::library`].
    #[must_use]
    pub fn through(mut self, library: impl Into<Option<PathBuf>>) -> Self {
        self.library = library.into();
        self
    }
}

/// Limits of a set that hibernates.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::hibernation::HibernateRequest;
///
/// let request = HibernateRequest::within(Duration::from_secs(1)).limited_to(8 << 30);
/// assert_eq!(request.host_bytes_max, Some(8 << 30));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HibernateRequest {
    /// How long to wait for queued work.
    pub wait_max: Duration,
    /// Most host memory to take for the set. What the system has left limits it in any case.
    pub host_bytes_max: Option<u64>,
    /// Whether the set is refused where nothing will say that its devices have space for it again.
    pub checks_space: bool,
    /// How many communicators of each process are suspended, by the caller's word; others are refused.
    pub suspended_communicators: usize,
}

impl HibernateRequest {
    /// Waits for at most this long, and takes the host memory that is there.
    #[must_use]
    pub fn within(wait_max: Duration) -> Self {
        Self { wait_max, host_bytes_max: None, checks_space: true, suspended_communicators: 0 }
    }

    /// Sets [`Self::host_bytes_max`].
    #[must_use]
    pub fn limited_to(mut self, host_bytes_max: impl Into<Option<u64>>) -> Self {
        self.host_bytes_max = host_bytes_max.into();
        self
    }

    /// Unsets [`Self::checks_space`]: the caller sees to it that there is space.
    #[must_use]
    pub fn without_space_check(mut self) -> Self {
        self.checks_space = false;
        self
    }

    /// Sets [`Self::suspended_communicators`]. A process is lost in its restore if one of them is not suspended, or if
    /// NCCL's ranks share host memory by CUDA (unless `NCCL_CUMEM_HOST_ENABLE=0`).
    #[must_use]
    pub fn with_suspended_communicators(mut self, count: usize) -> Self {
        self.suspended_communicators = count;
        self
    }
}

impl Default for HibernateRequest {
    fn default() -> Self {
        Self::within(Duration::from_secs(5))
    }
}

/// Takes sets of processes off their devices and puts them back. Any thread may make any call.
///
/// ```
/// use poorwill::hibernation::{Hibernator, HibernatorOptions, Processes};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (engines, journal) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// # let (engines, journal) = (engines.path(), journal.path());
/// let options = HibernatorOptions::of(Processes::Host(engines.into())).remembering_in(journal);
/// let hibernator = Hibernator::open(&options)?;
/// assert!(hibernator.recover()?.is_empty());
/// let error = hibernator.inspect(std::process::id()).unwrap_err();
/// assert_eq!(error.code(), "own_process");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Hibernator {
    checkpointer: Box<dyn Checkpointer>,
    journal: JournalFolder,
    host_memory: HostMemoryPlan,
    driver_version: Option<String>,
}

/// Sets that callers have left which have ended, for [`Hibernator::recover_sets`].
///
/// ```
/// use poorwill::hibernation::{Hibernator, HibernatorOptions, Processes};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (engines, journal) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// # let options = HibernatorOptions::of(Processes::Host(engines.path().into())).remembering_in(journal.path());
/// let hibernator = Hibernator::open(&options)?;
/// let left = hibernator.left_sets()?;
/// // Requests on other processes can be answered from here on.
/// let recovered = std::thread::scope(|scope| scope.spawn(|| hibernator.recover_sets(left)).join());
/// # assert!(recovered.is_ok_and(|recovered| recovered.is_ok_and(|recovered| recovered.is_empty())));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
#[must_use = "its processes wait until it is recovered or dropped"]
pub struct LeftSets {
    sets: Vec<(Locks, ProcessKey)>,
}

impl LeftSets {
    /// Whether nothing was left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }
}

impl Hibernator {
    /// Opens the journal's folder and, for CUDA, NVIDIA's library.
    ///
    /// # Errors
    /// The folder cannot be used, or the driver cannot take processes off.
    pub fn open(options: &HibernatorOptions) -> Result<Self> {
        let checkpointer: Box<dyn Checkpointer> = match &options.processes {
            Processes::Cuda => {
                let opened = CudaCheckpointer::open(options.library.as_deref());
                Box::new(opened.map_err(HibernateError::Unusable)?)
            }
            Processes::Host(folder) => Box::new(HostCheckpointer::open(folder)),
        };
        let mut hibernator = Self::over(checkpointer, options)?;
        if matches!(options.processes, Processes::Cuda) {
            hibernator.driver_version = Nvml::load().ok().and_then(|nvml| nvml.driver_version());
        }
        Ok(hibernator)
    }

    fn over(checkpointer: Box<dyn Checkpointer>, options: &HibernatorOptions) -> Result<Self> {
        let journal = JournalFolder::open(options.journal.as_deref(), &options.processes)?;
        Ok(Self { checkpointer, journal, host_memory: HostMemoryPlan::default(), driver_version: None })
    }

    /// The version of NVIDIA's driver, such as `580.159.04`, where NVML knows it. On some versions the end of a process that
    /// came back hangs the machine.
    #[must_use]
    pub fn driver_version(&self) -> Option<String> {
        self.driver_version.clone()
    }

    /// What a process holds, and what hinders it. Changes nothing.
    ///
    /// # Errors
    /// There is no such process, or the caller may not ask.
    pub fn inspect(&self, pid: u32) -> Result<ProcessInspection> {
        Ok(self.checkpointer.inspect(pid)?)
    }

    /// Where a process stands.
    ///
    /// # Errors
    /// As for [`Hibernator::inspect`].
    pub fn state(&self, pid: u32) -> Result<ProcessState> {
        Ok(self.checkpointer.state(pid)?)
    }

    /// Takes all of these processes off their devices.
    ///
    /// # Errors
    /// The first reason. All processes run on, unless [`HibernateError::left`] names them.
    pub fn hibernate(&self, pids: &[u32], request: &HibernateRequest) -> Result<HibernateReport> {
        let started = Instant::now();
        let _locks = Locks::take(self.journal.folder()?, pids)?;
        let plan = if request.checks_space { self.plan() } else { self.plan().without_space_check() };
        let plan = plan.with_suspended_communicators(request.suspended_communicators);
        let inspections = plan.inspect(pids)?;
        let keys = keys(CheckpointStep::Lock, pids)?;
        let needs: Vec<_> =
            pids.iter().copied().zip(inspections.iter().map(ProcessInspection::host_bytes)).collect();
        let held = inspections.into_iter().map(|found| found.held);
        let processes: Vec<_> =
            keys.into_iter().zip(held).map(|(key, held)| SetProcess { key, held }).collect();
        let promised = self.host_memory.promise(&needs, request.host_bytes_max)?;
        let steps = plan.hibernate(&processes, request.wait_max)?;
        let taken = steps.iter().zip(&needs).map(|(step, (_, held_bytes))| HibernatedProcess {
            pid: step.pid,
            released_bytes: self.released_bytes(step.pid, *held_bytes),
            lock_ms: step.lock_ms,
            checkpoint_ms: step.checkpoint_ms,
        });
        Ok(HibernateReport {
            processes: taken.collect(),
            host_bytes: promised.total_bytes(),
            total_ms: ms(started),
        })
    }

    /// Puts all of these processes back on their devices. They are all that hibernate together.
    ///
    /// # Errors
    /// The first reason. [`HibernateError::left`] names what still hibernates after a restore that failed.
    pub fn resume(&self, pids: &[u32]) -> Result<ResumeReport> {
        self.resume_by(self.plan(), pids)
    }

    /// As [`Hibernator::resume`], also where nothing says what they held: another program took them off, or another journal
    /// remembers it. The caller sees to it that their devices have space, and that nothing else resumes there meanwhile. A
    /// restore on a full device loses its process.
    ///
    /// # Errors
    /// As for [`Hibernator::resume`].
    pub fn resume_without_space_check(&self, pids: &[u32]) -> Result<ResumeReport> {
        self.resume_by(self.plan().without_space_check(), pids)
    }

    fn resume_by(&self, plan: SetPlan<'_>, pids: &[u32]) -> Result<ResumeReport> {
        let started = Instant::now();
        let _locks = Locks::take(self.journal.folder()?, pids)?;
        let keys = keys(CheckpointStep::Restore, pids)?;
        let entries = self.journal.entries()?;
        self.check_whole(&entries, &keys)?;
        let steps = plan.resume(&keys, &entries)?;
        let back = steps.iter().map(|step| ResumedProcess {
            pid: step.pid,
            restore_ms: step.restore_ms,
            unlock_ms: step.unlock_ms,
        });
        Ok(ResumeReport { processes: back.collect(), total_ms: ms(started) })
    }

    /// Brings to rest what helpers have left that have ended: unlocks, brings parts of sets back, and leaves whole sets
    /// as they are. Sets that another call works on are left out, and so are processes that run as before.
    ///
    /// # Errors
    /// The journal cannot be read or written.
    pub fn recover(&self) -> Result<Vec<Recovered>> {
        self.recover_sets(self.left_sets()?)
    }

    /// The sets of [`Self::recover`]. Other calls on their processes wait until they are recovered or dropped.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn left_sets(&self) -> Result<LeftSets> {
        let mut sets = Vec::new();
        for entry in self.journal.entries()? {
            if let Some(locks) = Locks::try_take(self.journal.folder()?, &pids_of(&entry))? {
                sets.push((locks, entry.id()));
            }
        }
        Ok(LeftSets { sets })
    }

    /// Recovers these sets at the same time. The processes of each are free once it is at rest.
    ///
    /// # Errors
    /// As for [`Self::recover`].
    pub fn recover_sets(&self, left: LeftSets) -> Result<Vec<Recovered>> {
        let others = left.sets.len().saturating_sub(1);
        let sets = Mutex::new(left.sets);
        let next = || {
            let next = sets.lock().unwrap_or_else(PoisonError::into_inner).pop();
            next.map(|(locks, id)| self.recover_set(locks, id))
        };
        let recovered: Result<Vec<_>> = thread::scope(|scope| {
            let start = |_| thread::Builder::new().spawn_scoped(scope, next).ok();
            let begun: Vec<_> = (0..others).filter_map(start).collect();
            // Those for which there was no thread, too.
            let own: Vec<_> = std::iter::from_fn(next).collect();
            let begun = begun.into_iter().filter_map(|set| set.join().unwrap_or_else(|it| resume_unwind(it)));
            begun.chain(own).collect()
        });
        Ok(recovered?.concat())
    }

    fn recover_set(&self, _locks: Locks, id: ProcessKey) -> Result<Vec<Recovered>> {
        // It may have changed until its processes were free.
        let Some(entry) = self.journal.entry(id)? else { return Ok(Vec::new()) };
        Ok(self.plan().recover(&entry, is_same).map_err(SetError::from)?)
    }

    /// Waits until no call works on these processes.
    ///
    /// # Errors
    /// The journal's folder cannot be used.
    pub fn await_calls(&self, pids: &[u32]) -> Result<()> {
        Locks::take(self.journal.folder()?, pids).map(drop)
    }

    /// Entries of the journal that were not understood, and were set aside: their files. What they name may still
    /// hibernate, or be locked.
    #[must_use]
    pub fn unreadable_entries(&self) -> Vec<PathBuf> {
        self.journal.set_aside()
    }

    fn plan(&self) -> SetPlan<'_> {
        SetPlan::new(&*self.checkpointer, &self.journal)
    }

    /// By how much what it holds on its devices has fallen.
    fn released_bytes(&self, pid: u32, held_bytes: Option<u64>) -> Option<u64> {
        let left_bytes = self.checkpointer.inspect(pid).ok()?.host_bytes()?;
        Some(held_bytes?.saturating_sub(left_bytes))
    }

    /// A set resumes as a whole: those of it that still hibernate are named, too.
    fn check_whole(&self, entries: &[JournalEntry], named: &[ProcessKey]) -> Result<()> {
        let is_off = |key: ProcessKey| {
            is_same(key) && self.checkpointer.state(key.pid) == Ok(ProcessState::Checkpointed)
        };
        for entry in entries {
            let (inside, outside): (Vec<_>, Vec<_>) =
                entry.processes.iter().map(|process| process.key).partition(|key| named.contains(key));
            let Some(first) = inside.first() else { continue };
            let missing: Vec<u32> =
                outside.into_iter().filter(|key| is_off(*key)).map(|key| key.pid).collect();
            if !missing.is_empty() {
                return Err(HibernateError::Parted { pid: first.pid, missing });
            }
        }
        Ok(())
    }
}

fn is_same(process: ProcessKey) -> bool {
    key_of(process.pid) == Some(process)
}

fn keys(step: CheckpointStep, pids: &[u32]) -> Result<Vec<ProcessKey>> {
    let missing = |pid| CheckpointError::new(step, pid, CheckpointErrorKind::NoSuchProcess);
    let keys: std::result::Result<_, _> =
        pids.iter().map(|&pid| key_of(pid).ok_or_else(|| missing(pid))).collect();
    Ok(keys?)
}

fn pids_of(entry: &JournalEntry) -> Vec<u32> {
    entry.processes.iter().map(|process| process.key.pid).collect()
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
