//! The library's reports and figures as Python objects, with the names of its JSON.

use std::ffi::CString;

use poorwill::backup::DiskInfo;
use poorwill::pool::TagStats as TagFigures;
use poorwill::{ByteSize, PoolStats, Tag};
use pyo3::exceptions::{PyAttributeError, PyDeprecationWarning};
use pyo3::prelude::*;
use serde::Serialize;

use crate::exceptions::refused;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SleepReport>()?;
    module.add_class::<SleepPhases>()?;
    module.add_class::<WakeReport>()?;
    module.add_class::<WakePhases>()?;
    module.add_class::<LostRange>()?;
    module.add_class::<PrepareReport>()?;
    module.add_class::<Stats>()?;
    module.add_class::<Disk>()?;
    module.add_class::<TagStats>()
}

/// Converts by way of JSON.
pub(crate) fn plain<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let json = serde_json::to_string(value).map_err(refused)?;
    py.import("json")?.call_method1("loads", (json,))
}

/// Stems of attributes that end in `_bytes` and have new names. The old ones work until the next release.
const RENAMED: [(&str, &str); 3] =
    [("trusted", "unchecked_bytes"), ("uncovered", "unaccounted_bytes"), ("owed", "deferred_release_bytes")];

/// An attribute by its old name, with a DeprecationWarning.
pub(crate) fn renamed<'py>(report: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let (py, class) = (report.py(), report.get_type());
    let stem = name.strip_suffix("_bytes");
    for (_, new) in RENAMED.iter().filter(|(old, _)| Some(*old) == stem) {
        if class.hasattr(new)? {
            let notice = format!("`{name}` is called `{new}` now; the old name goes with the next release");
            let category = py.get_type::<PyDeprecationWarning>();
            PyErr::warn(py, &category, &CString::new(notice)?, 1)?;
            return report.getattr(*new);
        }
    }
    Err(PyAttributeError::new_err(format!("'{}' object has no attribute '{name}'", class.name()?)))
}

/// A class over a report: an attribute for each field, `as_dict`, and `__repr__`.
macro_rules! report {
    (
        $(#[doc = $about:literal])+
        $name:ident of $inner:ty, shown by $display:expr;
        $($(#[doc = $doc:literal])* $field:ident: $type:ty = $read:expr;)+
    ) => {
        $(#[doc = $about])+
        #[pyclass(frozen, module = "poorwill")]
        #[derive(Debug)]
        pub(crate) struct $name($inner);

        impl From<$inner> for $name {
            fn from(inner: $inner) -> Self {
                Self(inner)
            }
        }

        #[pymethods]
        impl $name {
            $(
                $(#[doc = $doc])*
                #[getter]
                fn $field(&self) -> $type {
                    let read: fn(&$inner) -> $type = $read;
                    read(&self.0)
                }
            )+

            /// Plain values, like the command line's JSON.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                $crate::report::plain(py, &self.0)
            }

            fn __getattr__<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
                $crate::report::renamed(slf.as_any(), name)
            }

            fn __repr__(&self) -> String {
                let display: fn(&$inner) -> String = $display;
                format!("<poorwill.{} {}>", stringify!($name), display(&self.0))
            }
        }
    };
}
pub(crate) use report;

report! {
    /// What a sleep did.
    SleepReport of poorwill::SleepReport, shown by |it| {
        let [released, copied] = [it.released_bytes, it.copied_bytes].map(ByteSize);
        let (level, tags, how) = (it.level, listed(&it.tags), it.release.name());
        format!("level {level} of {tags}: {released} released ({how}), {copied} copied, {:.3} s", it.seconds)
    };
    /// Requested level; 2 for a discard.
    level: u8 = |it| it.level.number();
    /// Tags that this call put to sleep.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that slept before.
    already_asleep_tags: Vec<String> = |it| names(&it.already_asleep_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// Planned release.
    planned_release_bytes: u64 = |it| it.planned_release_bytes;
    /// Actual release.
    released_bytes: u64 = |it| it.released_bytes;
    /// Evidence: "confirmed" by the driver's figure, or only the "ledger" of calls.
    release: &'static str = |it| it.release.name();
    /// Copied to host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Written there for them: less where they are stored as codes.
    stored_bytes: u64 = |it| it.stored_bytes;
    /// Not copied: equal to the backup, or declared immutable.
    unchanged_bytes: u64 = |it| it.unchanged_bytes;
    /// Part of `unchanged_bytes` that was not compared: declared immutable.
    unchecked_bytes: u64 = |it| it.unchecked_bytes;
    /// Neither copied nor compared: declared unused, in whole granules.
    unused_bytes: u64 = |it| it.unused_bytes;
    /// Whether the device computes digests at memory speed; otherwise everything is copied.
    fast_digests: bool = |it| it.fast_digests;
    /// Live bytes that were dropped, in whole granules.
    discarded_bytes: u64 = |it| it.discarded_bytes;
    /// Backed up of dropped tags, since the call keeps them, in whole granules.
    kept_bytes: u64 = |it| it.kept_bytes;
    /// Device memory of this process beyond this arena and its context.
    unaccounted_bytes: u64 = |it| it.unaccounted_bytes;
    /// Free device memory before.
    device_free_before_bytes: u64 = |it| it.device_free_before_bytes;
    /// Free device memory after; None if unknown.
    device_free_after_bytes: Option<u64> = |it| it.device_free_after_bytes;
    /// Where the time went.
    phases: SleepPhases = |it| SleepPhases(it.phases);
}

report! {
    /// Where the time of a sleep went, in seconds.
    SleepPhases of poorwill::SleepPhases, shown by |it| {
        let poorwill::SleepPhases { copy_s, digest_s, unmap_s, release_s, .. } = it;
        format!("copy {copy_s:.3} s, digest {digest_s:.3} s, unmap {unmap_s:.3} s, release {release_s:.3} s")
    };
    /// Getting host memory, copying, and digests of what was stored.
    copy_s: f64 = |it| it.copy_s;
    /// Comparing with the backups before that.
    digest_s: f64 = |it| it.digest_s;
    unmap_s: f64 = |it| it.unmap_s;
    /// Releasing memory.
    release_s: f64 = |it| it.release_s;
}

report! {
    /// What a wake did.
    WakeReport of poorwill::WakeReport, shown by |it| {
        let [mapped, copied, verified] = [it.mapped_bytes, it.copied_bytes, it.verified_bytes].map(ByteSize);
        let (tags, seconds) = (listed(&it.tags), it.seconds);
        format!("of {tags}: {mapped} mapped, {copied} copied, {verified} verified, {seconds:.3} s")
    };
    /// Tags that this call woke.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that were awake before.
    already_awake_tags: Vec<String> = |it| names(&it.already_awake_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// Memory mapped at its addresses again.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Copied from host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Read there for them: less where these are codes.
    read_bytes: u64 = |it| it.read_bytes;
    /// Read from disk before that.
    disk_read_bytes: u64 = |it| it.disk_read_bytes;
    /// Overwritten with zeros.
    zeroed_bytes: u64 = |it| it.zeroed_bytes;
    /// Compared with the backup's digests, and equal.
    verified_bytes: u64 = |it| it.verified_bytes;
    /// Tags that are undefined until they are marked as restored.
    undefined_tags: Vec<String> = |it| names(&it.undefined_tags);
    /// Accepted losses: undefined until they are written again.
    lost: Vec<LostRange> = |it| it.lost.iter().cloned().map(LostRange).collect();
    /// Where the time went.
    phases: WakePhases = |it| WakePhases(it.phases);
}

report! {
    /// A range of bytes that a damaged backup lost.
    LostRange of poorwill::LostRange, shown by |it| it.to_string();
    tag: String = |it| it.tag.to_string();
    /// Its block, as errors name it.
    block: String = |it| it.block.to_string();
    /// Offset in the block.
    offset_bytes: u64 = |it| it.offset_bytes;
    /// Address on the device.
    addr: u64 = |it| it.range.addr;
    /// Size.
    bytes: u64 = |it| it.range.bytes;
}

report! {
    /// Where the time of a wake went, in seconds. Copies overlap the other phases.
    WakePhases of poorwill::WakePhases, shown by |it| {
        let poorwill::WakePhases { create_s, map_s, copy_s, verify_s, wait_s, .. } = it;
        let copied = format!("create {create_s:.3} s, map {map_s:.3} s, copy {copy_s:.3} s");
        format!("{copied}, verify {verify_s:.3} s, wait {wait_s:.3} s")
    };
    /// Creating device memory.
    create_s: f64 = |it| it.create_s;
    /// Mapping it and enabling access.
    map_s: f64 = |it| it.map_s;
    /// First to last copy or zero fill.
    copy_s: f64 = |it| it.copy_s;
    /// Waiting for digests after that, and comparing them.
    verify_s: f64 = |it| it.verify_s;
    /// Waiting for memory that others release.
    wait_s: f64 = |it| it.wait_s;
}

report! {
    /// What a preparation did.
    PrepareReport of poorwill::PrepareReport, shown by |it| {
        let [copied, unchanged] = [it.copied_bytes, it.unchanged_bytes].map(ByteSize);
        let (tags, how) = (listed(&it.tags), it.end.name());
        format!("of {tags}, {how}: {copied} copied, {unchanged} unchanged, {:.3} s", it.seconds)
    };
    /// Tags that the sleep would back up.
    tags: Vec<String> = |it| names(&it.tags);
    /// How it ended: "finished", "cancelled", or "overtaken" by a sleep, a discard, or the arena's end.
    end: &'static str = |it| it.end.name();
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// Copied to the backups.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Written there for them: less where they are stored as codes.
    stored_bytes: u64 = |it| it.stored_bytes;
    /// Not copied: equal to the backup, or declared immutable.
    unchanged_bytes: u64 = |it| it.unchanged_bytes;
}

report! {
    /// Figures of an arena.
    Stats of PoolStats, shown by |it| {
        let [live, mapped, limit] = [it.live_bytes, it.mapped_bytes, it.limit_bytes].map(ByteSize);
        let tags = it.tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        format!("of {}: {live} live, {mapped} mapped of {limit}", listed(&tags))
    };
    /// In use by live blocks, rounded up to 512.
    live_bytes: u64 = |it| it.live_bytes;
    /// Device memory held.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Peak of `live_bytes`.
    peak_live_bytes: u64 = |it| it.peak_live_bytes;
    /// Peak of `mapped_bytes`.
    peak_mapped_bytes: u64 = |it| it.peak_mapped_bytes;
    /// Memory created so far, released since or not.
    created_bytes: u64 = |it| it.created_bytes;
    /// Held, but not live.
    cached_bytes: u64 = |it| it.cached_bytes;
    /// Part of `cached_bytes` whose release the driver refused so far.
    deferred_release_bytes: u64 = |it| it.deferred_release_bytes;
    /// Address space.
    reserved_bytes: u64 = |it| it.reserved_bytes;
    /// Host memory of backups.
    backup_bytes: u64 = |it| it.backup_bytes;
    /// Disk space of backups.
    backup_disk_bytes: u64 = |it| it.backup_disk_bytes;
    /// Device memory of which both hold the bytes; more where these are codes.
    backup_raw_bytes: u64 = |it| it.backup_raw_bytes;
    /// The disk for backups, if any.
    disk: Option<Disk> = |it| it.disk.clone().map(Disk);
    /// Most that may be mapped.
    limit_bytes: u64 = |it| it.limit_bytes;
    live_blocks: usize = |it| it.live_blocks;
    segments: usize = |it| it.segments;
    /// Figures of each tag in use.
    tags: Vec<TagStats> = |it| it.tags.iter().cloned().map(TagStats).collect();
}

report! {
    /// A disk for backups: how it works, and what it holds of all arenas of its device.
    Disk of DiskInfo, shown by |it| {
        let how = if it.is_direct { "past" } else { "through" };
        format!("{} used, by {}, {how} the page cache", ByteSize(it.used_bytes), it.io)
    };
    /// In use.
    used_bytes: u64 = |it| it.used_bytes;
    /// Its limit, or None.
    limit_bytes: Option<u64> = |it| it.limit_bytes;
    /// How bytes are read and written: "io_uring" or "threads".
    io: &'static str = |it| it.io;
    /// Why not by io_uring, or None.
    io_because: Option<String> = |it| it.io_because.clone();
    /// Whether transfers bypass the page cache.
    is_direct: bool = |it| it.is_direct;
    /// Why they do not, or None.
    direct_because: Option<String> = |it| it.direct_because.clone();
}

report! {
    /// Figures of one tag.
    TagStats of TagFigures, shown by |it| {
        let [live, mapped, backup] = [it.live_bytes, it.mapped_bytes, it.backup_bytes].map(ByteSize);
        format!("{} ({}): {live} live, {mapped} mapped, {backup} backed up", it.tag, it.state)
    };
    tag: String = |it| it.tag.to_string();
    /// "awake", "undefined", "asleep_backed_up", "asleep_dropped" or "stranded".
    state: &'static str = |it| it.state.name();
    /// In use by live blocks.
    live_bytes: u64 = |it| it.live_bytes;
    /// Device memory held.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Host memory of backups.
    backup_bytes: u64 = |it| it.backup_bytes;
    /// Disk space of backups.
    backup_disk_bytes: u64 = |it| it.backup_disk_bytes;
    /// Device memory of which both hold the bytes; more where these are codes.
    backup_raw_bytes: u64 = |it| it.backup_raw_bytes;
    live_blocks: usize = |it| it.live_blocks;
}

fn names(tags: &[Tag]) -> Vec<String> {
    tags.iter().map(Tag::to_string).collect()
}

fn listed(tags: &[Tag]) -> String {
    if tags.is_empty() { "no tag".to_owned() } else { names(tags).join(", ") }
}
