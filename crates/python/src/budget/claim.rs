//! Claims: parts of a budget, and whether what is taken stays within them.

use std::ffi::CString;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill::budget::Watch;
use poorwill::{ByteSize, ClaimError, Device, DriverError};
use pyo3::prelude::*;

use crate::errors::{BudgetWarning, over_budget, refused};
use crate::process::Here;
use crate::sizes::size_of;

/// A part of a budget that belongs to whoever holds this, until it is released or no longer used.
///
/// In a `with` statement the memory in use is watched, and the end of the block returns the claim. What was taken
/// beyond the claim is a BudgetWarning where the rest of the budget covers it; otherwise it is a BudgetError, unless
/// the block has raised something itself.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Claim {
    /// Who claims.
    #[pyo3(get)]
    name: String,
    /// Locked only while Python's lock is not held: who has this lock may wait, though never for Python.
    state: Here<Mutex<State>>,
}

#[derive(Debug)]
enum State {
    Held(Held),
    Returned { figures: Figures, over: Option<Over> },
}

#[derive(Debug)]
struct Held {
    claim: Arc<poorwill::Claim>,
    device: Device,
    /// From the beginning of the `with` block on.
    watch: Option<Watch>,
}

#[derive(Debug, Clone, Copy)]
struct Figures {
    bytes: u64,
    peak_bytes: Option<u64>,
    over_bytes: u64,
}

/// More was taken than was claimed.
#[derive(Debug)]
struct Over {
    figures: Figures,
    /// Why it could not have been claimed.
    refused: Option<ClaimError>,
}

impl Claim {
    pub(super) fn new(claim: poorwill::Claim, device: Device) -> Self {
        let name = claim.name().to_string();
        let held = Held { claim: Arc::new(claim), device, watch: None };
        Self { name, state: Here::new(Mutex::new(State::Held(held))) }
    }

    /// Does something with the state while other Python threads go on.
    fn with<T: Send>(&self, py: Python<'_>, act: impl FnOnce(&mut State) -> T + Send) -> PyResult<T> {
        let state = self.state.get()?;
        Ok(py.detach(|| act(&mut locked(state))))
    }

    fn figures(&self, py: Python<'_>) -> PyResult<Figures> {
        self.with(py, |state| state.figures())
    }

    fn unusable(&self, what: &str) -> PyErr {
        over_budget(format!("the claim `{}` {what}", self.name))
    }
}

const RELEASED: &str = "has been returned to the budget; claim again";

#[pymethods]
impl Claim {
    /// How much is claimed; after the release, how much was.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.figures(py)?.bytes)
    }

    /// Most that was taken in `with` blocks. None where nobody has measured.
    #[getter]
    fn peak_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.figures(py)?.peak_bytes)
    }

    /// By how much that exceeds the claim.
    #[getter]
    fn over_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.figures(py)?.over_bytes)
    }

    /// Makes it another size: an int, in bytes, or a text like "1.53GiB".
    ///
    /// Raises BudgetError when less is unclaimed beside it; it stays as it was then.
    fn resize(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<()> {
        let bytes = size_of(size)?;
        match self.with(py, |state| state.held().map(|held| held.claim.resize(bytes)))? {
            Some(resized) => resized.map_err(over_budget),
            None => Err(self.unusable(RELEASED)),
        }
    }

    /// Returns it to the budget. Doing so again does nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, State::release)?.map_err(refused)
    }

    fn __enter__<'py>(slf: Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, Self>> {
        let claim = slf.get();
        let started = claim.with(py, |state| {
            let Some(held) = state.held() else { return Err(claim.unusable(RELEASED)) };
            if held.watch.is_some() {
                return Err(claim.unusable("is watched already; one `with` block at a time"));
            }
            let watch = Watch::start(&held.device, Arc::clone(&held.claim)).map_err(refused)?;
            held.watch = Some(watch);
            Ok(())
        });
        started??;
        Ok(slf)
    }

    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (_, _) = (exc_value, traceback);
        let left = self.leave(py);
        // What the block has raised says more than what can be said here.
        if exc_type.is_none() { left } else { Ok(()) }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let name = &self.name;
        let told = self.with(py, |state| (state.figures(), state.held().is_some()));
        let Ok((figures, is_held)) = told else {
            return format!("<poorwill.Claim {name} of another process>");
        };
        let peak = figures.peak_bytes.map(|bytes| format!(", at most {} taken", ByteSize(bytes)));
        let (peak, released) = (peak.unwrap_or_default(), if is_held { "" } else { ", released" });
        format!("<poorwill.Claim {name}: {}{peak}{released}>", ByteSize(figures.bytes))
    }
}

impl Claim {
    /// Ends a `with` block: the claim is returned, whatever there is to be said about it.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let (released, over) = self.with(py, |state| (state.release(), state.take_over()))?;
        released.map_err(refused)?;
        let Some(over) = over else { return Ok(()) };
        let said = over.describe(&self.name);
        if over.refused.is_some() {
            return Err(over_budget(said));
        }
        let category = py.get_type::<BudgetWarning>();
        // One frame up is the `with` statement.
        PyErr::warn(py, &category, &CString::new(said)?, 1)
    }
}

/// Nothing that is done under the lock leaves a state half changed, so a panic under it spoils nothing.
fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn held(&mut self) -> Option<&mut Held> {
        match self {
            Self::Held(held) => Some(held),
            Self::Returned { .. } => None,
        }
    }

    fn figures(&self) -> Figures {
        match self {
            Self::Held(held) => Figures::of(&held.claim),
            Self::Returned { figures, .. } => *figures,
        }
    }

    fn take_over(&mut self) -> Option<Over> {
        match self {
            Self::Held(_) => None,
            Self::Returned { over, .. } => over.take(),
        }
    }

    /// Stops watching and returns the claim. An error when the last look at the device failed; it is returned then,
    /// too.
    fn release(&mut self) -> Result<(), DriverError> {
        let Self::Held(held) = self else { return Ok(()) };
        let (claim, watch) = (Arc::clone(&held.claim), held.watch.take());
        let was_watched = watch.is_some();
        let looked = watch.map_or(Ok(()), |watch| watch.stop().map(drop));
        let figures = Figures::of(&claim);
        let over = (was_watched && figures.over_bytes > 0).then(|| Over::of(&claim, figures));
        drop(mem::replace(self, Self::Returned { figures, over }));
        looked
    }
}

impl Figures {
    fn of(claim: &poorwill::Claim) -> Self {
        Self { bytes: claim.bytes(), peak_bytes: claim.peak_bytes(), over_bytes: claim.over_bytes() }
    }
}

impl Over {
    fn of(claim: &poorwill::Claim, figures: Figures) -> Self {
        let refused = claim.resize(figures.peak_bytes.unwrap_or(figures.bytes)).err();
        Self { figures, refused }
    }

    /// What happened, and what to change.
    fn describe(&self, name: &str) -> String {
        let Figures { bytes, peak_bytes, over_bytes } = self.figures;
        let [claimed, over] = [bytes, over_bytes].map(ByteSize);
        let peak = ByteSize(peak_bytes.unwrap_or(bytes)).rounded_up();
        let happened = format!("`{name}` claimed {claimed} and took up to {peak}, {over} more");
        let Some(refused) = &self.refused else {
            return format!("{happened}, which the rest of the budget covers; claim {peak} for it");
        };
        let budget = ByteSize(refused.ground.budget_bytes);
        let fits = ByteSize(refused.fits_bytes).rounded_down();
        format!(
            "{happened}, and the budget of {budget} has {fits} for it; make it take less, or, for a claim of {peak}: {}",
            refused.remedy()
        )
    }
}
