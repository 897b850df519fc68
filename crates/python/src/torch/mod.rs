//! Where PyTorch's caching allocator gets its segments: see [`symbols`] for what it calls, [`route`] for where a call
//! goes, [`segments`] for what PyTorch has, and [`afterwards`] for who looks then.
//!
//! The Python half is `poorwill/torch/`, which decides which allocations are routed here.

mod afterwards;
mod route;
mod segments;
mod symbols;

use poorwill::{DeviceRange, Tag};
use pyo3::prelude::*;

use self::route::routes;
use self::segments::Moment;
use crate::arena::Arena;
use crate::errors::{failed, invalid, refused};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(torch_allocator, module)?)?;
    module.add_function(wrap_pyfunction!(torch_make_default, module)?)?;
    module.add_function(wrap_pyfunction!(afterwards::torch_call_afterwards, module)?)?;
    module.add_function(wrap_pyfunction!(torch_leave_uncut, module)?)?;
    module.add_function(wrap_pyfunction!(torch_moment, module)?)?;
    module.add_function(wrap_pyfunction!(torch_carve, module)?)?;
    module.add_function(wrap_pyfunction!(torch_segments, module)?)?;
    module.add_function(wrap_pyfunction!(torch_has_segment_at, module)?)?;
    module.add_function(wrap_pyfunction!(torch_set_cached_max, module)?)?;
    module.add_function(wrap_pyfunction!(torch_trim, module)?)?;
    module.add_function(wrap_pyfunction!(torch_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(make_immortal, module)?)
}

/// The addresses of two C functions, to get segments for a tag of an arena and to give them back: for
/// `torch._C._cuda_customAllocator`.
///
/// Raises ValueError for a name that no tag can have, and PoorwillError where PyTorch cannot use the arena.
#[pyfunction]
fn torch_allocator(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<(usize, usize)> {
    let number = route_to(py, arena, tag)?;
    symbols::addresses(number).ok_or_else(|| refused("no function is left for another tag"))
}

/// Has the symbol `poorwill_alloc` serve a tag of an arena, for the arena's device.
///
/// Raises as `torch_allocator`.
#[pyfunction]
fn torch_make_default(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<()> {
    routes().make_default(route_to(py, arena, tag)?);
    Ok(())
}

fn route_to(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<usize> {
    let tag = Tag::new(tag).map_err(invalid)?;
    let opened = arena.get().opened()?;
    // It may be the last to hold it, if it is being closed.
    py.detach(move || routes().to(&opened, &tag)).map_err(refused)
}

/// A scope begins, or ends, in which PyTorch gives the large segments of a tag of an arena back without having cut them:
/// they get memory in large pieces.
///
/// Raises as `torch_allocator`, and does nothing for an arena that was closed meanwhile.
#[pyfunction]
fn torch_leave_uncut(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str, begins: bool) -> PyResult<()> {
    if begins || arena.get().is_open()? {
        routes().leave_uncut(route_to(py, arena, tag)?, begins);
    }
    Ok(())
}

/// Now: segments that are handed out later are not carved by who names this moment.
#[pyfunction]
fn torch_moment() -> u64 {
    routes().moment().0
}

/// Gives parts of segments back that PyTorch never hands out again. Each segment is its address, its size, and its
/// free parts, each an address and a size. Returns the bytes given back, which are whole granules.
///
/// Raises PoorwillError for what an arena says first, when everything else was tried.
#[pyfunction]
#[allow(clippy::type_complexity)] // As Python has it: segments with their holes.
fn torch_carve(py: Python<'_>, moment: u64, segments: Vec<(u64, u64, Vec<(u64, u64)>)>) -> PyResult<u64> {
    let carved = py.detach(|| {
        let (mut bytes, mut failed) = (0, None);
        for (addr, size, holes) in segments {
            let holes: Vec<_> =
                holes.into_iter().map(|(addr, bytes)| DeviceRange::new(addr, bytes)).collect();
            match routes().carve(Moment(moment), DeviceRange::new(addr, size), &holes) {
                Ok(carved) => bytes += carved,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(bytes), Err)
    });
    carved.map_err(|error| failed(py, &error))
}

/// How many segments PyTorch has, and the bytes of them that are still held: on one GPU, or on all if None is given.
#[pyfunction]
#[pyo3(signature = (ordinal=None))]
fn torch_segments(py: Python<'_>, ordinal: Option<u32>) -> (usize, u64) {
    py.detach(|| routes().held(ordinal))
}

/// Whether a segment that PyTorch has begins at an address.
#[pyfunction]
fn torch_has_segment_at(py: Python<'_>, addr: u64) -> bool {
    py.detach(|| routes().begins_at(addr))
}

/// How many bytes an arena may keep mapped that nothing uses, before a thread of its own gives them back; None for as
/// many as there are.
///
/// Raises ClosedError when it is closed.
#[pyfunction]
fn torch_set_cached_max(py: Python<'_>, arena: &Bound<'_, Arena>, max_bytes: Option<u64>) -> PyResult<()> {
    arena.get().with(py, |arena| arena.set_cached_max_bytes(max_bytes))
}

/// `Arena.trim`, of what PyTorch has given back by itself.
#[pyfunction]
fn torch_trim(py: Python<'_>, arena: &Bound<'_, Arena>) -> PyResult<u64> {
    arena.get().with(py, poorwill::Arena::trim)
}

/// Before an arena sleeps, is trimmed or closed: PyTorch, if its pools are in use, gives back what it caches, and the arena
/// comes to know the streams on which a graph is most likely being captured.
pub(crate) fn settle(py: Python<'_>, arena: &Arena) -> PyResult<()> {
    bury_closed(py);
    if !arena.is_open()? {
        return Ok(());
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(pools) = modules.get_item("poorwill.torch") else { return Ok(()) };
    // While it is being imported its functions come one by one, and no pool can have been used.
    let Some(settle) = pools.getattr_opt("settle")? else { return Ok(()) };
    let streams: Vec<usize> = settle.call1((arena.spec().id(),))?.extract()?;
    // If it has been closed meanwhile, what comes next says so.
    let Ok(opened) = arena.opened() else { return Ok(()) };
    // It may be the last to hold it, if it is being closed.
    py.detach(move || streams.iter().try_for_each(|stream| route::watch(&opened, *stream).map(drop)))
        .map_err(refused)
}

/// Lets go of arenas that were closed before PyTorch had given back all that it had of them.
pub(crate) fn bury_closed(py: Python<'_>) {
    py.detach(|| drop(routes().take_closed()));
}

/// What was refused to PyTorch last, in words, to this thread if anything was; None where nothing was since this was
/// asked last.
#[pyfunction]
fn torch_refusal() -> Option<String> {
    routes().take_refusal()
}

/// Keeps an object for ever: for those of PyTorch's whose end would end the process.
#[pyfunction]
fn make_immortal(object: Bound<'_, PyAny>) {
    std::mem::forget(object.unbind());
}
