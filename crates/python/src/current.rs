//! `Arena`'s methods as package functions, on the current device's default arena.
//!
//! Only `pool` and `graph_pool` open it; the others fail where it is not open.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arena::{Arena, DEFAULT, Preparation, arena};
use crate::errors::refused;
use crate::report::{SleepReport, Stats, WakeReport};
use crate::{device, registry};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(pool, module)?)?;
    module.add_function(wrap_pyfunction!(graph_pool, module)?)?;
    module.add_function(wrap_pyfunction!(prepare_sleep, module)?)?;
    module.add_function(wrap_pyfunction!(sleep, module)?)?;
    module.add_function(wrap_pyfunction!(wake, module)?)?;
    module.add_function(wrap_pyfunction!(discard, module)?)?;
    module.add_function(wrap_pyfunction!(mark_restored, module)?)?;
    module.add_function(wrap_pyfunction!(state, module)?)?;
    module.add_function(wrap_pyfunction!(stats, module)?)?;
    module.add_function(wrap_pyfunction!(trim, module)?)?;
    module.add_function(wrap_pyfunction!(drop_backups, module)?)
}

fn current(py: Python<'_>) -> PyResult<Arena> {
    let device = device::named(None, py)?;
    if let Some(entry) = registry::find(py, &device, DEFAULT) {
        return Ok(Arena::new(entry));
    }
    let open: Vec<String> = registry::all(py)
        .iter()
        .map(|entry| format!("poorwill.arena(\"{}\", \"{}\")", entry.device().id(), entry.name()))
        .collect();
    let others = match open.as_slice() {
        [] => String::new(),
        open => format!("; call the method of another: {}", open.join(", ")),
    };
    Err(refused(format!(
        "nothing has been put into the arena of {device}, the current device, so there is nothing to do; allocate \
         in poorwill.pool() first, or open it with poorwill.arena(){others}"
    )))
}

/// `Arena.pool` of a device's default arena, opened on first use. None is the current device.
#[pyfunction]
#[pyo3(signature = (tag="weights", device=None))]
fn pool<'py>(py: Python<'py>, tag: &str, device: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    py.import("poorwill.torch")?;
    let arena = Bound::new(
        py,
        arena(py, device, DEFAULT, None, None, false, None, None, None, None, None, None, None, None, None)?,
    )?;
    Arena::pool(&arena, tag)
}

/// `Arena.graph_pool` of a device's default arena, opened on first use. None is the current device.
#[pyfunction]
#[pyo3(signature = (device=None))]
fn graph_pool<'py>(py: Python<'py>, device: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    py.import("poorwill.torch")?;
    let arena = Bound::new(
        py,
        arena(py, device, DEFAULT, None, None, false, None, None, None, None, None, None, None, None, None)?,
    )?;
    Arena::graph_pool(&arena)
}

/// `Arena.prepare_sleep` of the current device.
#[pyfunction]
#[pyo3(signature = (level=1, tags=None, *, keep_awake=None))]
fn prepare_sleep(
    py: Python<'_>,
    level: i64,
    tags: Option<&Bound<'_, PyAny>>,
    keep_awake: Option<&Bound<'_, PyAny>>,
) -> PyResult<Preparation> {
    current(py)?.prepare_sleep(py, level, tags, keep_awake)
}

/// `Arena.sleep` of the current device.
#[pyfunction]
#[pyo3(signature = (level=1, tags=None, *, unused=None, kept=None, keep_awake=None, lend=None))]
fn sleep(
    py: Python<'_>,
    level: i64,
    tags: Option<&Bound<'_, PyAny>>,
    unused: Option<&Bound<'_, PyAny>>,
    kept: Option<&Bound<'_, PyAny>>,
    keep_awake: Option<&Bound<'_, PyAny>>,
    lend: Option<bool>,
) -> PyResult<SleepReport> {
    current(py)?.sleep(py, level, tags, unused, kept, keep_awake, lend, None, None)
}

/// `Arena.wake` of the current device.
#[pyfunction]
#[pyo3(signature = (tags=None, *, verify=None, accept_losses=false, timeout=None))]
fn wake(
    py: Python<'_>,
    tags: Option<&Bound<'_, PyAny>>,
    verify: Option<&str>,
    accept_losses: bool,
    timeout: Option<&Bound<'_, PyAny>>,
) -> PyResult<WakeReport> {
    current(py)?.wake(py, tags, verify, accept_losses, timeout, None, None)
}

/// `Arena.discard` of the current device.
#[pyfunction]
fn discard(py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<SleepReport> {
    current(py)?.discard(py, tags)
}

/// `Arena.mark_restored` of the current device.
#[pyfunction]
fn mark_restored(py: Python<'_>, tags: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    current(py)?.mark_restored(py, tags)
}

/// `Arena.state` of the current device.
#[pyfunction]
fn state(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    current(py)?.state(py)
}

/// `Arena.stats` of the current device.
#[pyfunction]
fn stats(py: Python<'_>) -> PyResult<Stats> {
    current(py)?.stats(py)
}

/// `Arena.trim` of the current device.
#[pyfunction]
fn trim(py: Python<'_>) -> PyResult<u64> {
    current(py)?.trim(py)
}

/// `Arena.drop_backups` of the current device.
#[pyfunction]
#[pyo3(signature = (tags=None))]
fn drop_backups(py: Python<'_>, tags: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
    current(py)?.drop_backups(py, tags)
}
