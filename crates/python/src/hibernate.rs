//! Taking other processes off their GPUs and putting them back: `hibernate`, `resume` and `hibernation`.

use std::sync::{Arc, Mutex, PoisonError};

use poorwill::ByteSize;
use poorwill::hibernation::{
    HibernateError, HibernateRequest, Hibernator, HibernatorOptions, Obstacle, ProcessInspection,
    ProcessState, Recovery,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::errors::{invalid, not_hibernated, wrong_type};
use crate::process::ProcessOwned;
use crate::report::report;
use crate::request::timeout;
use crate::sizes::{size_of, whole_number};

const PIDS: &str = "pids are an int, or a sequence of them";

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HibernateReport>()?;
    module.add_class::<HibernatedProcess>()?;
    module.add_class::<ResumeReport>()?;
    module.add_class::<ResumedProcess>()?;
    module.add_class::<Hibernation>()?;
    module.add_class::<HeldMemory>()?;
    module.add_function(wrap_pyfunction!(hibernate, module)?)?;
    module.add_function(wrap_pyfunction!(resume, module)?)?;
    module.add_function(wrap_pyfunction!(hibernation, module)?)?;
    module.add_function(wrap_pyfunction!(process_state, module)?)
}

/// Takes another process off its GPUs: what it holds there goes to host memory, with context and graphs.
///
/// It runs on without GPUs until `resume`: calls that need one wait. Put its memory to sleep first, since what
/// sleeps does not pass through the host again. Several pids are one set: all of them go, or none.
///
/// `wait_max` is how long to wait for work that is queued, in seconds; by default 5. `host_bytes_max` is the
/// most host memory to take, in bytes or like "4GiB". Without figures of NVIDIA's driver nothing will say
/// whether there is space for the processes: refused, unless `without_space_check`. Raises HibernateError.
///
/// A process with communicators of NCCL is refused: it would be lost. `suspended_communicators` is how many of
/// them each process has suspended by `ncclCommSuspend`, with NCCL_CUMEM_HOST_ENABLE=0 since its start.
#[pyfunction]
#[pyo3(signature = (
    pid, *, wait_max=None, host_bytes_max=None, without_space_check=false, suspended_communicators=0
))]
fn hibernate(
    py: Python<'_>,
    pid: &Bound<'_, PyAny>,
    wait_max: Option<&Bound<'_, PyAny>>,
    host_bytes_max: Option<&Bound<'_, PyAny>>,
    without_space_check: bool,
    suspended_communicators: usize,
) -> PyResult<HibernateReport> {
    let pids = pids(pid)?;
    let request = match wait_max {
        None => HibernateRequest::default(),
        Some(seconds) => HibernateRequest::within(timeout(seconds)?),
    };
    let mut request = request
        .limited_to(host_bytes_max.map(size_of).transpose()?)
        .with_suspended_communicators(suspended_communicators);
    if without_space_check {
        request = request.without_space_check();
    }
    changed(py, |hibernator| hibernator.hibernate(&pids, &request)).map(HibernateReport::from)
}

/// Puts processes back on their GPUs. Those that hibernate together resume together.
///
/// Any process may do that, not only the one that called `hibernate`. Where nothing says that there is space
/// for them, it is refused, unless `without_space_check`: without space they are lost. Raises HibernateError.
#[pyfunction]
#[pyo3(signature = (pid, *, without_space_check=false))]
fn resume(py: Python<'_>, pid: &Bound<'_, PyAny>, without_space_check: bool) -> PyResult<ResumeReport> {
    let pids = pids(pid)?;
    let resumed = changed(py, |hibernator| match without_space_check {
        true => hibernator.resume_without_space_check(&pids),
        false => hibernator.resume(&pids),
    });
    resumed.map(ResumeReport::from)
}

/// Where another process stands, what it holds on its GPUs, and what would make `hibernate` fail.
///
/// Changes nothing. Raises HibernateError.
#[pyfunction]
fn hibernation(py: Python<'_>, pid: &Bound<'_, PyAny>) -> PyResult<Hibernation> {
    let pid = one(pid)?;
    opened(py, |hibernator| hibernator.inspect(pid)).map(Hibernation::from)
}

/// The state in `hibernation` alone, which is one call of the driver.
#[pyfunction]
fn process_state(py: Python<'_>, pid: &Bound<'_, PyAny>) -> PyResult<&'static str> {
    let pid = one(pid)?;
    opened(py, |hibernator| hibernator.state(pid)).map(ProcessState::as_str)
}

fn pids(given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if whole_number(given)?.is_some() {
        return Ok(vec![one(given)?]);
    }
    if given.is_instance_of::<PyString>() || given.is_instance_of::<PyBytes>() {
        return Err(wrong_type(PIDS, given));
    }
    let Ok(several) = given.try_iter() else { return Err(wrong_type(PIDS, given)) };
    several.map(|pid| one(&pid?)).collect()
}

fn one(given: &Bound<'_, PyAny>) -> PyResult<u32> {
    let Some(number) = whole_number(given)? else { return Err(wrong_type("a pid is an int", given)) };
    // As the system's, which is signed.
    let number = number.ok().and_then(|number| i32::try_from(number).ok()).filter(|number| *number > 0);
    match number {
        Some(pid) => Ok(pid.unsigned_abs()),
        None => Err(invalid(format!("`{}` is no pid: it is a number from 1 to {}", given.str()?, i32::MAX))),
    }
}

/// Changes processes, after what others have left that have ended.
fn changed<T: Send>(
    py: Python<'_>,
    change: impl FnOnce(&Hibernator) -> Result<T, HibernateError> + Send,
) -> PyResult<T> {
    let (left, done) = opened(py, |hibernator| {
        let left = hibernator.recover()?;
        Ok((left, change(hibernator)))
    })?;
    for process in left.iter().filter(|process| process.what != Recovery::Hibernating) {
        let log = py.import("logging")?.call_method1("getLogger", ("poorwill",))?;
        log.call_method1("warning", ("%s", process.to_string()))?;
    }
    done.map_err(|error| not_hibernated(py, &error))
}

/// Calls without Python's lock.
fn opened<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&Hibernator) -> Result<T, HibernateError> + Send,
) -> PyResult<T> {
    let kept = this_process();
    let done = py.detach(|| {
        let hibernator = match kept {
            Some(kept) => kept,
            None => Arc::new(Hibernator::open(&HibernatorOptions::default())?),
        };
        Ok((call(&hibernator), hibernator))
    });
    let (result, hibernator) = done.map_err(|error| not_hibernated(py, &error))?;
    keep(hibernator);
    result.map_err(|error| not_hibernated(py, &error))
}

// It is locked only with Python's lock, so that a fork finds it free.
static OPENED: Mutex<Option<ProcessOwned<Arc<Hibernator>>>> = Mutex::new(None);

fn this_process() -> Option<Arc<Hibernator>> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.as_ref().filter(|opened| opened.is_here()).map(|opened| Arc::clone(opened))
}

fn keep(hibernator: Arc<Hibernator>) {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if !opened.as_ref().is_some_and(ProcessOwned::is_here) {
        *opened = Some(ProcessOwned::new(hibernator));
    }
}

report! {
    /// What `hibernate` did.
    HibernateReport of poorwill::hibernation::HibernateReport, shown by |it| {
        let host = it.host_bytes.map_or_else(|| "unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
        format!("of {}: {host} of host memory, {:.1} ms", processes(it.processes.len()), it.total_ms)
    };
    /// Its processes, in the order of the call.
    processes: Vec<HibernatedProcess> = |it| it.processes.iter().cloned().map(HibernatedProcess::from).collect();
    /// Host memory that it takes; None where the driver keeps no figure.
    host_bytes: Option<u64> = |it| it.host_bytes;
    /// Whole duration.
    total_ms: f64 = |it| it.total_ms;
}

report! {
    /// A process that hibernates.
    HibernatedProcess of poorwill::hibernation::HibernatedProcess, shown by |it| {
        format!("{}: locked in {:.1} ms, checkpointed in {:.1} ms", it.pid, it.lock_ms, it.checkpoint_ms)
    };
    pid: u32 = |it| it.pid;
    /// Released on its GPUs; None where the driver keeps no figure.
    released_bytes: Option<u64> = |it| it.released_bytes;
    /// Until its queued work was done.
    lock_ms: f64 = |it| it.lock_ms;
    /// Until it held nothing on its GPUs.
    checkpoint_ms: f64 = |it| it.checkpoint_ms;
}

report! {
    /// What `resume` did.
    ResumeReport of poorwill::hibernation::ResumeReport, shown by |it| {
        format!("of {}: {:.1} ms", processes(it.processes.len()), it.total_ms)
    };
    /// Its processes, in the order of the call.
    processes: Vec<ResumedProcess> = |it| it.processes.iter().cloned().map(ResumedProcess::from).collect();
    /// Whole duration.
    total_ms: f64 = |it| it.total_ms;
}

report! {
    /// A process that is back on its GPUs.
    ResumedProcess of poorwill::hibernation::ResumedProcess, shown by |it| {
        format!("{}: restored in {:.1} ms, unlocked in {:.1} ms", it.pid, it.restore_ms, it.unlock_ms)
    };
    pid: u32 = |it| it.pid;
    /// Until its memory was on its GPUs again.
    restore_ms: f64 = |it| it.restore_ms;
    /// Until its calls went on.
    unlock_ms: f64 = |it| it.unlock_ms;
}

report! {
    /// Where a process stands, and what `hibernate` would take.
    Hibernation of ProcessInspection, shown by |it| {
        let obstacles = if it.obstacles.is_empty() { String::new() } else { format!(", {} obstacles", it.obstacles.len()) };
        let host = it.host_bytes().map_or_else(|| "unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
        format!("{}: {host} on its GPUs{obstacles}", it.state)
    };
    /// Where it stands; "failed" has lost the GPU.
    state: String = |it| it.state.as_str().to_owned();
    /// What it holds on each GPU.
    held: Vec<HeldMemory> = |it| it.held.iter().cloned().map(HeldMemory::from).collect();
    /// Host memory that `hibernate` would take; None where the driver keeps no figure.
    host_bytes: Option<u64> = |it| it.host_bytes();
    /// What would make `hibernate` fail, as in its error.
    obstacles: Vec<String> = |it| it.obstacles.iter().map(Obstacle::to_string).collect();
}

report! {
    /// Memory of a process on one GPU.
    HeldMemory of poorwill::hibernation::HeldMemory, shown by |it| {
        let used = it.used_bytes.map_or_else(|| "unknown".to_owned(), |bytes| ByteSize(bytes).to_string());
        format!("{}: {used}", it.uuid)
    };
    /// The GPU's UUID, without prefix.
    uuid: String = |it| it.uuid.clone();
    /// None where the driver keeps no figure.
    used_bytes: Option<u64> = |it| it.used_bytes;
}

fn processes(number: usize) -> String {
    if number == 1 { "1 process".to_owned() } else { format!("{number} processes") }
}
