//! Errors of pool calls.
//!
//! Messages name the operation, the sizes and the next step. The driver's error is their source; see
//! [`chain`](crate::chain()). Unless a variant says otherwise, the failed call has changed nothing.

use std::fmt;
use std::time::Duration;

use super::handle::BlockId;
use super::loss_ranges::{LostRange, listed};
use super::report::{Level, SleepReport};
use crate::bytes::ByteSize;
use crate::decision::{DecisionError, Verdict};
use crate::digest::Digest;
use crate::driver::{DeviceRange, DriverError, StreamId};
use crate::tag::{Tag, TagState};

/// Why a staged sleep or wake was undone.
///
/// ```
/// use poorwill::pool::UndoneBecause;
///
/// assert_eq!(UndoneBecause::Decided.to_string(), "its group decided so");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum UndoneBecause {
    /// That is the verdict of its group: some participant could not do it, or the coordinator gave it up.
    Decided,
    /// There was no verdict in time.
    Undecided {
        /// Since it was staged.
        waited: Duration,
    },
    /// The pool was closed.
    Closed,
    /// Its [`CancellationToken`](crate::pool::CancellationToken) was.
    Cancelled,
}

impl fmt::Display for UndoneBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decided => f.write_str("its group decided so"),
            Self::Undecided { waited } => write!(f, "there was no verdict within {waited:?}"),
            Self::Closed => f.write_str("the pool was closed"),
            Self::Cancelled => f.write_str("it was cancelled"),
        }
    }
}

/// Result of a pool call.
pub type Result<T, E = PoolError> = std::result::Result<T, E>;

/// Why a call of a [`crate::Pool`] failed.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, PoolError, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let error = arena.alloc(&AllocRequest::new(1 << 30, Tag::weights())).unwrap_err();
/// assert!(matches!(error, PoolError::OverLimit { .. }));
/// println!("{}", poorwill::chain(&error)); // With sizes, the next step, and the driver's error if any.
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The configuration suits no device.
    #[error("the pool cannot be opened: {reason}")]
    InvalidConfig {
        /// Reason.
        reason: String,
    },
    /// The request suits no pool.
    #[error("cannot allocate {bytes} bytes aligned to {align} for `{tag}`: {reason}")]
    InvalidRequest {
        /// Requested bytes.
        bytes: u64,
        /// In bytes.
        align: u64,
        /// Requested tag.
        tag: Tag,
        /// Reason.
        reason: String,
    },
    /// The pool's limit is too low.
    #[error("cannot {op}: the limit of {} is too low by {}: {usage}; {hint}", ByteSize(usage.limit_bytes),
        ByteSize(needed_bytes.saturating_add(usage.mapped_bytes).saturating_sub(usage.limit_bytes)))]
    OverLimit {
        /// Operation.
        op: String,
        /// Bytes to map beyond what could be reclaimed.
        needed_bytes: u64,
        /// Pool usage.
        usage: Usage,
        /// What would help.
        hint: &'static str,
    },
    /// The device has too little free memory.
    #[error("cannot {op}: {shortage}; {usage}; {}", shortage.hint(usage))]
    DeviceFull {
        /// Operation.
        op: String,
        /// Needed and available bytes.
        shortage: Shortage,
        /// Pool usage.
        usage: Usage,
        /// The driver's last refusal.
        source: Box<DriverError>,
    },
    /// The driver failed an allocation, not for lack of memory.
    #[error("cannot allocate {} for `{tag}`", ByteSize(*bytes))]
    AllocFailed {
        /// Requested bytes.
        bytes: u64,
        /// Requested tag.
        tag: Tag,
        /// Driver error.
        source: DriverError,
    },
    /// Waiting for the device would make the stream's capture into a graph fail.
    #[error(
        "cannot {op} while {stream} is being captured into a graph: waiting for the device would end the capture with an error; end it first, then try again"
    )]
    Capturing {
        /// Operation.
        op: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// During a capture the pool cannot query whether work still uses freed memory, which may be enough.
    #[error("cannot {op}: {} more are needed, and memory that was freed cannot be reused while {stream} is being captured into a graph; {usage}; end the capture first, or allocate before it",
        ByteSize(*needed_bytes))]
    HeldByCapture {
        /// Operation.
        op: String,
        /// Missing bytes.
        needed_bytes: u64,
        /// Pool usage.
        usage: Usage,
        /// The stream.
        stream: StreamId,
    },
    /// The longest wait has passed. A trim has released everything else.
    #[error("cannot {op}: {awaited} did not end within {waited:?}{}; {usage}; {}", Needed(*needed_bytes), awaited.hint())]
    TimedOut {
        /// Operation.
        op: String,
        /// Missing bytes, if any.
        needed_bytes: u64,
        /// Since the call began.
        waited: Duration,
        /// What it waited for.
        awaited: Awaited,
        /// Pool usage.
        usage: Usage,
    },
    /// Its [`CancellationToken`](crate::pool::CancellationToken) was cancelled. A sleep or a wake is undone.
    #[error("cannot {op}: the call was cancelled")]
    Cancelled {
        /// Operation.
        op: String,
    },
    /// The tag sleeps.
    #[error("cannot {op}: `{tag}` is {state}; wake it first")]
    Asleep {
        /// Operation.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// How it sleeps.
        state: TagState,
    },
    /// A holder has registered the tag's physical memory.
    #[error(
        "cannot {op}: the memory of `{tag}` is held by {holders}; have it deregistered there, end the hold, then {op}"
    )]
    Held {
        /// Operation.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// Comma-separated.
        holders: String,
    },
    /// The tag's bytes were dropped and not restored.
    #[error(
        "cannot {op}: the bytes of `{tag}` were dropped by a sleep; write them again and call mark_restored"
    )]
    Undefined {
        /// Operation.
        op: &'static str,
        /// The tag.
        tag: Tag,
    },
    /// Bytes were lost because their backups changed in host memory. Only their state has changed.
    #[error(
        "cannot {op}: {} lost with their backups, which have changed in host memory; write them again and call mark_restored, or free the blocks",
        listed(lost)
    )]
    Lost {
        /// Operation.
        op: &'static str,
        /// All of them.
        lost: Vec<LostRange>,
    },
    /// Freed before, or of another pool.
    #[error("cannot {op} {block}: it was freed before or belongs to another pool")]
    StaleBlock {
        /// Operation.
        op: &'static str,
        /// The handle.
        block: BlockId,
    },
    /// The driver does not know the stream, so its work cannot be awaited.
    #[error(
        "cannot {op}: {stream} was never made by this device's driver, or was destroyed; name the default stream, one that the driver made (stream_create) or one that it adopted (adopt_stream)"
    )]
    UnknownStream {
        /// Operation.
        op: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// The part cannot be freed.
    #[error("cannot free {part} of {block}, which is at {range}: {reason}")]
    InvalidPart {
        /// The block.
        block: BlockId,
        /// To be freed.
        part: DeviceRange,
        /// Where the block is.
        range: DeviceRange,
        /// Reason, and what would help.
        reason: &'static str,
    },
    /// An unused or kept range of a sleep is no range.
    #[error(
        "cannot sleep: {bytes} bytes at {addr:#x} were declared {declared}, and that passes the last address; give address and length of device memory"
    )]
    InvalidRange {
        /// What the request says of it: `unused` or `kept`.
        declared: &'static str,
        /// First address.
        addr: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// A read or write leaves its block.
    #[error("cannot {op} {bytes} bytes at {offset}: {block} has {block_bytes} bytes")]
    OutOfBlock {
        /// Operation.
        op: &'static str,
        /// In bytes, from the block's start.
        offset: u64,
        /// Requested bytes.
        bytes: u64,
        /// The block.
        block: BlockId,
        /// In bytes.
        block_bytes: u64,
    },
    /// The pool has no such tag.
    #[error("cannot {op}: no tag `{tag}` here; known are {known}")]
    UnknownTag {
        /// Operation.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// The pool's tags, comma-separated.
        known: String,
    },
    /// The tag was declared with another policy.
    #[error(
        "cannot declare `{tag}`: it has another policy already; declare a tag once, before its first allocation"
    )]
    PolicyConflict {
        /// The tag.
        tag: Tag,
    },
    /// The tag sleeps with its bytes in another state than requested.
    #[error(
        "cannot sleep at level {level}: `{tag}` is {state} already, and this level would have its bytes {wanted}; wake it first"
    )]
    SleepConflict {
        /// Requested level.
        level: Level,
        /// The tag.
        tag: Tag,
        /// How it sleeps.
        state: TagState,
        /// `backed up` or `dropped`.
        wanted: &'static str,
    },
    /// Failed before the point of no return.
    #[error("sleep failed: cannot {phase}; everything is as it was")]
    SleepFailed {
        /// Failed step.
        phase: Phase,
        /// Driver error.
        source: DriverError,
    },
    /// Undoing a failed sleep failed: every byte is in device memory, but not all is mapped.
    #[error(
        "sleep failed: cannot {phase}, and it could not be undone ({undo}); {tags} keep their memory but are not mapped; wake them to map it again"
    )]
    Stranded {
        /// Step that failed first.
        phase: Phase,
        /// Comma-separated, now [`TagState::Stranded`].
        tags: String,
        /// First driver error.
        source: Box<DriverError>,
        /// Error of the undo.
        undo: Box<DriverError>,
    },
    /// An immutable tag has changed. Later sleeps compare all of it.
    #[error(
        "sleep refused: `{tag}` was declared immutable, and its granule at {range} has digest {found} instead of {expected}; all of it is compared from now on: sleep again to copy what has changed"
    )]
    ImmutableChanged {
        /// The tag.
        tag: Tag,
        /// On the device.
        range: DeviceRange,
        /// Of the backup.
        expected: Digest,
        /// On the device.
        found: Digest,
    },
    /// Background backups failed; a sleep makes the missing ones.
    #[error("cannot prepare the sleep; what was backed up by then stays; sleep all the same, or try again")]
    PrepareFailed {
        /// Error of the driver or the backup storage.
        source: DriverError,
    },
    /// A staged sleep or wake was undone; everything is as it was.
    #[error("the {op} was undone: {because}; everything is as it was")]
    Undone {
        /// `sleep` or `wake`.
        op: &'static str,
        /// Why.
        because: UndoneBecause,
    },
    /// A staged sleep or wake was to be undone after its group had committed.
    #[error("the {op} was not undone: it was committed before")]
    Committed {
        /// `sleep` or `wake`.
        op: &'static str,
    },
    /// The decision of a staged sleep or wake cannot be reached.
    #[error(
        "cannot {verdict} the {op}: its decision cannot be reached; it waits for that, and its memory stays"
    )]
    Undecided {
        /// `sleep` or `wake`.
        op: &'static str,
        /// What was proposed.
        verdict: Verdict,
        /// What failed.
        source: DecisionError,
    },
    /// The tags sleep, but some memory was not released. The next sleep, wake or growth tries again.
    #[error("asleep, but {} of {} could not be released; sleep again to retry",
        ByteSize(report.planned_release_bytes.saturating_sub(report.released_bytes + report.shared_backup_bytes)),
        ByteSize(report.planned_release_bytes))]
    Shortfall {
        /// What was done.
        report: Box<SleepReport>,
        /// Error of the first failed release.
        source: DriverError,
    },
    /// Everything is asleep again, with its backups.
    #[error("wake failed: cannot {phase}; everything sleeps as before, with its backups; try again")]
    WakeFailed {
        /// Failed step.
        phase: Phase,
        /// Driver error.
        source: DriverError,
    },
    /// Bytes came back changed. Everything is asleep again.
    #[error("wake failed: {} {location}; everything sleeps as before; {}", listed(lost), location.hint())]
    Corrupt {
        /// Where they changed.
        location: Corruption,
        /// All of them.
        lost: Vec<LostRange>,
    },
    /// The range lies in no live block, or in several.
    #[error(
        "cannot {op} of {range} ({}): it does not lie in one live block of this pool; take it from the block's range",
        ByteSize(range.bytes)
    )]
    OutsideBlocks {
        /// Operation.
        op: &'static str,
        /// On the device.
        range: DeviceRange,
    },
    /// The backup is not there, or not in the form that is needed.
    #[error("cannot {op} of {range} ({}) of `{tag}`, which is {state}: {problem}", ByteSize(range.bytes))]
    Backup {
        /// Operation.
        op: &'static str,
        /// On the device: the first part with this problem.
        range: DeviceRange,
        /// The tag.
        tag: Tag,
        /// Where its bytes were.
        state: TagState,
        /// Problem.
        problem: BackupProblem,
    },
    /// The pool was closed.
    #[error("the pool is closed")]
    Closed,
    /// A thread panicked inside the pool; its bookkeeping is unreliable.
    #[error("a thread panicked inside this pool before; drop it and open another")]
    Poisoned,
    /// The caller is a fork of the pool's process.
    #[error("{0}")]
    WrongProcess(DriverError),
    /// Another driver call failed.
    #[error("cannot {op}")]
    Driver {
        /// Operation.
        op: &'static str,
        /// Driver error.
        source: DriverError,
    },
}

/// What a call waited for.
///
/// ```
/// use poorwill::PoolError;
/// use poorwill::pool::Awaited;
///
/// fn awaited_streams(error: &PoolError) -> Option<usize> {
///     match error {
///         PoolError::TimedOut { awaited: Awaited::Work(streams), .. } => Some(streams.len()),
///         _ => None,
///     }
/// }
/// assert_eq!(awaited_streams(&PoolError::Closed), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Awaited {
    /// Work queued on streams.
    Work(Vec<StreamId>),
    /// Other calls on tags: sleeps, wakes, preparations, allocations and copies.
    Calls(Vec<Tag>),
}

impl Awaited {
    fn hint(&self) -> &'static str {
        match self {
            Self::Work(_) => {
                "that work may depend on this thread or on the host: let it run, then try again, or wait longer"
            }
            Self::Calls(_) => "try again when they have ended, or wait longer",
        }
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(streams) => {
                let streams: Vec<String> = streams.iter().map(StreamId::to_string).collect();
                write!(f, "work queued on {}", streams.join(", "))
            }
            Self::Calls(tags) => {
                let tags: Vec<String> = tags.iter().map(|tag| format!("`{tag}`")).collect();
                write!(f, "other calls at work on {}", tags.join(", "))
            }
        }
    }
}

struct Needed(u64);

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 0 { write!(f, ", and {} depend on it", ByteSize(self.0)) } else { Ok(()) }
    }
}

/// Where stored bytes changed.
///
/// ```
/// use poorwill::PoolError;
/// use poorwill::pool::Corruption;
///
/// fn may_retry(error: &PoolError) -> Option<bool> {
///     match error {
///         PoolError::Corrupt { location, .. } => Some(*location == Corruption::Transfer),
///         _ => None,
///     }
/// }
/// assert_eq!(may_retry(&PoolError::Closed), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Corruption {
    /// Backups do not match their digests.
    Backup,
    /// Backups match; two copies to the device do not.
    Transfer,
}

impl Corruption {
    fn hint(self) -> &'static str {
        match self {
            Self::Backup => {
                "wake accepting losses to have the rest back and write these again, or free these blocks or discard the tag"
            }
            Self::Transfer => "try again",
        }
    }
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backup => "are lost, since their backups have changed in host memory",
            Self::Transfer => "did not arrive, though their backups are intact and were copied twice",
        })
    }
}

/// Why a backup cannot be read or viewed.
///
/// ```
/// use poorwill::pool::BackupProblem;
/// use poorwill::{AllocRequest, Arena, Config, PoolError, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc(&AllocRequest::new(1 << 20, Tag::weights()))?;
/// let error = arena.view_backup(block.range).unwrap_err(); // It has never slept.
/// assert!(matches!(error, PoolError::Backup { problem: BackupProblem::NotStored, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackupProblem {
    /// Nothing is stored: not backed up, dropped, lost, or a sleep stores it now.
    NotStored,
    /// Blocks were allocated in the granule since it was stored.
    NewBlock,
    /// The stored bytes do not match their digest.
    Spoiled,
    /// Not stored raw.
    NotRaw,
    /// On disk.
    OnDisk,
    /// In more than one extent.
    Split,
}

impl fmt::Display for BackupProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStored => {
                "it is not stored in host memory or on disk; sleep at a level that backs it up, with backups kept"
            }
            Self::NewBlock => "blocks were allocated there after it was stored; sleep again",
            Self::Spoiled => {
                "the stored bytes do not match their digest; an awake tag has its bytes on the device: drop its backups and sleep again; a sleeping one wakes by accepting losses"
            }
            Self::NotRaw => {
                "it is not stored raw; declare the tag's backups viewable, at best before its first allocation, and sleep again; or read the backup"
            }
            Self::OnDisk => "it is on disk; read the backup, or wake the tag and sleep again",
            Self::Split => {
                "it is stored in several extents; declare the tag's backups viewable, at best before its first allocation, and sleep again; or read the backup"
            }
        })
    }
}

/// Steps of a sleep or wake.
///
/// ```
/// use poorwill::PoolError;
/// use poorwill::pool::Phase;
///
/// fn failed_while_copying(error: &PoolError) -> Option<bool> {
///     match error {
///         PoolError::SleepFailed { phase, .. } => Some(*phase == Phase::Copy),
///         _ => None,
///     }
/// }
/// assert_eq!(failed_while_copying(&PoolError::Closed), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Wait for the device.
    Quiesce,
    /// Query the device's memory.
    Measure,
    /// Compare digests before copying.
    Compare,
    /// Copy.
    Copy,
    /// Unmap.
    Unmap,
    /// Create and map.
    Map,
    /// Write zeros.
    Zero,
    /// Compare digests after a wake.
    Verify,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quiesce => "wait for the device",
            Self::Measure => "measure the device's memory",
            Self::Compare => "compare digests",
            Self::Copy => "copy bytes",
            Self::Unmap => "unmap memory",
            Self::Map => "map memory",
            Self::Zero => "write zeros",
            Self::Verify => "verify bytes",
        })
    }
}

/// Missing device memory, measured after undoing everything.
///
/// ```
/// use poorwill::pool::{PoolError, Shortage};
///
/// fn missing_bytes(error: &PoolError) -> Option<u64> {
///     let PoolError::DeviceFull { shortage: Shortage { needed_bytes, free_bytes, .. }, .. } = error else {
///         return None;
///     };
///     Some(needed_bytes.saturating_sub(*free_bytes))
/// }
/// assert_eq!(missing_bytes(&PoolError::Closed), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// To create.
    pub needed_bytes: u64,
    /// Free on the device.
    pub free_bytes: u64,
    /// Of the device.
    pub total_bytes: u64,
}

impl Shortage {
    fn hint(&self, usage: &Usage) -> String {
        let elsewhere = self.total_bytes.saturating_sub(self.free_bytes).saturating_sub(usage.mapped_bytes);
        if self.needed_bytes > self.total_bytes {
            "it never fits this device".into()
        } else if elsewhere > 0 {
            format!("{} are held by others: try again when they have released it", ByteSize(elsewhere))
        } else {
            "free or put to sleep what is live".into()
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [needed, free, total] = [self.needed_bytes, self.free_bytes, self.total_bytes].map(ByteSize);
        write!(f, "{needed} more are needed, and the device has {free} free of {total}")
    }
}

/// What a pool holds, for messages.
///
/// ```
/// use poorwill::{AllocRequest, Arena, Config, PoolError, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let error = arena.alloc(&AllocRequest::new(1 << 30, Tag::weights())).unwrap_err();
/// let PoolError::OverLimit { usage, .. } = error else { return Err(error.into()) };
/// assert_eq!((usage.limit_bytes, usage.live_bytes), (64 << 20, 0));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The limit, or else the device's total.
    pub limit_bytes: u64,
    /// In live blocks.
    pub live_bytes: u64,
    /// Physical memory.
    pub mapped_bytes: u64,
    /// Without a live block, after reclaiming.
    pub reclaimable_bytes: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [live, mapped, reclaimable] =
            [self.live_bytes, self.mapped_bytes, self.reclaimable_bytes].map(ByteSize);
        write!(f, "{live} are live, {mapped} mapped, {reclaimable} of them reclaimable")
    }
}
