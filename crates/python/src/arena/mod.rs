//! Arenas: memory of a device that can be put to sleep and woken.

mod registry;

use std::sync::Arc;

use poorwill::{DeviceSpec, HostMemoryUse, Tag};
use pyo3::prelude::*;
use pyo3::types::PyString;

pub(crate) use self::registry::Opened;
use self::registry::{Entry, Wanted};
use crate::budget::cap;
use crate::device;
use crate::errors::{invalid, refused};
use crate::process::Here;
use crate::sizes::size_of;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Arena>()?;
    module.add_function(wrap_pyfunction!(arena, module)?)
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
/// `host_limit` bounds the host memory that the device may hold for backups, and `pageable` leaves it unlocked. They
/// are the device's, and so those of its first arena.
///
/// Raises BudgetError for a limit that does not fit or where nobody tells how much memory there is, and PoorwillError
/// where the device cannot be opened, or is open in another way.
#[pyfunction]
#[pyo3(signature = (device=None, name="default", *, limit=None, host_limit=None, pageable=false))]
fn arena(
    py: Python<'_>,
    device: Option<&Bound<'_, PyAny>>,
    name: &str,
    limit: Option<&Bound<'_, PyAny>>,
    host_limit: Option<&Bound<'_, PyAny>>,
    pageable: bool,
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
    let host_memory = HostMemoryUse { limit_bytes, pageable };
    let wanted = Wanted { device: spec, any_size, name: name.to_owned(), limit, host_memory };
    registry::open(py, &wanted).map(Arena::new)
}

/// The arena without a name of a device, opened if need be.
#[allow(dead_code)] // For pools of PyTorch's.
pub(crate) fn default_of(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Arc<Opened>> {
    arena(py, device, DEFAULT, None, None, false)?.opened()
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

    /// Gives everything back and ends it. Closing again does nothing.
    ///
    /// What still lives in it loses its bytes and its memory at once; the addresses stay reserved, so that nothing
    /// else comes to lie there, until the last has let go.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let entry = self.entry.get()?;
        py.detach(|| entry.close()).map_err(refused)
    }

    fn __eq__(&self, other: &Self) -> bool {
        matches!((self.entry.get(), other.entry.get()), (Ok(one), Ok(other)) if Arc::ptr_eq(one, other))
    }

    fn __hash__(&self) -> isize {
        self.entry.get().map_or(0, |entry| Arc::as_ptr(entry).addr().cast_signed())
    }
}
