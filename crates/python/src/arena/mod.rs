//! Arenas: memory of a device that can be put to sleep and woken.

mod current;
mod hold;
mod preparation;
mod registry;
mod report;
mod request;

use std::sync::Arc;

use poorwill::{ByteSize, DeviceSpec, HostMemoryUse, PoolError, SleepRequest, Tag};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use self::hold::Hold;
use self::preparation::{Begun, Preparation};
use self::registry::{Entry, Wanted};
pub(crate) use self::registry::{Failed, Opened, device as device_for_host_memory};
pub(crate) use self::report::SleepReport;
use self::report::{LostRange, Stats, WakeReport};
use self::request::Declaration;
use crate::block::{Block, Dtype};
use crate::budget::{Budget, cap};
use crate::device;
use crate::errors::{failed, invalid};
use crate::process::Here;
use crate::sizes::size_of;
use crate::torch;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Arena>()?;
    module.add_class::<Preparation>()?;
    module.add_class::<Hold>()?;
    report::register(module)?;
    current::register(module)?;
    module.add_function(wrap_pyfunction!(arena, module)?)?;
    let at_exit = wrap_pyfunction!(end_preparations, module)?;
    module.py().import("atexit")?.call_method1("register", (at_exit,)).map(drop)
}

/// Called before the interpreter ends: a thread that copies must not meet a driver that is being taken down.
#[pyfunction]
fn end_preparations(py: Python<'_>) {
    let opened: Vec<_> = registry::all(py).iter().filter_map(|entry| entry.opened().ok()).collect();
    // It may be the last to hold one, if that is being closed.
    py.detach(move || opened.iter().for_each(|opened| opened.end_preparations()));
}

/// The name of the arena that is meant where none is named.
const DEFAULT: &str = "default";

/// Opens an arena, or finds it: memory of a device that can be put to sleep and woken.
///
/// `device` is named as for `budget`. Several arenas of one device share it and have names. Asking again for one that
/// is open returns it; options that are given then must be those that it was opened with.
///
/// `limit` is the most that it may map: bytes as an int or a text like "24GiB"; a share of the device's budget, as a
/// float, or a text like "0.92" or "92%"; or one for each device, as a mapping or a text like "cuda:0=20GiB,0.92".
/// It has to fit beside what this process has of the device already; a share is lowered until it does. Without a
/// limit the arena may have what is left of the budget. Each arena finds its budget when it is opened and none is
/// kept for the others, so several without a limit compete, and in the end it is the device that refuses.
///
/// `host_limit` bounds the host memory that the device may hold for backups, and `pageable` leaves it unlocked. `peers`
/// are the numbers of the other GPUs that may use a GPU's memory: without, all that the process sees and that can reach
/// it; `()` for a process that uses one GPU. All three are the device's, and so those of its first arena.
///
/// Backups stay in host memory after a wake and save the next sleep's copy of what has not changed, unless
/// `keep_backups` is False; `Arena.drop_backups` lets them go at any other time.
///
/// Raises BudgetError for a limit that does not fit or where nobody tells how much memory there is, and PoorwillError
/// where the device cannot be opened, or is open in another way.
#[pyfunction]
#[pyo3(signature = (
    device=None, name="default", *, limit=None, host_limit=None, pageable=false, peers=None, keep_backups=None
))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
fn arena(
    py: Python<'_>,
    device: Option<&Bound<'_, PyAny>>,
    name: &str,
    limit: Option<&Bound<'_, PyAny>>,
    host_limit: Option<&Bound<'_, PyAny>>,
    pageable: bool,
    peers: Option<Vec<u32>>,
    keep_backups: Option<bool>,
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
    let limit_bytes = host_limit.map(size_of).transpose()?;
    let host_memory = HostMemoryUse::default().limited_to(limit_bytes).left_pageable(pageable);
    let name = name.to_owned();
    let wanted = Wanted { device: spec, any_size, name, limit, host_memory, peers, keep_backups };
    torch::bury_closed(py);
    registry::open(py, &wanted).map(Arena::new)
}

/// Memory of a device that can be put to sleep and woken; `poorwill.arena` opens one.
///
/// It stays open until it is closed, whether or not anybody holds this object.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Arena {
    name: String,
    device: DeviceSpec,
    entry: Here<Arc<Entry>>,
}

impl Arena {
    fn new(entry: Arc<Entry>) -> Self {
        let (name, device) = (entry.name().to_owned(), entry.device().clone());
        Self { name, device, entry: Here::new(entry) }
    }

    /// What is open; an error where it has been closed, and in a fork of the process that opened it.
    pub(crate) fn opened(&self) -> PyResult<Arc<Opened>> {
        self.entry.get()?.opened()
    }

    pub(crate) fn spec(&self) -> &DeviceSpec {
        &self.device
    }

    /// Whether it has not been closed; an error in a fork of the process that opened it.
    pub(crate) fn is_open(&self) -> PyResult<bool> {
        Ok(self.entry.get()?.is_open())
    }

    /// Does something with it while other Python threads go on.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        let opened = self.opened()?;
        // It may be the last to hold it, if it is being closed.
        py.detach(move || opened.with(act)).map_err(|error| error.raise(py))
    }

    /// The same, after whoever else caches its memory has given back what is not in use.
    fn settled<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&poorwill::Arena) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        torch::settle(py, self)?;
        self.with(py, act)
    }
}

#[pymethods]
impl Arena {
    /// The device, by name.
    #[getter]
    fn device(&self) -> String {
        self.device.to_string()
    }

    /// Its own name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Most that it may map.
    #[getter]
    fn limit_bytes(&self) -> PyResult<u64> {
        Ok(self.opened()?.arena.limit_bytes())
    }

    /// The budget that its limit comes from, as it was decided when it was opened, and the claims on it now.
    #[getter]
    fn budget(&self) -> PyResult<Budget> {
        let opened = self.opened()?;
        let envelope = opened.arena.envelope().clone();
        Ok(Budget::shared(opened.device.clone(), opened.budget.clone(), envelope))
    }

    /// Takes memory for an array. Its bytes are unspecified.
    ///
    /// `shape` is a number of elements, or one for each dimension; `dtype` a text like "float32", or a type of NumPy's.
    /// `numpy.from_dlpack` makes an array of it that shares the memory, on the host device; from NumPy 2.2 on
    /// it can be written to.
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

    /// Puts tags to sleep: their memory goes back to the device, their addresses stay.
    ///
    /// `level` 1 keeps weights in host memory, 2 drops them. `tags` is one, several, or None for all. All or nothing;
    /// tags that sleep already are reported and left alone. Nobody may touch what sleeps.
    ///
    /// Raises TagError for a tag that is not there or has no bytes worth keeping, and SleepError when it failed.
    #[pyo3(signature = (level=1, tags=None))]
    fn sleep(&self, py: Python<'_>, level: i64, tags: Option<&Bound<'_, PyAny>>) -> PyResult<SleepReport> {
        let request = SleepRequest::all(request::level(level)?).choosing(request::tags(tags)?);
        self.settled(py, |arena| arena.sleep(&request)).map(SleepReport::from)
    }

    /// Wakes tags: the same bytes at the same addresses, or what their policy says of dropped ones.
    ///
    /// `tags` is one, several, or None for all that sleep. Tags that are awake are reported and left alone. `verify`
    /// says how many granules are compared with their backups' digests: "all", "sample" for one in 64, or None for all
    /// where the device computes digests at the speed of its memory, as GPUs do, and else a sample. With a `timeout`, in
    /// seconds, it waits so long for memory of the device that others are about to give back; Ctrl-C does not end that.
    ///
    /// All or nothing: raises OutOfMemoryError for lack of memory and WakeError when it failed, and everything sleeps
    /// as before then. Where backups have spoiled in host memory that names all of them; with `accept_losses` the rest
    /// wakes, and the report's `lost` says what has to be written again before it is marked as restored.
    #[pyo3(signature = (tags=None, *, verify=None, accept_losses=false, timeout=None))]
    fn wake(
        &self,
        py: Python<'_>,
        tags: Option<&Bound<'_, PyAny>>,
        verify: Option<&str>,
        accept_losses: bool,
        timeout: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<WakeReport> {
        let request = request::wake(tags, verify, accept_losses, timeout)?;
        self.with(py, |arena| arena.wake(&request)).map(WakeReport::from)
    }

    /// Drops the bytes of tags whatever their policy says, awake or asleep, backups included.
    ///
    /// They sleep until they are woken, and hold then what their policy says of dropped memory.
    fn discard(&self, py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<SleepReport> {
        let tags = request::named_tags(tags)?;
        self.settled(py, |arena| arena.discard(&tags)).map(SleepReport::from)
    }

    /// Says that the bytes of tags have been written again after they were dropped or lost. Returns the tags that were
    /// undefined until now.
    fn mark_restored(&self, py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let tags = request::named_tags(tags)?;
        let restored = self.with(py, |arena| arena.mark_restored(&tags))?;
        Ok(restored.iter().map(Tag::to_string).collect())
    }

    /// What was lost of awake tags because its backup had spoiled in host memory, and neither written again and marked as
    /// restored nor freed since, in address order.
    fn lost_ranges(&self, py: Python<'_>) -> PyResult<Vec<LostRange>> {
        let lost = self.with(py, poorwill::Arena::lost_ranges)?;
        Ok(lost.into_iter().map(LostRange::from).collect())
    }

    /// Begins to back up, in the background, what such a sleep would, so that even the first sleep copies nothing but
    /// what has changed by then. Everything can be used meanwhile.
    #[pyo3(signature = (level=1, tags=None))]
    fn prepare_sleep(
        &self,
        py: Python<'_>,
        level: i64,
        tags: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Preparation> {
        let request = SleepRequest::all(request::level(level)?).choosing(request::tags(tags)?);
        torch::settle(py, self)?;
        let opened = self.opened()?;
        let begun = py.detach(move || {
            let begun = Begun::new(opened.with(|arena| arena.prepare_sleep(&request))?);
            opened.watch(&begun);
            Ok(begun)
        });
        begun.map(Preparation::new).map_err(|error: Failed| error.raise(py))
    }

    /// Where the bytes of each tag are that has blocks, holds memory or sleeps: "awake", "undefined" (awake, but
    /// dropped by a sleep and not restored since), "asleep_backed_up", "asleep_dropped", or "stranded" (asleep with
    /// its memory, after a sleep that could not be undone).
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with(py, poorwill::Arena::stats)?;
        let states = PyDict::new(py);
        let mut tags = stats.tags.iter();
        tags.try_for_each(|tag| states.set_item(tag.tag.as_str(), tag.state.name()))?;
        Ok(states)
    }

    /// Figures, now.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.with(py, poorwill::Arena::stats).map(Stats::from)
    }

    /// Every segment with its blocks, in address order, as plain values.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let snapshot = self.with(py, poorwill::Arena::snapshot)?;
        report::plain(py, &snapshot.segments)
    }

    /// Gives back all memory of the device that serves no byte, but for what a hold keeps, waiting for work that may still
    /// touch it. Returns how many bytes that was.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.settled(py, poorwill::Arena::trim)
    }

    /// Lets go of the backups of tags that are awake, and gives host memory back that nothing uses. Returns how many bytes
    /// that was; what lies in one piece with a backup that stays comes back with that.
    ///
    /// `tags` is one, several, or None for all that are awake. What sleeps keeps its backups. The next sleep copies what
    /// is let go of.
    ///
    /// Raises TagError for a tag that is named and sleeps with a backup; nothing has happened then.
    #[pyo3(signature = (tags=None))]
    fn drop_backups(&self, py: Python<'_>, tags: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let tags = request::tags(tags)?;
        self.with(py, |arena| arena.drop_backups(tags.as_deref()))
    }

    /// Says that somebody else, `holder` by name, has the physical memory of a tag registered: with a network card, say,
    /// or another process. Until the hold is ended, as by the end of a `with` statement, none of it leaves its address:
    /// a sleep or a discard that means the tag is refused, and so is closing the arena.
    ///
    /// Take it before registering, and end it after deregistering. Holds add up.
    ///
    /// Raises TagError for a tag that is not there or sleeps, and ValueError for a holder without a name.
    fn hold(&self, py: Python<'_>, tag: &str, holder: &str) -> PyResult<Hold> {
        let tag = request::tag(tag)?;
        if holder.trim().is_empty() {
            return Err(invalid("who holds memory has a name, for those who are refused: like \"NIXL\""));
        }
        self.with(py, |arena| arena.hold(&tag, holder)).map(Hold::new)
    }

    /// The tags that are held, each with its `holders` and the `idle_bytes` that serve nobody and stay because of it.
    fn held<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let held = self.with(py, poorwill::Arena::held)?;
        let tags = PyDict::new(py);
        for one in held {
            let about = PyDict::new(py);
            about.set_item("holders", one.holders)?;
            about.set_item("idle_bytes", one.idle_bytes)?;
            tags.set_item(one.tag.as_str(), about)?;
        }
        Ok(tags)
    }

    /// Says what sleep does with a tag, before anything is put into it; and what is known about changes to its bytes
    /// between two sleeps, at any time.
    ///
    /// At `level1` and `level2` a sleep has a "backup" made of it or is to "drop" it, and `dropped` memory comes back
    /// as "zeros" or "undefined". `changes` are "compared" (nothing is known), "immutable" (promised to stay, and only
    /// a sample is compared) or "volatile" (always copied). What is left open is as it is for this tag by default.
    ///
    /// Raises TagError when the tag is in use, or was declared, in another way.
    #[pyo3(signature = (tag, *, level1=None, level2=None, dropped=None, changes=None))]
    fn declare(
        &self,
        py: Python<'_>,
        tag: &str,
        level1: Option<&str>,
        level2: Option<&str>,
        dropped: Option<&str>,
        changes: Option<&str>,
    ) -> PyResult<()> {
        let tag = request::tag(tag)?;
        let Declaration { policy, changes } = Declaration::of(&tag, level1, level2, dropped, changes)?;
        self.with(py, |arena| {
            policy.map_or(Ok(()), |policy| arena.declare_tag(&tag, policy))?;
            changes.map_or(Ok(()), |changes| arena.declare_changes(&tag, changes))
        })
    }

    /// Where PyTorch's allocations go in a `with` statement over what this returns: into this arena, as `tag`.
    ///
    /// Needs PyTorch. See `poorwill.torch`.
    #[pyo3(signature = (tag="weights"))]
    fn pool<'py>(slf: &Bound<'py, Self>, tag: &str) -> PyResult<Bound<'py, PyAny>> {
        let torch = slf.py().import("poorwill.torch")?;
        torch.call_method1("Pool", (slf, tag))
    }

    /// What to give `torch.cuda.graph` as its pool, for graphs whose memory is to be this arena's.
    ///
    /// Needs PyTorch. See `poorwill.torch`.
    fn graph_pool<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("poorwill.torch")?.call_method1("graph_pool", (slf,))
    }

    /// Gives everything back and ends it, after what is under way. Closing again does nothing. Raises SleepError while a
    /// CUDA graph is being captured, and TagError while a tag is held, with nothing done.
    ///
    /// What still lives in it loses its bytes and its memory at once; the addresses stay reserved, so that nothing
    /// else comes to lie there, until the last has let go.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let entry = self.entry.get()?;
        // PyTorch may be beyond settling anything, as after an error of the device: that is no reason to stay open.
        let settled = torch::settle(py, self);
        py.detach(|| entry.close()).map_err(|error| failed(py, &error))?;
        settled
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
                let limit = ByteSize(opened.arena.limit_bytes());
                format!("<poorwill.Arena {name} on {device}: at most {limit}>")
            }
            Err(_) => format!("<poorwill.Arena {name} on {device}: closed>"),
        }
    }
}
