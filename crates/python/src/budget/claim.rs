//! `Claim`: a part of a budget, and whether usage stays within it.

use std::ffi::CString;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use poorwill::budget::Watch;
use poorwill::{ByteSize, ClaimError, Device, DriverError};
use pyo3::prelude::*;

use crate::errors::{BudgetWarning, over_budget, refused};
use crate::process::ProcessLocal;
use crate::sizes::size_of;

/// A part of a budget, reserved until it is released or this object is dropped.
///
/// A `with` block measures usage and releases the claim at its end. Usage above the claim is a BudgetWarning
/// where the rest of the budget covers it, otherwise a BudgetError. An exception of the block takes
/// precedence.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Claim {
    /// Name of the claim.
    #[pyo3(get)]
    name: String,
    /// Locked only without Python's lock, so that its holder may wait, but never for Python.
    state: ProcessLocal<Mutex<ClaimState>>,
}

#[derive(Debug)]
enum ClaimState {
    Active(ActiveClaim),
    Released { figures: Usage, over: Option<Overuse> },
}

#[derive(Debug)]
struct ActiveClaim {
    claim: Arc<poorwill::Claim>,
    device: Device,
    watch: Option<Watch>,
}

#[derive(Debug, Clone, Copy)]
struct Usage {
    bytes: u64,
    peak_bytes: Option<u64>,
    over_bytes: u64,
}

/// Usage above the claim.
#[derive(Debug)]
struct Overuse {
    figures: Usage,
    /// Why the excess could not have been claimed.
    refused: Option<ClaimError>,
}

impl Claim {
    pub(super) fn new(claim: poorwill::Claim, device: Device) -> Self {
        let name = claim.name().to_string();
        let held = ActiveClaim { claim: Arc::new(claim), device, watch: None };
        Self { name, state: ProcessLocal::new(Mutex::new(ClaimState::Active(held))) }
    }

    fn with<T: Send>(&self, py: Python<'_>, act: impl FnOnce(&mut ClaimState) -> T + Send) -> PyResult<T> {
        let state = self.state.get()?;
        Ok(py.detach(|| act(&mut locked(state))))
    }

    fn figures(&self, py: Python<'_>) -> PyResult<Usage> {
        self.with(py, |state| state.figures())
    }

    fn unusable(&self, what: &str) -> PyErr {
        over_budget(format!("the claim `{}` {what}", self.name))
    }
}

const RELEASED: &str = "has been returned to the budget; claim again";

#[pymethods]
impl Claim {
    /// Claimed size; the last one after the release.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.figures(py)?.bytes)
    }

    /// Measured peak in `with` blocks; None if not measured.
    #[getter]
    fn peak_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(self.figures(py)?.peak_bytes)
    }

    /// By how much the peak exceeds the claim.
    #[getter]
    fn over_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.figures(py)?.over_bytes)
    }

    /// Changes the size: bytes as an int, or a text like "1.53GiB".
    ///
    /// Raises BudgetError, with nothing changed, when less is unclaimed.
    fn resize(&self, py: Python<'_>, size: &Bound<'_, PyAny>) -> PyResult<()> {
        let bytes = size_of(size)?;
        match self.with(py, |state| state.held().map(|held| held.claim.resize(bytes)))? {
            Some(resized) => resized.map_err(over_budget),
            None => Err(self.unusable(RELEASED)),
        }
    }

    /// Returns the claim to the budget. Repeating it does nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, ClaimState::release)?.map_err(refused)
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
        // An exception of the block matters more.
        if exc_type.is_none() { left } else { Ok(()) }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let name = &self.name;
        let snapshot = self.with(py, |state| (state.figures(), state.held().is_some()));
        let Ok((figures, is_held)) = snapshot else {
            return format!("<poorwill.Claim {name} of another process>");
        };
        let peak = figures.peak_bytes.map(|bytes| format!(", at most {} taken", ByteSize(bytes)));
        let (peak, released) = (peak.unwrap_or_default(), if is_held { "" } else { ", released" });
        format!("<poorwill.Claim {name}: {}{peak}{released}>", ByteSize(figures.bytes))
    }
}

impl Claim {
    /// Ends a `with` block and returns the claim in every case.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let (released, over) = self.with(py, |state| (state.release(), state.take_over()))?;
        released.map_err(refused)?;
        let Some(over) = over else { return Ok(()) };
        let message = over.describe(&self.name);
        if over.refused.is_some() {
            return Err(over_budget(message));
        }
        let category = py.get_type::<BudgetWarning>();
        // One frame up is the `with` statement.
        PyErr::warn(py, &category, &CString::new(message)?, 1)
    }
}

/// A panic leaves nothing half changed under this lock.
fn locked(state: &Mutex<ClaimState>) -> MutexGuard<'_, ClaimState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClaimState {
    fn held(&mut self) -> Option<&mut ActiveClaim> {
        match self {
            Self::Active(held) => Some(held),
            Self::Released { .. } => None,
        }
    }

    fn figures(&self) -> Usage {
        match self {
            Self::Active(held) => Usage::of(&held.claim),
            Self::Released { figures, .. } => *figures,
        }
    }

    fn take_over(&mut self) -> Option<Overuse> {
        match self {
            Self::Active(_) => None,
            Self::Released { over, .. } => over.take(),
        }
    }

    /// Stops measuring and returns the claim, also where the last measurement failed.
    fn release(&mut self) -> Result<(), DriverError> {
        let Self::Active(held) = self else { return Ok(()) };
        let (claim, watch) = (Arc::clone(&held.claim), held.watch.take());
        let was_watched = watch.is_some();
        let measured = watch.map_or(Ok(()), |watch| watch.stop().map(drop));
        let figures = Usage::of(&claim);
        let over = (was_watched && figures.over_bytes > 0).then(|| Overuse::of(&claim, figures));
        drop(mem::replace(self, Self::Released { figures, over }));
        measured
    }
}

impl Usage {
    fn of(claim: &poorwill::Claim) -> Self {
        Self { bytes: claim.bytes(), peak_bytes: claim.peak_bytes(), over_bytes: claim.over_bytes() }
    }
}

impl Overuse {
    fn of(claim: &poorwill::Claim, figures: Usage) -> Self {
        let refused = claim.resize(figures.peak_bytes.unwrap_or(figures.bytes)).err();
        Self { figures, refused }
    }

    fn describe(&self, name: &str) -> String {
        let Usage { bytes, peak_bytes, over_bytes } = self.figures;
        let [claimed, over] = [bytes, over_bytes].map(ByteSize);
        let peak = ByteSize(peak_bytes.unwrap_or(bytes)).rounded_up();
        let happened = format!("`{name}` claimed {claimed} and took up to {peak}, {over} more");
        let Some(refused) = &self.refused else {
            return format!("{happened}, which the rest of the budget covers; claim {peak} for it");
        };
        let budget = ByteSize(refused.basis.budget_bytes);
        let fits = ByteSize(refused.fits_bytes).rounded_down();
        format!(
            "{happened}, and the budget of {budget} has {fits} for it; make it take less, or, for a claim of {peak}: {}",
            refused.remedy()
        )
    }
}
