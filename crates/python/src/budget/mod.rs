//! Budgets: how much of a device may be used, and who has claimed how much of it.

pub(crate) mod cap;
mod claim;

use poorwill::budget::{Envelope, claim_in_use};
use poorwill::{ByteSize, Device, OpenError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use self::claim::Claim;
use crate::device;
use crate::errors::{invalid, not_opened, over_budget, refused};
use crate::process::Here;
use crate::sizes::size_of;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Budget>()?;
    module.add_class::<Source>()?;
    module.add_class::<Claimed>()?;
    module.add_class::<Claim>()?;
    module.add_function(wrap_pyfunction!(budget, module)?)
}

/// How much memory of a device this process may use: everyone who can be asked about it is asked.
///
/// `device` is None or "cuda" for the current GPU (PyTorch's, if PyTorch is in use already, otherwise the first), the
/// number of one, a text like "cuda:1", "host" or "host:8GiB", or a torch.device.
///
/// `cap` is what the user allows at most: bytes as an int or a text like "20GiB" or "22528m"; a share of what there
/// is, as a float, or a text like "0.92" or "92%"; or one for each device, as a mapping or a text like
/// "cuda:0=20GiB,cuda:1=0.92".
///
/// What is in use already is claimed as `in_use`. Raises BudgetError where nobody tells how much memory there is, and
/// PoorwillError where the device cannot be opened.
#[pyfunction]
#[pyo3(signature = (device=None, cap=None))]
fn budget(
    py: Python<'_>,
    device: Option<&Bound<'_, PyAny>>,
    cap: Option<&Bound<'_, PyAny>>,
) -> PyResult<Budget> {
    let spec = device::named(device, py)?;
    let cap = cap.map(|cap| cap::of(cap, &spec)).transpose()?.flatten();
    let opened = py.detach(|| {
        let device = Device::open(&spec)?;
        let (budget, envelope) = device.envelope(cap)?;
        let in_use = claim_in_use(&budget, &envelope);
        Ok((budget, Opened { envelope, _in_use: in_use, device }))
    });
    let (decided, opened) = opened.map_err(|error: OpenError| not_opened(&error))?;
    Ok(Budget { device: spec.to_string(), decided, opened: Here::new(opened) })
}

/// How much memory of a device this process may use, who says so, and who has claimed how much of it.
///
/// Figures other than the unclaimed one are as they were decided when it was opened.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Budget {
    /// The device, by name.
    #[pyo3(get)]
    device: String,
    decided: poorwill::Budget,
    opened: Here<Opened>,
}

#[derive(Debug)]
struct Opened {
    envelope: Envelope,
    /// Keeps what cannot be had from being handed out.
    _in_use: Option<poorwill::Claim>,
    device: Device,
}

impl Budget {
    /// The budget of something that is open, which stays in that one's hands.
    pub(crate) fn shared(device: Device, decided: poorwill::Budget, envelope: Envelope) -> Self {
        let name = device.spec().to_string();
        Self { device: name, decided, opened: Here::new(Opened { envelope, _in_use: None, device }) }
    }
}

#[pymethods]
impl Budget {
    /// Everyone who was asked, with their figures as given.
    #[getter]
    fn sources(&self) -> Vec<Source> {
        self.decided.sources.iter().map(Source::from).collect()
    }

    /// Whose figure the budget is.
    #[getter]
    fn winner(&self) -> Option<&'static str> {
        self.decided.winner.map(poorwill::budget::SourceName::as_str)
    }

    /// The smallest plausible total, before the user's cap.
    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.decided.total_bytes
    }

    /// What this process may use.
    #[getter]
    fn budget_bytes(&self) -> Option<u64> {
        self.decided.budget_bytes
    }

    /// What it could have on top of what it had. None where nobody tells what is free.
    #[getter]
    fn headroom_bytes(&self) -> Option<u64> {
        self.decided.headroom_bytes
    }

    /// What it had in use, its context included. None where that is not known.
    #[getter]
    fn process_used_bytes(&self) -> Option<u64> {
        self.decided.process_used_bytes
    }

    /// What nobody has claimed, now.
    #[getter]
    fn unclaimed_bytes(&self) -> PyResult<u64> {
        Ok(self.opened.get()?.envelope.unclaimed_bytes())
    }

    /// The claims there are now, in the order in which they were made.
    fn claims(&self) -> PyResult<Vec<Claimed>> {
        let claims = self.opened.get()?.envelope.claims();
        Ok(claims.into_iter().map(Claimed::from).collect())
    }

    /// Claims memory by name before it is taken; `size` is an int, in bytes, or a text like "1.53GiB".
    ///
    /// Several claims may have one name. Raises BudgetError when less is unclaimed; nothing has changed then.
    fn claim(&self, name: &str, size: &Bound<'_, PyAny>) -> PyResult<Claim> {
        let Opened { envelope, device, .. } = self.opened.get()?;
        let (name, bytes) = (name.parse().map_err(invalid)?, size_of(size)?);
        let claim = envelope.claim(name, bytes).map_err(over_budget)?;
        Ok(Claim::new(claim, device.clone()))
    }

    /// The decision as plain values: what the command line prints as JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let json = serde_json::to_string(&self.decided).map_err(refused)?;
        Ok(py.import("json")?.call_method1("loads", (json,))?.cast_into()?)
    }

    fn __repr__(&self) -> String {
        let size = |bytes: Option<u64>| match bytes {
            Some(bytes) => ByteSize(bytes).to_string(),
            None => "an unknown total".to_owned(),
        };
        let (budget, total) = (size(self.decided.budget_bytes), size(self.decided.total_bytes));
        let unclaimed = match self.opened.get() {
            Ok(opened) => format!("{} unclaimed", ByteSize(opened.envelope.unclaimed_bytes())),
            Err(_) => "of another process".to_owned(),
        };
        let winner = self.winner().unwrap_or("nobody");
        format!("<poorwill.Budget {}: {budget} of {total}, from {winner}; {unclaimed}>", self.device)
    }
}

/// Who was asked about a device's memory, and what came of it.
#[pyclass(frozen, eq, hash, get_all, module = "poorwill")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    /// Who.
    name: String,
    /// The figure as it was given; None where there was none.
    bytes: Option<u64>,
    /// Why there is none, or what is odd about it.
    note: Option<String>,
}

#[pymethods]
impl Source {
    fn __repr__(&self) -> String {
        let figure = self.bytes.map(|bytes| ByteSize(bytes).to_string());
        let parts = [figure.as_deref(), self.note.as_deref()].into_iter().flatten();
        format!("<poorwill.Source {}: {}>", self.name, parts.collect::<Vec<_>>().join("; "))
    }
}

impl From<&poorwill::budget::Source> for Source {
    fn from(source: &poorwill::budget::Source) -> Self {
        Self { name: source.name.to_string(), bytes: source.bytes, note: source.note.clone() }
    }
}

/// An entry in the book of a budget.
#[pyclass(frozen, eq, hash, get_all, module = "poorwill")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Claimed {
    /// Who claims.
    name: String,
    /// How much.
    bytes: u64,
    /// Most that was measured for it; None where nobody has measured.
    peak_bytes: Option<u64>,
}

#[pymethods]
impl Claimed {
    fn __repr__(&self) -> String {
        let peak = self.peak_bytes.map(|bytes| format!(", at most {} taken", ByteSize(bytes)));
        format!(
            "<poorwill.Claimed {}: {}{}>",
            self.name,
            ByteSize(self.bytes),
            peak.as_deref().unwrap_or_default()
        )
    }
}

impl From<poorwill::budget::Claimed> for Claimed {
    fn from(claimed: poorwill::budget::Claimed) -> Self {
        let poorwill::budget::Claimed { name, bytes, peak_bytes, .. } = claimed;
        Self { name: name.to_string(), bytes, peak_bytes }
    }
}
