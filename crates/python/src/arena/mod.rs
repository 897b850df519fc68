//! `Arena`: device memory that can sleep and wake.

mod backup_view;
mod hold;
mod preparation;

use std::path::PathBuf;
use std::sync::Arc;

use poorwill::disk::DiskConfig;
use poorwill::{ByteSize, DeviceRange, DeviceSpec, HostMemoryUse, PoolError, Tag};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyString};

use self::backup_view::BackupView;
use self::hold::Hold;
pub(crate) use self::preparation::Preparation;
use crate::block::{Block, Dtype};
use crate::budget::{Budget, cap};
use crate::decision::{Decision, Group};
use crate::device;
use crate::errors::{failed, invalid};
use crate::interrupt::interruptible;
use crate::lending;
use crate::process::ProcessLocal;
use crate::registry::{self, ArenaError, ArenaOptions, Entry, Opened};
use crate::report::{self, LostRange, SleepReport, Stats, WakeReport};
use crate::request::{self, Declaration};
use crate::running::RunningPreparation;
use crate::sizes::size_of;
use crate::torch;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Arena>()?;
    module.add_class::<Preparation>()?;
    module.add_class::<Hold>()?;
    module.add_class::<BackupView>()?;
    module.add_function(wrap_pyfunction!(arena, module)?)?;
    let at_exit = wrap_pyfunction!(end_preparations, module)?;
    module.py().import("atexit")?.call_method1("register", (at_exit,)).map(drop)
}

/// Runs at exit: no thread may still copy while the driver is torn down.
#[pyfunction]
fn end_preparations(py: Python<'_>) {
    let opened: Vec<_> = registry::all(py).iter().filter_map(|entry| entry.opened().ok()).collect();
    // May drop a closed arena's last reference, which waits for the device.
    py.detach(move || opened.iter().for_each(|opened| opened.end_preparations()));
}

/// Name of an arena that is opened without one.
pub(crate) const DEFAULT: &str = "default";

/// Opens an arena, or finds the open one: device memory that can sleep and wake.
///
/// `device` is as for `budget`. Several arenas share a device and differ by name. Options given for an open
/// arena must agree with it.
///
/// `limit` bounds what the arena may map:
///
/// - bytes, as an int or a text like "24GiB";
/// - a share of the device's budget, as a float or a text like "0.92" or "92%", lowered until it fits;
/// - one for each device, as a mapping or a text like "cuda:0=20GiB,0.92".
///
/// Without a limit it is what is left of the budget; several such arenas compete for that.
///
/// `cache_limit` bounds the freed memory that stays mapped for reuse, as seen before each operation in a
/// pool of PyTorch's, whose cache counts. A pool needs 128 MiB or more. Without a limit all of it stays
/// until a trim, or until the last pool ends.
///
/// `host_limit` bounds the device's host memory for backups, and `pageable` leaves that unlocked. `peers` are
/// the numbers of GPUs that may access this GPU's memory, by default all that can; `()` suits a process with
/// one GPU. `disk` is a folder on a local disk for backups that host memory cannot hold, and `disk_limit`
/// bounds what they take there. The first arena of a device decides all five.
///
/// Unless `keep_backups` is False, backups stay after a wake for the next sleep. None means False where the
/// device shares the computer's memory, else True.
///
/// `compress` says whether backups are stored as codes, which saves three tenths of bf16 weights. It is
/// "auto" (where the device encodes faster than its link), "off" or "always". None means "auto".
///
/// `links` says whether wakes use the links of other GPUs to host memory, too: True for all `peers`, or their
/// numbers. From the first sleep of 2 GiB on that takes 0.26 GiB of each of those GPUs. None means False. The
/// first arena of a device decides.
///
/// With `lend`, sleeps lend memory instead of releasing it. It stays on the device until another process needs
/// it, and a wake copies only what is gone. `lend` is True, or the path of a broker's socket. True means the one
/// that POORWILL_BROKER names, or the user's. A broker that is not there is started. Limits go by the device's
/// total, not by what is free: where that is too little, the arena asks for what others lend. One without `lend`
/// cannot.
///
/// `peer_copies` says in which other GPUs' idle memory sleeps keep copies of what they back up. It is a
/// sequence of devices, or True: all that this process sees and the device reaches. Wakes read copies some
/// seven times as fast as host memory. A broker gives them up when a process asks for memory there, so this
/// takes `lend`. None means False.
///
/// Raises BudgetError for a limit that does not fit, or for an unknown budget. Raises PoorwillError where the
/// device cannot be opened, cannot lend, or is open with other options.
#[pyfunction]
#[pyo3(signature = (
    device=None, name="default", *, limit=None, host_limit=None, pageable=false, peers=None, keep_backups=None,
    compress=None, disk=None, disk_limit=None, cache_limit=None, lend=None, links=None,
    peer_copies=None
))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn arena(
    py: Python<'_>,
    device: Option<&Bound<'_, PyAny>>,
    name: &str,
    limit: Option<&Bound<'_, PyAny>>,
    host_limit: Option<&Bound<'_, PyAny>>,
    pageable: bool,
    peers: Option<Vec<u32>>,
    keep_backups: Option<bool>,
    compress: Option<&str>,
    disk: Option<PathBuf>,
    disk_limit: Option<&Bound<'_, PyAny>>,
    cache_limit: Option<&Bound<'_, PyAny>>,
    lend: Option<&Bound<'_, PyAny>>,
    links: Option<&Bound<'_, PyAny>>,
    peer_copies: Option<&Bound<'_, PyAny>>,
) -> PyResult<Arena> {
    if Tag::new(name).is_err() {
        return Err(invalid(format!(
            "`{}` cannot be the name of an arena: use 1 to 64 ASCII letters, digits, `_`, `-` or `.`",
            name.escape_debug()
        )));
    }
    let any_size = device.is_some_and(|device| device.cast::<PyString>().is_ok_and(|text| text == "host"));
    let spec = device::named(device, py)?;
    let limit = limit.map(|limit| cap::of(limit, &spec)).transpose()?.flatten();
    let cache_limit_bytes = cache_limit.map(size_of).transpose()?;
    let limit_bytes = host_limit.map(size_of).transpose()?;
    let host_memory = HostMemoryUse::default().limited_to(limit_bytes).left_pageable(pageable);
    let compress = compress.map(request::compress).transpose()?;
    let links = links.map(request::links).transpose()?;
    let disk_limit_bytes = disk_limit.map(size_of).transpose()?;
    if disk.is_none() && disk_limit_bytes.is_some() {
        return Err(invalid(
            "disk_limit bounds a disk, and none is given: name its folder as disk".to_owned(),
        ));
    }
    let disk = disk.map(|folder| DiskConfig::in_folder(folder).limited_to(disk_limit_bytes));
    let lending = lend.map(|lend| lending::asked(lend, name)).transpose()?;
    let peer_copies = peer_copies.map(request::peer_copies).transpose()?;
    let name = name.to_owned();
    let options = ArenaOptions {
        device: spec,
        any_size,
        name,
        limit,
        cache_limit_bytes,
        host_memory,
        peers,
        keep_backups,
        compress,
        links,
        disk,
        lending,
        peer_copies,
    };
    torch::drop_closed(py);
    registry::open(py, &options).map(Arena::new)
}

/// Device memory that can sleep and wake; `poorwill.arena` opens one.
///
/// It stays open until it is closed, also without references to this object.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Arena {
    name: String,
    device: DeviceSpec,
    entry: ProcessLocal<Arc<Entry>>,
}

impl Arena {
    pub(crate) fn new(entry: Arc<Entry>) -> Self {
        let (name, device) = (entry.name().to_owned(), entry.device().clone());
        Self { name, device, entry: ProcessLocal::new(entry) }
    }

    /// Fails if it was closed, and in a fork of the process that opened it.
    pub(crate) fn opened(&self) -> PyResult<Arc<Opened>> {
        self.entry.get()?.opened()
    }

    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        let opened = self.opened()?;
        // May drop a closed arena's last reference, which waits for the device.
        py.detach(move || opened.with(act)).map_err(|error| error.raise(py))
    }

    /// `with`, for calls that wait: a signal ends them.
    fn interruptibly<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        let opened = self.opened()?;
        let done = interruptible(py, move || opened.with(act))?;
        done.map_err(|error| error.raise(py))
    }

    /// `interruptibly`, after PyTorch released the segments that it only caches.
    fn settled<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        torch::settle(py, self.entry.get()?)?;
        self.interruptibly(py, act)
    }
}

#[pymethods]
impl Arena {
    /// Name of the device.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Name of the arena.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Most that it may map.
    #[getter]
    fn limit_bytes(&self) -> PyResult<u64> {
        Ok(self.opened()?.arena().limit_bytes())
    }

    /// Most freed memory that stays mapped for reuse, or None.
    #[getter]
    fn cache_limit_bytes(&self) -> PyResult<Option<u64>> {
        Ok(self.entry.get()?.cache_limit_bytes())
    }

    /// Whether the device's memory is the computer's, so that backups take what a sleep releases.
    #[getter]
    fn shares_host_memory(&self) -> PyResult<bool> {
        Ok(self.opened()?.device().driver().info().shares_host_memory)
    }

    /// The budget that the limit came from, with its current claims.
    #[getter]
    fn budget(&self) -> PyResult<Budget> {
        let opened = self.opened()?;
        let envelope = opened.arena().envelope().clone();
        let lending = self.entry.get()?.lending().cloned().unwrap_or_else(|| lending::at(None));
        Ok(Budget::shared(opened.device().clone(), opened.budget().clone(), envelope, lending))
    }

    /// Allocates a block for an array; its bytes are unspecified.
    ///
    /// `shape` is a number of elements, or one for each dimension. `dtype` is a text like "float32", or a
    /// NumPy type. On the host device `numpy.from_dlpack` shares the memory; from NumPy 2.2 on that array is
    /// writable.
    ///
    /// Raises OutOfMemoryError at the limit, and TagError while the tag sleeps.
    #[pyo3(
        signature = (shape, dtype=Dtype::UINT8, tag="weights"),
        text_signature = "($self, shape, dtype=\"uint8\", tag=\"weights\")"
    )]
    fn empty(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: Dtype, tag: &str) -> PyResult<Block> {
        let (opened, tag) = (self.opened()?, request::tag(tag)?);
        Block::take(py, opened, shape, dtype, tag)
    }

    /// Puts tags to sleep: releases their memory to the device and keeps their addresses.
    ///
    /// `level` 1 backs up weights in host memory, 2 drops them. `tags` is one, several, or None for all. All
    /// or nothing; tags that sleep already are left alone. Do not access sleeping memory.
    ///
    /// `unused` has pairs of an address and a length in bytes: device memory whose bytes need not survive.
    /// Whole granules of it are not backed up, and come back with unspecified bytes.
    ///
    /// `kept` has such pairs, too: memory whose bytes come back although the level drops their tag. The tags
    /// of `keep_awake` do not sleep.
    ///
    /// `lend` says whether the memory is lent instead of released, by default as the arena was opened. Backups are
    /// made in either case. Where a broker refuses, it is released, and the first time warned of.
    ///
    /// With a `decision`, all ranks that share it sleep, or none. Once this one is ready, it waits for the
    /// others for `undo_after` seconds, by default 300. Then it sleeps, or is as it was.
    ///
    /// Raises TagError for an unknown tag or one whose bytes are undefined, and SleepError when the sleep
    /// failed. Raises PoorwillError for `lend` in an arena that was opened without. Raises UndoneError where another rank could not sleep, or was not heard of in time. What the
    /// handler of a signal raises, as for Ctrl-C, ends the call: the tags are as before, or done in time.
    #[pyo3(signature = (
        level=1, tags=None, *, unused=None, kept=None, keep_awake=None, lend=None, decision=None, undo_after=None
    ))]
    #[allow(clippy::too_many_arguments)] // Python names them.
    pub(crate) fn sleep(
        &self,
        py: Python<'_>,
        level: i64,
        tags: Option<&Bound<'_, PyAny>>,
        unused: Option<&Bound<'_, PyAny>>,
        kept: Option<&Bound<'_, PyAny>>,
        keep_awake: Option<&Bound<'_, PyAny>>,
        lend: Option<bool>,
        decision: Option<Bound<'_, Decision>>,
        undo_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<SleepReport> {
        let group = Group::of(decision, undo_after)?;
        let slept = || {
            let request = request::sleep(level, tags, keep_awake)?;
            let request = request.without(request::ranges("unused", unused)?);
            let request = request.keeping(request::ranges("kept", kept)?);
            let request = if lending::lends(self.entry.get()?, lend)? { request.lending() } else { request };
            let act = |arena: &poorwill::Arena| match &group {
                None => arena.sleep(&request),
                Some(group) => group.sleep(arena, &request),
            };
            self.settled(py, act)
        };
        let report = Group::carried_out(py, group.as_ref(), slept())?;
        lending::warn_of_refusal(py, self.entry.get()?, report.lend_refused.as_deref())?;
        Ok(report.into())
    }

    /// Wakes tags: the same bytes at the same addresses, or dropped memory by the tag's policy.
    ///
    /// `tags` is one, several, or None for all that sleep; awake tags are left alone.
    ///
    /// `verify` says how many granules are compared with their backups' digests: "all", or "sample" for one
    /// in 64. None means all where digests are fast, as on GPUs, otherwise a sample.
    ///
    /// `timeout` is how many seconds to wait for other calls with these tags, and for memory that others
    /// release.
    ///
    /// All or nothing: raises OutOfMemoryError or WakeError, and everything sleeps as before. A WakeError
    /// names all damaged backups. With `accept_losses` the rest wakes, and the report's `lost` lists the
    /// ranges to write again before `mark_restored`.
    ///
    /// `decision`, `undo_after` and signals are as for `sleep`.
    #[pyo3(signature = (
        tags=None, *, verify=None, accept_losses=false, timeout=None, decision=None, undo_after=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    pub(crate) fn wake(
        &self,
        py: Python<'_>,
        tags: Option<&Bound<'_, PyAny>>,
        verify: Option<&str>,
        accept_losses: bool,
        timeout: Option<&Bound<'_, PyAny>>,
        decision: Option<Bound<'_, Decision>>,
        undo_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<WakeReport> {
        let group = Group::of(decision, undo_after)?;
        let woken = || {
            let request = request::wake(tags, verify, accept_losses, timeout)?;
            let act = |arena: &poorwill::Arena| match &group {
                None => arena.wake(&request),
                Some(group) => group.wake(arena, &request),
            };
            self.interruptibly(py, act)
        };
        Group::carried_out(py, group.as_ref(), woken()).map(WakeReport::from)
    }

    /// Drops the bytes of tags, awake or asleep, with their backups, whatever their policy.
    ///
    /// They then sleep; a wake gives them what their policy says of dropped memory.
    pub(crate) fn discard(&self, py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<SleepReport> {
        let tags = request::named_tags(tags)?;
        self.settled(py, |arena| arena.discard(&tags)).map(SleepReport::from)
    }

    /// Marks tags as written again after their bytes were dropped or lost.
    ///
    /// Returns the tags that were undefined until now.
    pub(crate) fn mark_restored(&self, py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let tags = request::named_tags(tags)?;
        let restored = self.with(py, |arena| arena.mark_restored(&tags))?;
        Ok(restored.iter().map(Tag::to_string).collect())
    }

    /// Ranges of awake tags that were lost to damaged backups, in address order.
    ///
    /// A range stays listed until its tag is marked as restored or the block freed.
    fn lost_ranges(&self, py: Python<'_>) -> PyResult<Vec<LostRange>> {
        let lost = self.with(py, poorwill::Arena::lost_ranges)?;
        Ok(lost.into_iter().map(LostRange::from).collect())
    }

    /// Starts to back up in the background what such a sleep would.
    ///
    /// The sleep then copies only what changed since. All memory stays usable meanwhile.
    #[pyo3(signature = (level=1, tags=None, *, keep_awake=None))]
    pub(crate) fn prepare_sleep(
        &self,
        py: Python<'_>,
        level: i64,
        tags: Option<&Bound<'_, PyAny>>,
        keep_awake: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Preparation> {
        let request = request::sleep(level, tags, keep_awake)?;
        torch::settle(py, self.entry.get()?)?;
        let opened = self.opened()?;
        let begun = py.detach(move || {
            let begun = RunningPreparation::new(opened.with(|arena| arena.prepare_sleep(&request))?);
            opened.add_preparation(&begun);
            Ok(begun)
        });
        begun.map(Preparation::new).map_err(|error: ArenaError| error.raise(py))
    }

    /// State of each tag that has blocks, holds memory or sleeps.
    ///
    /// It is "awake", "asleep_backed_up" or "asleep_dropped". "undefined" is awake, but dropped by a sleep
    /// and not restored since. "stranded" is asleep with its memory, after a sleep that could not be undone.
    pub(crate) fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, poorwill::Arena::stats)?;
        let states = PyDict::new(py);
        let mut tags = stats.tags.iter();
        tags.try_for_each(|tag| states.set_item(tag.tag.as_str(), tag.state.name()))?;
        Ok(states)
    }

    /// Current figures.
    pub(crate) fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.with(py, poorwill::Arena::stats).map(Stats::from)
    }

    /// Every segment with its blocks, in address order, as plain values.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let snapshot = self.with(py, poorwill::Arena::snapshot)?;
        report::plain(py, &snapshot.segments)
    }

    /// Releases all memory that serves no byte and that no hold keeps.
    ///
    /// Waits for work that may still use it. Returns the bytes released.
    pub(crate) fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.settled(py, poorwill::Arena::trim)
    }

    /// Has others' lent memory given up where less of the device is free, after wakes and while it grows.
    ///
    /// That is for what asks no broker: kernels that are loaded late, memory of other allocators. `size` is an int
    /// or a text like "2GiB". At first it is a hundred-and-twenty-eighth of the device, 1 GiB at most. Without
    /// `lend` it changes nothing.
    fn keep_free(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<()> {
        let bytes = size_of(size)?;
        self.with(py, move |arena| {
            arena.keep_free(bytes);
            Ok(())
        })
    }

    /// Drops the backups of awake tags and releases unused host memory; returns the bytes released.
    ///
    /// `tags` is one, several, or None for all that are awake. Memory that shares an extent with a remaining
    /// backup is released later. The next sleep copies the bytes again.
    ///
    /// Raises TagError, with nothing changed, for a named tag that sleeps with a backup.
    #[pyo3(signature = (tags=None))]
    pub(crate) fn drop_backups(&self, py: Python<'_>, tags: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let tags = request::tags(tags)?;
        self.with(py, |arena| arena.drop_backups(tags.as_deref()))
    }

    /// Moves the backups of sleeping tags to the arena's disk; returns the bytes moved.
    ///
    /// `tags` is one, several, or None for all that sleep. Sleeps do the same where host memory is short, the
    /// longest sleepers first. Wakes read ahead from there.
    ///
    /// Raises PoorwillError without a disk, or where it is full: what was not moved stays.
    #[pyo3(signature = (tags=None))]
    fn spill(&self, py: Python<'_>, tags: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let tags = request::tags(tags)?;
        self.with(py, |arena| arena.spill(tags.as_deref()))
    }

    /// Declares that `holder` has the physical memory of a tag registered, say with a network card.
    ///
    /// Until the hold ends, that memory stays mapped: a sleep or discard of the tag fails, and so does
    /// closing the arena. Take it before registering, and end it after deregistering. Holds add up.
    ///
    /// Raises TagError for an unknown or sleeping tag, and ValueError for an empty holder.
    fn hold(&self, py: Python<'_>, tag: &str, holder: &str) -> PyResult<Hold> {
        let tag = request::tag(tag)?;
        if holder.trim().is_empty() {
            return Err(invalid("a holder needs a name for error messages, like \"NIXL\""));
        }
        self.with(py, |arena| arena.hold(&tag, holder)).map(Hold::new)
    }

    /// The held tags, each with `holders` and the `reclaimable_bytes` that stay mapped only for them.
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.with(py, poorwill::Arena::held)?;
        let tags = PyDict::new(py);
        for one in held {
            let about = PyDict::new(py);
            about.set_item("holders", one.holders)?;
            about.set_item("reclaimable_bytes", one.reclaimable_bytes)?;
            tags.set_item(one.tag.as_str(), about)?;
        }
        Ok(tags)
    }

    /// Copies the backup of `nbytes` bytes of the device from `address` on, asleep or awake.
    ///
    /// The range lies in one live block: a tensor's `data_ptr()`, its offset included, and its bytes. The
    /// backup may be stored in any way, also as codes or on disk, and is compared with its digests. While the
    /// tag is awake it has the bytes of the last sleep or preparation, if backups are kept.
    ///
    /// Raises TagError where nothing is stored, PoorwillError for spoiled bytes, and ValueError for a range
    /// that does not lie in one live block.
    fn read_backup<'py>(
        &self,
        py: Python<'py>,
        address: u64,
        nbytes: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        // No other thread has the array yet.
        PyByteArray::new_with(py, nbytes, |bytes| self.with(py, |arena| arena.read_backup(address, bytes)))
    }

    /// The backup of `nbytes` bytes of the device from `address` on, in place: nothing is copied.
    ///
    /// The tag's backups have to be declared "viewable" before the sleep. Otherwise as `read_backup`, but
    /// nothing is compared; `BackupView.verify` does that. A view never changes: as long as it lives, sleeps
    /// that have to store other bytes take other host memory.
    ///
    /// Raises TagError where nothing is stored, or not in place: on disk, as codes, in several parts. Raises
    /// ValueError for a range that does not lie in one live block.
    fn view_backup(&self, py: Python<'_>, address: u64, nbytes: u64) -> PyResult<BackupView> {
        let range = DeviceRange::new(address, nbytes);
        self.with(py, |arena| arena.view_backup(range)).map(BackupView::new)
    }

    /// Declares how a tag sleeps, before its first allocation, and how its bytes change, at any time.
    ///
    /// `level1` and `level2` choose "backup" or "drop" for such a sleep. `dropped` memory wakes as "zeros" or
    /// "undefined". `changes` are "compared" (unknown), "immutable" (promised; only a sample is compared) or
    /// "volatile" (always copied). A sleep that lends copies volatile bytes only once others need the memory.
    ///
    /// `backups` are "compact" (as codes where the arena compresses) or "viewable" (each block raw, at one host
    /// address); best declared before the first allocation, too. Omitted options keep the tag's defaults.
    ///
    /// Raises TagError when the tag is in use, or declared, with another policy.
    #[pyo3(signature = (tag, *, level1=None, level2=None, dropped=None, changes=None, backups=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn declare(
        &self,
        py: Python<'_>,
        tag: &str,
        level1: Option<&str>,
        level2: Option<&str>,
        dropped: Option<&str>,
        changes: Option<&str>,
        backups: Option<&str>,
    ) -> PyResult<()> {
        let tag = request::tag(tag)?;
        let declaration = Declaration::of(&tag, level1, level2, dropped, changes, backups)?;
        let Declaration { policy, changes, stored_as } = declaration;
        self.with(py, |arena| {
            policy.map_or(Ok(()), |policy| arena.declare_tag(&tag, policy))?;
            changes.map_or(Ok(()), |changes| arena.declare_changes(&tag, changes))?;
            stored_as.map_or(Ok(()), |stored_as| arena.declare_backups(&tag, stored_as))
        })
    }

    /// A context manager that routes PyTorch's allocations into this arena, as `tag`.
    ///
    /// Needs PyTorch. See `poorwill.torch`.
    #[pyo3(signature = (tag="weights"))]
    pub(crate) fn pool<'py>(slf: &Bound<'py, Self>, tag: &str) -> PyResult<Bound<'py, PyAny>> {
        let torch = slf.py().import("poorwill.torch")?;
        torch.call_method1("Pool", (slf, tag))
    }

    /// A pool for `torch.cuda.graph` that takes graph memory from this arena.
    ///
    /// Needs PyTorch. See `poorwill.torch`.
    pub(crate) fn graph_pool<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("poorwill.torch")?.call_method1("graph_pool", (slf,))
    }

    /// Releases everything and closes the arena, after calls in progress. Repeating it does nothing.
    ///
    /// Live blocks lose their memory at once; their addresses stay reserved until the last is freed. The end of
    /// a `with` statement closes it, too.
    ///
    /// Raises SleepError during a CUDA graph capture, and TagError while a tag is held; both change nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let entry = self.entry.get()?;
        // PyTorch may be broken by an error of the device; close the arena all the same.
        let settled = torch::settle(py, self.entry.get()?);
        py.detach(|| entry.close()).map_err(|error| failed(py, &error))?;
        settled
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes it, also after an exception.
    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (_, _, _) = (exc_type, exc_value, traceback);
        self.close(py)
    }

    fn __eq__(&self, other: &Self) -> bool {
        matches!((self.entry.get(), other.entry.get()), (Ok(one), Ok(other)) if Arc::ptr_eq(one, other))
    }

    fn __hash__(&self) -> isize {
        self.entry.get().map_or(0, |entry| Arc::as_ptr(entry).addr().cast_signed())
    }

    fn __repr__(&self) -> String {
        let Self { name, device, entry } = self;
        let Ok(entry) = entry.get() else {
            return format!("<poorwill.Arena {name} on {device} of another process>");
        };
        match entry.opened() {
            Ok(opened) => {
                let limit = ByteSize(opened.arena().limit_bytes());
                format!("<poorwill.Arena {name} on {device}: at most {limit}>")
            }
            Err(_) => format!("<poorwill.Arena {name} on {device}: closed>"),
        }
    }
}
