//! Reports and figures, as Python's objects: what the library says, with the same names as in its JSON.

use poorwill::pool::TagStats as TagFigures;
use poorwill::{ByteSize, PoolStats, Tag};
use pyo3::prelude::*;
use serde::Serialize;

use crate::errors::refused;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SleepReport>()?;
    module.add_class::<SleepPhases>()?;
    module.add_class::<WakeReport>()?;
    module.add_class::<WakePhases>()?;
    module.add_class::<LostRange>()?;
    module.add_class::<PrepareReport>()?;
    module.add_class::<Stats>()?;
    module.add_class::<TagStats>()
}

/// What serialises, as Python's plain values.
pub(super) fn plain<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let json = serde_json::to_string(value).map_err(refused)?;
    py.import("json")?.call_method1("loads", (json,))
}

/// A class over one of the library's reports: an attribute for each field, `as_dict`, and a line for people.
macro_rules! report {
    (
        $(#[doc = $about:literal])+
        $name:ident of $inner:ty, said by $say:expr;
        $($(#[doc = $doc:literal])+ $field:ident: $type:ty = $read:expr;)+
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
                $(#[doc = $doc])+
                #[getter]
                fn $field(&self) -> $type {
                    let read: fn(&$inner) -> $type = $read;
                    read(&self.0)
                }
            )+

            /// The same as plain values: what the command line prints as JSON.
            fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                plain(py, &self.0)
            }

            fn __repr__(&self) -> String {
                let say: fn(&$inner) -> String = $say;
                format!("<poorwill.{} {}>", stringify!($name), say(&self.0))
            }
        }
    };
}

report! {
    /// What a sleep did. Sizes in bytes, times in seconds.
    SleepReport of poorwill::SleepReport, said by |it| {
        let [released, copied] = [it.released_bytes, it.copied_bytes].map(ByteSize);
        let (level, tags, how) = (it.level, listed(&it.tags), it.release.name());
        format!("level {level} of {tags}: {released} released ({how}), {copied} copied, {:.3} s", it.seconds)
    };
    /// The level asked for; 2 for a discard.
    level: u8 = |it| it.level.number();
    /// Tags that this call put to sleep.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that slept already: for them nothing was done.
    already_asleep_tags: Vec<String> = |it| names(&it.already_asleep_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// What the plan was to give back.
    planned_release_bytes: u64 = |it| it.planned_release_bytes;
    /// What was given back.
    released_bytes: u64 = |it| it.released_bytes;
    /// How that is known: "confirmed" by the driver's figure for this process, or by the "ledger" of releases.
    release: &'static str = |it| it.release.name();
    /// Copied to host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Not copied, because the backup's digest matched, or because the tag was declared immutable.
    unchanged_bytes: u64 = |it| it.unchanged_bytes;
    /// Of which nobody compared, because the tag was declared immutable.
    trusted_bytes: u64 = |it| it.trusted_bytes;
    /// Whether the device computes digests at the speed of its memory. Where it does not, everything is copied.
    fast_digests: bool = |it| it.fast_digests;
    /// Held live bytes and were dropped, in whole granules.
    discarded_bytes: u64 = |it| it.discarded_bytes;
    /// What this process still holds of the device beyond this arena and its bare context.
    uncovered_bytes: u64 = |it| it.uncovered_bytes;
    /// Free memory of the device before.
    device_free_before_bytes: u64 = |it| it.device_free_before_bytes;
    /// Free memory of the device after; None where the device would not say any more.
    device_free_after_bytes: Option<u64> = |it| it.device_free_after_bytes;
    /// Where the time went.
    phases: SleepPhases = |it| SleepPhases(it.phases);
}

report! {
    /// Where the time of a sleep went, in seconds.
    SleepPhases of poorwill::SleepPhases, said by |it| {
        let poorwill::SleepPhases { copy_s, digest_s, unmap_s, release_s, .. } = it;
        format!("copy {copy_s:.3} s, digest {digest_s:.3} s, unmap {unmap_s:.3} s, release {release_s:.3} s")
    };
    /// Getting host memory, copying to it, and digests of what was stored, which run beside the copies.
    copy_s: f64 = |it| it.copy_s;
    /// Comparing with the backups before that: digests of what is on the device.
    digest_s: f64 = |it| it.digest_s;
    /// Unmapping.
    unmap_s: f64 = |it| it.unmap_s;
    /// Giving memory back.
    release_s: f64 = |it| it.release_s;
}

report! {
    /// What a wake did. Sizes in bytes, times in seconds.
    WakeReport of poorwill::WakeReport, said by |it| {
        let [mapped, copied, verified] = [it.mapped_bytes, it.copied_bytes, it.verified_bytes].map(ByteSize);
        let (tags, seconds) = (listed(&it.tags), it.seconds);
        format!("of {tags}: {mapped} mapped, {copied} copied, {verified} verified, {seconds:.3} s")
    };
    /// Tags that this call woke.
    tags: Vec<String> = |it| names(&it.tags);
    /// Tags that were awake already: for them nothing was done.
    already_awake_tags: Vec<String> = |it| names(&it.already_awake_tags);
    /// Whole duration.
    seconds: f64 = |it| it.seconds;
    /// Memory brought back to its addresses.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Copied from host memory.
    copied_bytes: u64 = |it| it.copied_bytes;
    /// Overwritten with zeros.
    zeroed_bytes: u64 = |it| it.zeroed_bytes;
    /// Compared with the backup's digests, and equal.
    verified_bytes: u64 = |it| it.verified_bytes;
    /// Tags that are undefined now, until they are marked restored.
    undefined_tags: Vec<String> = |it| names(&it.undefined_tags);
    /// What did not come back because its backup had spoiled, where that was accepted: undefined until it is written again.
    lost: Vec<LostRange> = |it| it.lost.iter().cloned().map(LostRange).collect();
    /// Where the time went.
    phases: WakePhases = |it| WakePhases(it.phases);
}

report! {
    /// Bytes that were lost because their backup had spoiled in host memory.
    LostRange of poorwill::LostRange, said by |it| it.to_string();
    /// Their tag.
    tag: String = |it| it.tag.to_string();
    /// The block that they are of, as errors name it.
    block: String = |it| it.block.to_string();
    /// Where in the block they begin.
    offset_bytes: u64 = |it| it.offset_bytes;
    /// Where on the device they begin.
    addr: u64 = |it| it.range.addr;
    /// How many they are.
    bytes: u64 = |it| it.range.bytes;
}

report! {
    /// Where the time of a wake went, in seconds. Copying runs beside the other phases.
    WakePhases of poorwill::WakePhases, said by |it| {
        let poorwill::WakePhases { create_s, map_s, copy_s, verify_s, wait_s, .. } = it;
        let moved = format!("create {create_s:.3} s, map {map_s:.3} s, copy {copy_s:.3} s");
        format!("{moved}, verify {verify_s:.3} s, wait {wait_s:.3} s")
    };
    /// Getting memory from the device.
    create_s: f64 = |it| it.create_s;
    /// Mapping it and opening it for access.
    map_s: f64 = |it| it.map_s;
    /// From the first copy, or the first zeros, to the end of the last.
    copy_s: f64 = |it| it.copy_s;
    /// Waiting for digests after that, and comparing them.
    verify_s: f64 = |it| it.verify_s;
    /// Waiting, with nothing held, for memory that others gave back.
    wait_s: f64 = |it| it.wait_s;
}

report! {
    /// What a preparation did. Sizes in bytes, times in seconds.
    PrepareReport of poorwill::PrepareReport, said by |it| {
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
    /// Not copied, because the backup's digest matched, or because the tag was declared immutable.
    unchanged_bytes: u64 = |it| it.unchanged_bytes;
}

report! {
    /// Figures of an arena, in bytes unless the name says otherwise.
    Stats of PoolStats, said by |it| {
        let [live, mapped, limit] = [it.live_bytes, it.mapped_bytes, it.limit_bytes].map(ByteSize);
        let tags = it.tags.iter().map(|tag| tag.tag.clone()).collect::<Vec<_>>();
        format!("of {}: {live} live, {mapped} mapped of {limit}", listed(&tags))
    };
    /// In use by live blocks, rounded to 512.
    live_bytes: u64 = |it| it.live_bytes;
    /// Memory of the device that is held.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Most bytes of live blocks at any time.
    peak_live_bytes: u64 = |it| it.peak_live_bytes;
    /// Most memory held at any time.
    peak_mapped_bytes: u64 = |it| it.peak_mapped_bytes;
    /// Memory created since the arena was opened, whether released since or not.
    created_bytes: u64 = |it| it.created_bytes;
    /// Held, but not live.
    cached_bytes: u64 = |it| it.cached_bytes;
    /// Of which the driver has refused a release so far.
    owed_bytes: u64 = |it| it.owed_bytes;
    /// Address space.
    reserved_bytes: u64 = |it| it.reserved_bytes;
    /// Host memory of backups.
    backup_bytes: u64 = |it| it.backup_bytes;
    /// Most that may be mapped.
    limit_bytes: u64 = |it| it.limit_bytes;
    /// Live blocks.
    live_blocks: usize = |it| it.live_blocks;
    /// Segments.
    segments: usize = |it| it.segments;
    /// The same by tag, for tags that have blocks, hold memory or sleep.
    tags: Vec<TagStats> = |it| it.tags.iter().cloned().map(TagStats).collect();
}

report! {
    /// Figures of one tag, in bytes unless the name says otherwise.
    TagStats of TagFigures, said by |it| {
        let [live, mapped, backup] = [it.live_bytes, it.mapped_bytes, it.backup_bytes].map(ByteSize);
        format!("{} ({}): {live} live, {mapped} mapped, {backup} backed up", it.tag, it.state)
    };
    /// The tag.
    tag: String = |it| it.tag.to_string();
    /// Where its bytes are: "awake", "undefined", "asleep_backed_up", "asleep_dropped" or "stranded".
    state: &'static str = |it| it.state.name();
    /// In use by live blocks.
    live_bytes: u64 = |it| it.live_bytes;
    /// Memory of the device that is held.
    mapped_bytes: u64 = |it| it.mapped_bytes;
    /// Host memory of backups.
    backup_bytes: u64 = |it| it.backup_bytes;
    /// Live blocks.
    live_blocks: usize = |it| it.live_blocks;
}

fn names(tags: &[Tag]) -> Vec<String> {
    tags.iter().map(Tag::to_string).collect()
}

fn listed(tags: &[Tag]) -> String {
    if tags.is_empty() { "no tag".to_owned() } else { names(tags).join(", ") }
}
