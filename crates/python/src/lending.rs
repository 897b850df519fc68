//! Lending: the broker that an arena lends through, what is said of one that refuses, and freeing what others lend.

use std::env;
use std::ffi::{CString, OsString};
use std::path::PathBuf;

use poorwill::lend::Lending;
use poorwill::{Device, DeviceOptions, Peers};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::{invalid, not_opened, refused, wrong_type};
use crate::registry::Entry;
use crate::sizes::size_of;
use crate::{device, request};

/// Environment variable with the path of the broker's socket.
const SOCKET: &str = "POORWILL_BROKER";

const UNDERSTOOD: &str = "lend is True, False, or the path of a broker's socket";

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(free_lent, module)?)
}

/// What the argument `lend` asks for an arena of this name.
pub(crate) fn asked(lend: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Lending>> {
    let socket = match lend.cast::<PyBool>() {
        Ok(lends) if !lends.is_true() => return Ok(None),
        Ok(_) => None,
        Err(_) => Some(lend.extract::<PathBuf>().map_err(|_| wrong_type(UNDERSTOOD, lend))?),
    };
    if socket.as_ref().is_some_and(|socket| socket.as_os_str().is_empty()) {
        return Err(invalid(format!("an empty text is no path; {UNDERSTOOD}")));
    }
    let lending = at(socket).named(name);
    let executable = lend.py().import("sys")?.getattr("executable")?;
    // Where Python is embedded there may be none. Then a broker has to run already.
    let Ok(executable) = executable.extract::<PathBuf>() else { return Ok(Some(lending)) };
    let words = ["-m", "poorwill", "broker", "--socket"].map(OsString::from);
    let mut command = vec![executable.into_os_string()];
    command.extend(words);
    command.push(lending.path().into_os_string());
    Ok(Some(lending.starting(command)))
}

/// Without a path it is the environment's, or the usual one.
pub(crate) fn at(socket: Option<PathBuf>) -> Lending {
    let named = || env::var_os(SOCKET).filter(|socket| !socket.is_empty()).map(PathBuf::from);
    socket.or_else(named).map_or_else(Lending::default, |socket| Lending::default().at(socket))
}

/// Whether a sleep of an arena lends, where its caller says so, or else as the arena was opened.
pub(crate) fn lends(entry: &Entry, lend: Option<bool>) -> PyResult<bool> {
    match lend {
        Some(true) if entry.lending().is_none() => Err(refused(format!(
            "the arena `{}` on {} was opened without `lend`, so its memory cannot be lent: open it with \
             poorwill.arena(..., lend=True)",
            entry.name(),
            entry.device()
        ))),
        Some(lends) => Ok(lends),
        None => Ok(entry.lending().is_some()),
    }
}

/// Warns of a broker that refuses, once for an arena: its sleeps release memory as they would without it.
pub(crate) fn warn_of_refusal(py: Python<'_>, entry: &Entry, why: Option<&str>) -> PyResult<()> {
    let Some(why) = why.filter(|_| entry.is_first_refusal()) else { return Ok(()) };
    let message = format!(
        "the arena `{}` on {} released what it was to lend, and does so while this lasts: {why}",
        entry.name(),
        entry.device()
    );
    // C's texts end at a NUL.
    let message = CString::new(message.replace('\0', " "))?;
    let warned = PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1);
    // Where warnings are errors: the sleep is done, and its report must not be lost.
    if let Err(error) = warned {
        error.write_unraisable(py, None);
    }
    Ok(())
}

/// Has what processes lend on a device given up, for a program that goes by free memory; returns the bytes.
///
/// They are `size`, an int or a text like "1GiB", or a little more; without it all. `socket` is the path of the
/// broker's socket, by default POORWILL_BROKER's or the usual one. Without a broker it is 0. Owners that have
/// to make backups first get `timeout` seconds.
///
/// Raises PoorwillError for a broker that does not answer, and for a device that cannot be opened.
#[pyfunction]
#[pyo3(signature = (device=None, size=None, *, socket=None, timeout=None))]
fn free_lent(
    py: Python<'_>,
    device: Option<&Bound<'_, PyAny>>,
    size: Option<&Bound<'_, PyAny>>,
    socket: Option<PathBuf>,
    timeout: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let spec = device::named(device, py)?;
    let bytes = size.map_or(Ok(u64::MAX), size_of)?;
    let wait_max = timeout.map(request::timeout).transpose()?.unwrap_or_default();
    let lending = at(socket);
    let failed = |error| refused(poorwill::chain(&error));
    // A device need not be opened where nothing is lent.
    let status = py.detach(|| lending.status()).map_err(failed)?;
    if status.is_none_or(|status| status.lenders.is_empty()) {
        return Ok(0);
    }
    let options = DeviceOptions::default().open_to(Peers::None);
    let name = || Ok(Device::open_with(&spec, options)?.driver().info().memory_name.clone());
    let Some(name) = py.detach(name).map_err(|error| not_opened(&error))? else { return Ok(0) };
    py.detach(|| lending.free(&name, bytes, Vec::new(), wait_max)).map_err(failed)
}
