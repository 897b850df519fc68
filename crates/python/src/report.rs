//! The library's reports and figures as Python objects, with the names of its JSON.

use poorwill::backup::DiskInfo;
use poorwill::pool::TagStats as TagFigures;
use poorwill::{ByteSize, PoolStats, Tag};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
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
    module.add_class::<TagStats>()?;
    module.add_function(wrap_pyfunction!(restored, module)?)
}

/// Converts by way of JSON.
pub(crate) fn plain<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let json = serde_json::to_string(value).map_err(refused)?;
    py.import("json")?.call_method1("loads", (json,))
}

/// What pickle takes for a report: `restored`, the class, and what its `_restored` takes.
pub(crate) fn reduced<'py>(
    report: &Bound<'py, PyAny>,
    taken: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = report.py();
    let restored = py.import("poorwill._native")?.getattr("_restored")?;
    let arguments = (report.get_type(), taken.into_pyobject(py)?);
    (restored, arguments).into_bound_py_any(py)
}

/// A value of a pickled report; it may be of another version of ours.
pub(crate) fn value<'py>(values: &Bound<'py, PyDict>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    values
        .get_item(name)?
        .ok_or_else(|| refused(format!("this report was pickled without `{name}`, by another version")))
}

/// A report that was pickled.
#[pyfunction]
#[pyo3(name = "_restored", signature = (class, taken, /))]
fn restored<'py>(class: &Bound<'py, PyType>, taken: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    class.getattr("_restored")?.call1(taken)
}

/// A class of a report: an attribute for each field, `as_dict`, and `__repr__`.
///
/// It holds values only, so that pickle restores it in any process.
macro_rules! report {
    (
        $(#[doc = $about:literal])+
        $name:ident of $inner:ty, shown by $display:expr;
        $($(#[doc = $doc:literal])* $field:ident: $type:ty = $read:expr;)+
    ) => {
        $(#[doc = $about])+
        #[pyclass(frozen, from_py_object, module = "poorwill")]
        #[derive(Debug, Clone)]
        pub(crate) struct $name {
            $($field: $type,)+
            /// Of all of it; or why there is none.
            json: Result<String, String>,
            shown: String,
        }

        impl From<$inner> for $name {
            fn from(inner: $inner) -> Self {
                let json = serde_json::to_string(&inner).map_err(|error| error.to_string());
                let display: fn(&$inner) -> String = $display;
                let shown = display(&inner);
                Self {
                    $($field: {
                        let read: fn(&$inner) -> $type = $read;
                        read(&inner)
                    },)+
                    json,
                    shown,
                }
            }
        }

        #[pymethods]
        impl $name {
            $(
                $(#[doc = $doc])*
                #[getter]
                fn $field(&self) -> $type {
                    self.$field.clone()
                }
            )+

            /// Plain values, like the command line's JSON.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                let json = self.json.as_ref().map_err($crate::exceptions::refused)?;
                py.import("json")?.call_method1("loads", (json,))
            }

            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
                let (this, py) = (slf.get(), slf.py());
                let values = PyDict::new(py);
                $(values.set_item(stringify!($field), this.$field.clone())?;)+
                let json = this.json.as_ref().map_err($crate::exceptions::refused)?;
                $crate::report::reduced(slf.as_any(), (values, json, &this.shown))
            }

            /// What `__reduce__` took apart.
            #[staticmethod]
            fn _restored(values: &Bound<'_, PyDict>, json: String, shown: String) -> PyResult<Self> {
                $(
                    let $field: $type = $crate::report::value(values, stringify!($field))?.extract()?;
                )+
                Ok(Self { $($field,)+ json: Ok(json), shown })
            }

            fn __repr__(&self) -> String {
                format!("<poorwill.{} {}>", stringify!($name), self.shown)
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
        let shared = match it.shared_backup_bytes {
            0 => String::new(),
            bytes => format!("; backups took {} of the same memory", ByteSize(bytes)),
        };
        let lent = match it.lent_bytes {
            0 => String::new(),
            bytes => format!(", {} lent", ByteSize(bytes)),
        };
        let resident = match it.resident_bytes {
            0 => String::new(),
            bytes => format!(", {} left in place", ByteSize(bytes)),
        };
        format!("level {level} of {tags}: {released} released ({how}){shared}{lent}{resident}, {copied} copied, {:.3} s", it.seconds)
    };
    /// Requested level; 2 for a discard.
    level: u8 = |it| it.level.number();
    /// Tags that this call put to sleep.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that slept before.
    already_asleep_tags: Vec<String> = |it| names(&it.already_asleep_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// To be released when that began: all of it is, but a shortfall and `shared_backup_bytes`.
    planned_release_bytes: u64 = |it| it.planned_release_bytes;
    /// Actual release: less `shared_backup_bytes`.
    released_bytes: u64 = |it| it.released_bytes;
    /// Taken by backups from memory that the device shares with the computer; 0 where it has its own.
    shared_backup_bytes: u64 = |it| it.shared_backup_bytes;
    /// Evidence: "confirmed" by the driver's figure, or only the "ledger" of calls.
    release: String = |it| it.release.name().to_owned();
    /// Lent instead of released: it stays in use until others need it.
    lent_bytes: u64 = |it| it.lent_bytes;
    /// Neither lent nor backed up: volatile bytes that stay in place until others need the memory.
    resident_bytes: u64 = |it| it.resident_bytes;
    /// Why nothing was lent, although the call lends; None if nothing refused.
    lend_refused: Option<String> = |it| it.lend_refused.clone();
    /// Copied to host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Written there for them: less where they are stored as codes.
    stored_bytes: u64 = |it| it.stored_bytes;
    /// Not copied: equal to the backup, or declared immutable.
    unchanged_bytes: u64 = |it| it.unchanged_bytes;
    /// Part of `unchanged_bytes` that was not compared: declared immutable.
    unchecked_bytes: u64 = |it| it.unchecked_bytes;
    /// Copied to other devices' memory besides.
    peer_bytes: u64 = |it| it.peer_bytes;
    /// Why some of it was not, where that is no lack of memory; None if nothing refused.
    peer_refused: Option<String> = |it| it.peer_refused.clone();
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
    phases: SleepPhases = |it| it.phases.into();
}

report! {
    /// Where the time of a sleep went, in seconds.
    SleepPhases of poorwill::SleepPhases, shown by |it| {
        let poorwill::SleepPhases { copy_s, digest_s, unmap_s, release_s, .. } = it;
        format!("copy {copy_s:.3} s, digest {digest_s:.3} s, unmap {unmap_s:.3} s, release {release_s:.3} s")
    };
    /// Getting host memory, copying, and digests of what was stored.
    copy_s: f64 = |it| it.copy_s;
    /// Comparing with the backups before that, while the first of them are unmapped.
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
        let returned = match it.returned_bytes {
            0 => String::new(),
            bytes => format!("{} returned, ", ByteSize(bytes)),
        };
        format!("of {tags}: {mapped} mapped, {returned}{copied} copied, {verified} verified, {seconds:.3} s")
    };
    /// Tags that this call woke.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that were awake before.
    already_awake_tags: Vec<String> = |it| names(&it.already_awake_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// Memory mapped at its addresses again.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Lent by the sleep or left in place, and still there: not copied.
    returned_bytes: u64 = |it| it.returned_bytes;
    /// Copied from host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Read there for them: less where these are codes.
    read_bytes: u64 = |it| it.read_bytes;
    /// Read from disk before that.
    disk_read_bytes: u64 = |it| it.disk_read_bytes;
    /// Of the copied bytes, those that came over other GPUs' links.
    linked_bytes: u64 = |it| it.linked_bytes;
    /// Of the copied bytes, those that came from other devices' memory.
    peer_bytes: u64 = |it| it.peer_bytes;
    /// Overwritten with zeros.
    zeroed_bytes: u64 = |it| it.zeroed_bytes;
    /// Compared with the backup's digests, and equal.
    verified_bytes: u64 = |it| it.verified_bytes;
    /// Tags that are undefined until they are marked as restored.
    undefined_tags: Vec<String> = |it| names(&it.undefined_tags);
    /// Accepted losses: undefined until they are written again.
    lost: Vec<LostRange> = |it| it.lost.iter().cloned().map(LostRange::from).collect();
    /// Where the time went.
    phases: WakePhases = |it| it.phases.into();
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
    end: String = |it| it.end.name().to_owned();
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
    /// Lent by sleeps: not held, and in use until others need it.
    lent_bytes: u64 = |it| it.lent_bytes;
    /// Copied to other devices' memory: in use there until others need it.
    peer_bytes: u64 = |it| it.peer_bytes;
    /// Part of `mapped_bytes` that sleeps without a backup, until others need it.
    resident_bytes: u64 = |it| it.resident_bytes;
    /// Address space.
    reserved_bytes: u64 = |it| it.reserved_bytes;
    /// Host memory of backups.
    backup_bytes: u64 = |it| it.backup_bytes;
    /// Disk space of backups.
    backup_disk_bytes: u64 = |it| it.backup_disk_bytes;
    /// Device memory of which both hold the bytes; more where these are codes.
    backup_raw_bytes: u64 = |it| it.backup_raw_bytes;
    /// The disk for backups, if any.
    disk: Option<Disk> = |it| it.disk.clone().map(Disk::from);
    /// Most that may be mapped.
    limit_bytes: u64 = |it| it.limit_bytes;
    live_blocks: usize = |it| it.live_blocks;
    segments: usize = |it| it.segments;
    /// Figures of each tag in use.
    tags: Vec<TagStats> = |it| it.tags.iter().cloned().map(TagStats::from).collect();
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
    io: String = |it| it.io.to_owned();
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
    state: String = |it| it.state.name().to_owned();
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
