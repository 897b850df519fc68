//! What a pool call can fail with.
//!
//! Every message names the operation, the sizes and the next step; what the driver said is its source, which
//! [`chain`](crate::chain()) puts behind it. Unless a variant says otherwise, the
//! failed call has changed nothing.

use std::fmt;
use std::time::Duration;

use super::handle::BlockId;
use super::lost::{LostRange, listed};
use super::report::{Level, SleepReport};
use crate::bytes::ByteSize;
use crate::digest::Digest;
use crate::driver::{DeviceRange, DriverError, StreamId};
use crate::tag::{Tag, TagState};

/// Result of a pool call.
pub type Result<T, E = PoolError> = std::result::Result<T, E>;

/// Why a call of a [`super::Pool`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A configuration that no device could make right.
    #[error("the pool cannot be opened: {reason}")]
    InvalidConfig {
        /// What and why.
        reason: String,
    },
    /// A request that no state of the pool could make right.
    #[error("cannot allocate {bytes} bytes aligned to {align} for `{tag}`: {reason}")]
    InvalidRequest {
        /// Bytes asked for.
        bytes: u64,
        /// Alignment asked for, in bytes.
        align: u64,
        /// Tag asked for.
        tag: Tag,
        /// What is wrong.
        reason: String,
    },
    /// The pool may not map enough for the operation.
    #[error("cannot {op}: the limit of {} is too low by {}: {usage}; {hint}", ByteSize(usage.limit_bytes),
        ByteSize(needed_bytes.saturating_add(usage.mapped_bytes).saturating_sub(usage.limit_bytes)))]
    OverLimit {
        /// What was to be done.
        op: String,
        /// Further bytes that it needed to map, beyond what could be reclaimed.
        needed_bytes: u64,
        /// What the pool held then.
        usage: Usage,
        /// What would help.
        hint: &'static str,
    },
    /// The device had too little free memory for the operation.
    #[error("cannot {op}: {shortage}; {usage}; {}", shortage.hint(usage))]
    DeviceFull {
        /// What was to be done.
        op: String,
        /// What it needed and what there was.
        shortage: Shortage,
        /// What the pool held then.
        usage: Usage,
        /// The driver's refusal of the mapping that was too much.
        source: Box<DriverError>,
    },
    /// The driver failed an allocation for another reason than too little memory.
    #[error("cannot allocate {} for `{tag}`", ByteSize(*bytes))]
    AllocFailed {
        /// Bytes asked for.
        bytes: u64,
        /// Tag asked for.
        tag: Tag,
        /// What the driver said.
        source: DriverError,
    },
    /// A stream is being captured into a graph, and this would wait for the device, by which the capture would fail.
    /// Nothing has happened.
    #[error(
        "cannot {op} while {stream} is being captured into a graph: waiting for the device would end the capture with an error; end it first, then try again"
    )]
    Capturing {
        /// What was to be done.
        op: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// What is lacking may lie in memory that was freed, of which nobody can tell whether work still uses it while a
    /// stream is being captured into a graph.
    #[error("cannot {op}: {} more are needed, and memory that was freed cannot be had while {stream} is being captured into a graph; {usage}; end the capture first, or allocate before it",
        ByteSize(*needed_bytes))]
    HeldByCapture {
        /// What was to be done.
        op: String,
        /// Bytes that it lacked.
        needed_bytes: u64,
        /// What the pool held then.
        usage: Usage,
        /// The stream.
        stream: StreamId,
    },
    /// What the call waited for did not end within the longest time that it was to wait. Of a trim, everything else was
    /// given back; otherwise nothing has happened.
    #[error("cannot {op}: {awaited} did not end within {waited:?}{}; {usage}; {}", Needed(*needed_bytes), awaited.hint())]
    TimedOut {
        /// What was to be done.
        op: String,
        /// Bytes that it lacked; 0 when it waited for no memory.
        needed_bytes: u64,
        /// How long the call had gone on by then.
        waited: Duration,
        /// What it waited for.
        awaited: Awaited,
        /// What the pool held then.
        usage: Usage,
    },
    /// The tag sleeps: its blocks have no memory now.
    #[error("cannot {op}: `{tag}` is {state}; wake it first")]
    Asleep {
        /// What was to be done.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// How it sleeps.
        state: TagState,
    },
    /// Somebody has the physical memory of the tag registered, and would go on using it. Nothing has happened.
    #[error(
        "cannot {op}: the memory of `{tag}` is held by {holders}; have it deregistered there, end the hold, then {op}"
    )]
    Held {
        /// What was to be done.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// Who holds it, comma-separated.
        holders: String,
    },
    /// The tag's bytes were dropped and are not restored yet.
    #[error(
        "cannot {op}: the bytes of `{tag}` were dropped by a sleep; write them again and call mark_restored"
    )]
    Undefined {
        /// What was to be done.
        op: &'static str,
        /// The tag.
        tag: Tag,
    },
    /// Bytes were lost with their backups, which had changed in host memory, and are not restored yet. What was to be done
    /// did not happen, and the tags are as they were, but for these bytes.
    #[error(
        "cannot {op}: {} lost with their backups, which have changed in host memory; write them again and call mark_restored, or free the blocks",
        listed(lost)
    )]
    Lost {
        /// What was to be done.
        op: &'static str,
        /// All of them that are in the way.
        lost: Vec<LostRange>,
    },
    /// A block that was freed before, or belongs to another pool.
    #[error("cannot {op} {block}: it was freed before or belongs to another pool")]
    StaleBlock {
        /// What was to be done.
        op: &'static str,
        /// The handle.
        block: BlockId,
    },
    /// A stream that the driver does not know: nothing that was queued there could be waited for.
    #[error(
        "cannot {op}: {stream} was never made by this device's driver, or was destroyed; name the default stream, one that the driver made (stream_create) or one that it was told of (adopt_stream)"
    )]
    UnknownStream {
        /// What was to be done.
        op: &'static str,
        /// The stream.
        stream: StreamId,
    },
    /// A part that cannot be taken out of its block.
    #[error("cannot free {part} of {block}, which is at {range}: {reason}")]
    InvalidPart {
        /// The block.
        block: BlockId,
        /// What was to be given back.
        part: DeviceRange,
        /// Where the block is.
        range: DeviceRange,
        /// What is wrong, and what would help.
        reason: &'static str,
    },
    /// A read or write that leaves its block.
    #[error("cannot {op} {bytes} bytes at {offset}: {block} has {block_bytes} bytes")]
    OutOfBlock {
        /// What was to be done.
        op: &'static str,
        /// Offset into the block, in bytes.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// The block.
        block: BlockId,
        /// Its size, in bytes.
        block_bytes: u64,
    },
    /// A tag that this pool does not know: never used, or nothing of it is left.
    #[error("cannot {op}: no tag `{tag}` here; known are {known}")]
    UnknownTag {
        /// What was to be done.
        op: &'static str,
        /// The tag.
        tag: Tag,
        /// The tags of the pool, comma-separated.
        known: String,
    },
    /// A tag was declared with a policy other than the one it already has.
    #[error(
        "cannot declare `{tag}`: it has another policy already; declare a tag once, before its first allocation"
    )]
    PolicyConflict {
        /// The tag.
        tag: Tag,
    },
    /// The sleep asks for something else than what the sleeping tag went through.
    #[error(
        "cannot sleep at level {level}: `{tag}` is {state} already, and this level would have its bytes {wanted}; wake it first"
    )]
    SleepConflict {
        /// Level asked for.
        level: Level,
        /// The tag.
        tag: Tag,
        /// How it sleeps.
        state: TagState,
        /// `backed up` or `dropped`.
        wanted: &'static str,
    },
    /// The sleep failed before its point of no return: the pool is as it was, with every byte.
    #[error("sleep failed while it was to {phase}; everything is as it was")]
    SleepFailed {
        /// Which step failed.
        phase: Phase,
        /// What the driver said.
        source: DriverError,
    },
    /// The sleep failed and could not be undone: no byte is lost, the memory is held, part of it is not mapped.
    #[error(
        "sleep failed while it was to {phase}, and could not be undone ({undo}); {tags} keep their memory but are not mapped; wake them to map it again"
    )]
    Stranded {
        /// Which step failed first.
        phase: Phase,
        /// The tags, comma-separated; their state is [`TagState::Stranded`].
        tags: String,
        /// What the driver said first.
        source: Box<DriverError>,
        /// What it said to the undo.
        undo: Box<DriverError>,
    },
    /// A tag that was declared immutable has changed: the sleep did not happen, everything is as it was, and from
    /// now on the tag's granules are compared like any other's.
    #[error(
        "sleep refused: `{tag}` was declared immutable, and its granule at {range} has digest {found} instead of {expected}; nothing of it is taken on trust any more: sleep again to copy what has changed"
    )]
    ImmutableChanged {
        /// The tag.
        tag: Tag,
        /// The granule on the device.
        range: DeviceRange,
        /// Digest of the backup.
        expected: Digest,
        /// Digest of the device's bytes.
        found: Digest,
    },
    /// Backups could not be made in the background. Nothing else has happened; a sleep makes what is missing.
    #[error("cannot prepare the sleep; what was backed up by then stays; sleep all the same, or try again")]
    PrepareFailed {
        /// What the driver or the store of backups said.
        source: DriverError,
    },
    /// The tags sleep, but not all of their memory could be given back. The rest is tried again by the next
    /// call that sleeps, wakes or needs buffer.
    #[error("asleep, but {} of {} could not be given back; sleep again to retry",
        ByteSize(report.planned_release_bytes.saturating_sub(report.released_bytes)), ByteSize(report.planned_release_bytes))]
    Shortfall {
        /// What was done.
        report: Box<SleepReport>,
        /// What the driver said to the first release that failed.
        source: DriverError,
    },
    /// The wake failed: everything is asleep again with its backups.
    #[error("wake failed while it was to {phase}; everything sleeps as before, with its backups; try again")]
    WakeFailed {
        /// Which step failed.
        phase: Phase,
        /// What the driver said.
        source: DriverError,
    },
    /// Bytes that came back are not those that were stored. Everything is asleep again.
    #[error("wake failed: {} {location}; everything sleeps as before; {}", listed(lost), location.hint())]
    Corrupt {
        /// Where they changed.
        location: Corruption,
        /// All of them.
        lost: Vec<LostRange>,
    },
    /// The pool was closed.
    #[error("the pool is closed")]
    Closed,
    /// A thread panicked inside the pool; its bookkeeping cannot be skipped any more.
    #[error("a thread panicked inside this pool before; drop it and open another")]
    Poisoned,
    /// The caller is a fork of the process that opened the pool.
    #[error("{0}")]
    WrongProcess(DriverError),
    /// Any other call of the driver failed.
    #[error("cannot {op}")]
    Driver {
        /// What was to be done.
        op: &'static str,
        /// What the driver said.
        source: DriverError,
    },
}

/// What a call waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Awaited {
    /// Work that was queued on these streams.
    Work(Vec<StreamId>),
    /// Other calls at work on these tags: sleeps, wakes, preparations, allocations and copies.
    Calls(Vec<Tag>),
}

impl Awaited {
    fn hint(&self) -> &'static str {
        match self {
            Self::Work(_) => {
                "that work may need this very thread, or the host: let it go on, then try again, or wait longer"
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

/// Memory that was lacking, if any, for a message.
struct Needed(u64);

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 0 { write!(f, ", and {} depend on it", ByteSize(self.0)) } else { Ok(()) }
    }
}

/// Where stored bytes changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Corruption {
    /// The backups in host memory do not match their digests any more.
    Backup,
    /// The backups are intact; the copies on the device are not, though they were made twice.
    Transfer,
}

impl Corruption {
    /// What would help.
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

/// The steps of a sleep or wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Wait until the device is complete.
    Quiesce,
    /// Ask the device for its memory.
    Measure,
    /// Compare digests of the device with those of the backups.
    Compare,
    /// Copy bytes.
    Copy,
    /// Take memory out of its addresses.
    Unmap,
    /// Get memory and put it at its addresses.
    Map,
    /// Write zeros.
    Zero,
    /// Compare digests of the device with those of the backups after a wake.
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

/// Memory of a device that was not enough, measured when everything was undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// Bytes that had to be created.
    pub needed_bytes: u64,
    /// Bytes that the device has free.
    pub free_bytes: u64,
    /// Bytes that the device has.
    pub total_bytes: u64,
}

impl Shortage {
    /// What would help.
    fn hint(&self, usage: &Usage) -> String {
        let elsewhere = self.total_bytes.saturating_sub(self.free_bytes).saturating_sub(usage.mapped_bytes);
        if self.needed_bytes > self.total_bytes {
            "it never fits this device".into()
        } else if elsewhere > 0 {
            format!("{} are held by others: try again when they have let go", ByteSize(elsewhere))
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Most the pool may map, in bytes; the device's total where no limit was given.
    pub limit_bytes: u64,
    /// Bytes in use.
    pub live_bytes: u64,
    /// Bytes of backing held.
    pub mapped_bytes: u64,
    /// Bytes held that no live block touches, after reclaiming.
    pub reclaimable_bytes: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [live, mapped, idle] = [self.live_bytes, self.mapped_bytes, self.reclaimable_bytes].map(ByteSize);
        write!(f, "{live} are live, {mapped} mapped, {idle} of them idle")
    }
}
