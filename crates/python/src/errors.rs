//! The library's errors as Python exceptions, with their figures. The messages are the library's.

use std::collections::BTreeMap;
use std::fmt::Display;

use poorwill::hibernation::{HibernateError, ProcessState};
use poorwill::pool::BackupProblem;
use poorwill::{OpenError, PoolError, chain};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::exceptions::{BudgetError, ClosedError, PoorwillError, TagError, UndoneError, WakeError};
pub(crate) use crate::exceptions::{BudgetWarning, closed, invalid, over_budget, refused, wrong_type};
use crate::report::SleepReport;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("PoorwillError", py.get_type::<PoorwillError>())?;
    module.add("BudgetError", py.get_type::<BudgetError>())?;
    module.add("ClosedError", py.get_type::<ClosedError>())?;
    module.add("TagError", py.get_type::<TagError>())?;
    module.add("WakeError", py.get_type::<WakeError>())?;
    module.add("UndoneError", py.get_type::<UndoneError>())?;
    module.add("SleepError", sleep_error(py)?)?;
    module.add("HibernateError", hibernate_error(py)?)?;
    module.add("OutOfMemoryError", out_of_memory_error(py)?)?;
    module.add("BudgetWarning", py.get_type::<BudgetWarning>())
}

fn sleep_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    const ABOUT: &str =
        "A sleep or its preparation failed; the message says in which state that leaves the tags.";
    const ATTRIBUTES: Attributes =
        &[("report", "Set where the tags sleep, but part of their memory could not be released.")];
    class(py, &CLASS, ("SleepError", ABOUT), ATTRIBUTES, &[py.get_type::<PoorwillError>()])
}

fn hibernate_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    const ABOUT: &str = "Processes could not be taken off their GPUs, or put back.";
    const ATTRIBUTES: Attributes = &[
        ("kind", "Name of the reason."),
        ("pid", "The process that failed, if it is one."),
        (
            "left",
            "State of each process that does not run as before, by pid; empty where nothing was changed.",
        ),
    ];
    class(py, &CLASS, ("HibernateError", ABOUT), ATTRIBUTES, &[py.get_type::<PoorwillError>()])
}

/// An attribute of `HibernateError`.
#[derive(IntoPyObject)]
enum Detail {
    Kind(&'static str),
    Pid(Option<u32>),
    Left(BTreeMap<u32, Option<&'static str>>),
}

pub(crate) fn not_hibernated(py: Python<'_>, error: &HibernateError) -> PyErr {
    let left = error.left().iter().map(|left| (left.pid, left.state.map(ProcessState::as_str)));
    let details = [
        ("kind", Detail::Kind(error.code())),
        ("pid", Detail::Pid(error.pid())),
        ("left", Detail::Left(left.collect())),
    ];
    raised(hibernate_error(py), chain(error), details)
}

/// Of an exception: names, and what they are.
type Attributes = &'static [(&'static str, &'static str)];

/// Of `OutOfMemoryError`; unknown ones are None.
const FIGURES: Attributes = &[
    ("needed_bytes", "Needed beyond what could be reclaimed."),
    ("limit_bytes", "Most that the arena may map."),
    ("live_bytes", "In use by live blocks."),
    ("mapped_bytes", "Device memory held."),
    ("reclaimable_bytes", "Held, and in use by no block."),
    ("device_free_bytes", "Free on the device, where that was full."),
];

fn figures(known: impl IntoIterator<Item = u64>) -> impl Iterator<Item = (&'static str, u64)> {
    FIGURES.iter().map(|(name, _)| *name).zip(known)
}

fn out_of_memory_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    const ABOUT: &str =
        "More memory than the arena's limit allows, or than the device has. Unknown figures are None.";
    let bases = [py.get_type::<PoorwillError>(), py.get_type::<PyMemoryError>()];
    class(py, &CLASS, ("OutOfMemoryError", ABOUT), FIGURES, &bases)
}

/// Creates an exception class, once, with attributes that default to None.
fn class<'py>(
    py: Python<'py>,
    kept: &'static PyOnceLock<Py<PyType>>,
    (name, about): (&str, &str),
    attributes: Attributes,
    bases: &[Bound<'py, PyType>],
) -> PyResult<&'py Bound<'py, PyType>> {
    let made = kept.get_or_try_init(py, || {
        let members = PyDict::new(py);
        members.set_item("__module__", "poorwill")?;
        let described = attributes.iter().map(|(attribute, about)| format!("\n- `{attribute}`: {about}"));
        members.set_item("__doc__", format!("{about}\n{}", described.collect::<String>()))?;
        attributes.iter().try_for_each(|(attribute, _)| members.set_item(attribute, py.None()))?;
        let bases = PyTuple::new(py, bases)?;
        let made = py.get_type::<PyType>().call1((name, bases, members))?;
        Ok::<_, PyErr>(made.cast_into::<PyType>()?.unbind())
    })?;
    Ok(made.bind(py))
}

fn raised<T>(
    class: PyResult<&Bound<'_, PyType>>,
    words: impl Display,
    attributes: impl IntoIterator<Item = (&'static str, T)>,
) -> PyErr
where
    T: for<'py> IntoPyObject<'py>,
{
    let made = class.and_then(|class| class.call1((words.to_string(),))).and_then(|error| {
        attributes.into_iter().try_for_each(|(name, value)| error.setattr(name, value))?;
        Ok(error)
    });
    made.map_or_else(|error| error, PyErr::from_value)
}

pub(crate) fn failed(py: Python<'_>, error: &PoolError) -> PyErr {
    let words = chain(error);
    match error {
        PoolError::OverLimit { needed_bytes, usage, .. }
        | PoolError::HeldByCapture { needed_bytes, usage, .. }
        | PoolError::TimedOut { needed_bytes: needed_bytes @ 1.., usage, .. } => {
            let poorwill::pool::Usage { limit_bytes, live_bytes, mapped_bytes, reclaimable_bytes, .. } =
                *usage;
            let known = [*needed_bytes, limit_bytes, live_bytes, mapped_bytes, reclaimable_bytes];
            raised(out_of_memory_error(py), words, figures(known))
        }
        PoolError::DeviceFull { shortage, usage, .. } => {
            let poorwill::pool::Usage { limit_bytes, live_bytes, mapped_bytes, reclaimable_bytes, .. } =
                *usage;
            let known = [
                shortage.needed_bytes,
                limit_bytes,
                live_bytes,
                mapped_bytes,
                reclaimable_bytes,
                shortage.free_bytes,
            ];
            raised(out_of_memory_error(py), words, figures(known))
        }
        PoolError::Shortfall { report, .. } => {
            let report = SleepReport::from(report.as_ref().clone());
            raised(sleep_error(py), words, [("report", report)])
        }
        PoolError::SleepConflict { .. }
        | PoolError::SleepFailed { .. }
        | PoolError::Stranded { .. }
        | PoolError::ImmutableChanged { .. }
        | PoolError::Capturing { .. }
        | PoolError::PrepareFailed { .. } => raised::<()>(sleep_error(py), words, []),
        PoolError::WakeFailed { .. } | PoolError::Corrupt { .. } => WakeError::new_err(words),
        PoolError::Undone { .. } => UndoneError::new_err(words),
        PoolError::Backup { problem: BackupProblem::Spoiled, .. } => PoorwillError::new_err(words),
        PoolError::Backup { .. }
        | PoolError::UnknownTag { .. }
        | PoolError::Asleep { .. }
        | PoolError::Undefined { .. }
        | PoolError::Held { .. }
        | PoolError::Lost { .. }
        | PoolError::PolicyConflict { .. } => TagError::new_err(words),
        PoolError::Closed | PoolError::StaleBlock { .. } => ClosedError::new_err(words),
        PoolError::InvalidRequest { .. }
        | PoolError::InvalidRange { .. }
        | PoolError::OutsideBlocks { .. }
        | PoolError::UnknownStream { .. } => PyValueError::new_err(words),
        _ => PoorwillError::new_err(words),
    }
}

pub(crate) fn out_of_host_memory(py: Python<'_>, error: impl Display, needed_bytes: u64) -> PyErr {
    raised(out_of_memory_error(py), error, figures([needed_bytes]))
}

pub(crate) fn not_opened(error: &OpenError) -> PyErr {
    match error {
        OpenError::Budget(_) | OpenError::Claim(_) | OpenError::Pool(PoolError::InvalidConfig { .. }) => {
            over_budget(chain(error))
        }
        _ => refused(chain(error)),
    }
}
