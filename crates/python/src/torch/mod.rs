//! PyTorch's segments: its allocator calls [`symbols`], [`route`] chooses the arena, [`segments`] knows what
//! PyTorch holds, and [`pending_call`] notifies Python.
//!
//! The Python half, `poorwill/torch/`, decides which allocations come here.

mod pending_call;
mod route;
mod segments;
mod symbols;

use poorwill::DeviceRange;
use pyo3::prelude::*;

pub(crate) use self::route::routes;
use self::segments::SegmentSerial;
pub(crate) use self::symbols::addresses;
use crate::errors::{failed, refused};
use crate::registry::Entry;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pending_call::torch_call_afterwards, module)?)?;
    module.add_function(wrap_pyfunction!(torch_moment, module)?)?;
    module.add_function(wrap_pyfunction!(torch_carve, module)?)?;
    module.add_function(wrap_pyfunction!(torch_segments, module)?)?;
    module.add_function(wrap_pyfunction!(torch_has_segment_at, module)?)?;
    module.add_function(wrap_pyfunction!(torch_refusal, module)?)?;
    module.add_function(wrap_pyfunction!(make_immortal, module)?)
}

/// Serial number of the latest segment, for `torch_carve`.
#[pyfunction]
fn torch_moment() -> u64 {
    routes().last_serial().0
}

/// Releases parts of segments that PyTorch never hands out again.
#[pyfunction]
#[allow(clippy::type_complexity)] // As Python has it: segments with their holes.
fn torch_carve(py: Python<'_>, moment: u64, segments: Vec<(u64, u64, Vec<(u64, u64)>)>) -> PyResult<u64> {
    let carved = py.detach(|| {
        let (mut bytes, mut failed) = (0, None);
        for (addr, size, holes) in segments {
            let holes: Vec<_> =
                holes.into_iter().map(|(addr, bytes)| DeviceRange::new(addr, bytes)).collect();
            match routes().carve(SegmentSerial(moment), DeviceRange::new(addr, size), &holes) {
                Ok(carved) => bytes += carved,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(bytes), Err)
    });
    carved.map_err(|error| failed(py, &error))
}

/// Number of PyTorch's segments and their held bytes, on one GPU, or on all for None.
#[pyfunction]
#[pyo3(signature = (ordinal=None))]
fn torch_segments(py: Python<'_>, ordinal: Option<u32>) -> (usize, u64) {
    py.detach(|| routes().held(ordinal))
}

/// Whether one of PyTorch's segments begins at an address.
#[pyfunction]
fn torch_has_segment_at(py: Python<'_>, addr: u64) -> bool {
    py.detach(|| routes().begins_at(addr))
}

/// Before a sleep, a trim or a close: PyTorch's pools release their cache, and the arena learns the streams
/// that graphs are likely captured on.
pub(crate) fn settle(py: Python<'_>, entry: &Entry) -> PyResult<()> {
    if !entry.is_open() {
        return Ok(());
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(pools) = modules.get_item("poorwill.torch") else { return Ok(()) };
    // During its import functions may be missing, and no pool is in use.
    let Some(settle) = pools.getattr_opt("settle")? else { return Ok(()) };
    let streams: Vec<usize> = settle.call1((entry.device().id(),))?.extract()?;
    // If it was closed meanwhile, the next call fails with that.
    let Ok(opened) = entry.opened() else { return Ok(()) };
    // May drop a closed arena's last reference, which waits for the device and would break a capture.
    py.detach(move || {
        streams.iter().try_for_each(|stream| route::adopt_stream(&opened, *stream).map(drop))?;
        if matches!(opened.arena().driver().capturing(), Ok(None)) {
            drop(routes().take_closed());
        }
        Ok(())
    })
    .map_err(|error: String| refused(error))
}

/// Drops closed arenas whose last segments PyTorch has freed since.
pub(crate) fn drop_closed(py: Python<'_>) {
    py.detach(|| drop(routes().take_closed()));
}

/// Takes the message of PyTorch's last refused request, or None.
#[pyfunction]
fn torch_refusal() -> Option<String> {
    routes().take_refusal()
}

/// Leaks an object whose destructor would end the process.
#[pyfunction]
fn make_immortal(object: Bound<'_, PyAny>) {
    std::mem::forget(object.unbind());
}
