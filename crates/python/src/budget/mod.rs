//! `Budget`: how much of a device may be used, and the claims on it.

pub(crate) mod cap;
mod claim;

use poorwill::budget::{Envelope, claim_in_use};
use poorwill::lend::Lending;
use poorwill::{ByteSize, Device, OpenError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use self::claim::Claim;
use crate::device;
use crate::errors::{invalid, not_opened, over_budget, refused};
use crate::lending;
use crate::process::ProcessLocal;
use crate::sizes::size_of;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Budget>()?;
    module.add_class::<Source>()?;
    module.add_class::<Claimed>()?;
    module.add_class::<Claim>()?;
    module.add_function(wrap_pyfunction!(budget, module)?)
}

/// Decides how much memory of a device this process may use, from every available source.
///
/// `device` is None or "cuda" for the current GPU (PyTorch's, or the first), a number, "cuda:1", "host",
/// "host:8GiB", or a torch.device.
///
/// `cap` is the user's upper bound:
///
/// - bytes, as an int or a text like "20GiB" or "22528m";
/// - a share of what there is, as a float or a text like "0.92" or "92%";
/// - one for each device, as a mapping or a text like "cuda:0=20GiB,cuda:1=0.92".
///
/// Memory that is in use already is claimed as `in_use`. Raises BudgetError where no source knows the
/// device's memory, and PoorwillError where the device cannot be opened.
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
        let lending = lending::at(None);
        Ok((budget, OpenBudget { envelope, _in_use: in_use, device, lending }))
    });
    let (decided, opened) = opened.map_err(|error: OpenError| not_opened(&error))?;
    Ok(Budget { device: spec.to_string(), decided, opened: ProcessLocal::new(opened) })
}

/// How much memory of a device this process may use, with sources and claims.
///
/// All figures but `reclaimable_bytes` and `unclaimed_bytes` are as of its opening.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Budget {
    /// Name of the device.
    #[pyo3(get)]
    device: String,
    decided: poorwill::Budget,
    opened: ProcessLocal<OpenBudget>,
}

#[derive(Debug)]
struct OpenBudget {
    envelope: Envelope,
    /// Reserves what cannot be had.
    _in_use: Option<poorwill::Claim>,
    device: Device,
    /// The broker of what is reclaimable.
    lending: Lending,
}

impl Budget {
    /// The budget of an open arena, which keeps its own claim.
    pub(crate) fn shared(
        device: Device,
        decided: poorwill::Budget,
        envelope: Envelope,
        lending: Lending,
    ) -> Self {
        let name = device.spec().to_string();
        let opened = OpenBudget { envelope, _in_use: None, device, lending };
        Self { device: name, decided, opened: ProcessLocal::new(opened) }
    }
}

#[pymethods]
impl Budget {
    /// Every source that was consulted, with its figure.
    #[getter]
    fn sources(&self) -> Vec<Source> {
        self.decided.sources.iter().map(Source::from).collect()
    }

    /// Source of the budget.
    #[getter]
    fn winner(&self) -> Option<&'static str> {
        self.decided.winner.map(poorwill::budget::SourceName::as_str)
    }

    /// Smallest plausible total, before the user's cap.
    #[getter]
    fn total_bytes(&self) -> Option<u64> {
        self.decided.total_bytes
    }

    /// What this process may use.
    #[getter]
    fn budget_bytes(&self) -> Option<u64> {
        self.decided.budget_bytes
    }

    /// What the process could take beyond that; None if unknown.
    #[getter]
    fn headroom_bytes(&self) -> Option<u64> {
        self.decided.headroom_bytes
    }

    /// What the process had in use, with its context; None if unknown.
    #[getter]
    fn process_used_bytes(&self) -> Option<u64> {
        self.decided.process_used_bytes
    }

    /// Lent by sleeping pools, now, and to be had by arenas that lend; None where no broker says so.
    #[getter]
    fn reclaimable_bytes(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let OpenBudget { device, lending, .. } = self.opened.get()?;
        Ok(py.detach(|| device.reclaimable_bytes(lending)))
    }

    /// Bytes without a claim, now.
    #[getter]
    fn unclaimed_bytes(&self) -> PyResult<u64> {
        Ok(self.opened.get()?.envelope.unclaimed_bytes())
    }

    /// Current claims, in the order in which they were made.
    fn claims(&self) -> PyResult<Vec<Claimed>> {
        let claims = self.opened.get()?.envelope.claims();
        Ok(claims.into_iter().map(Claimed::from).collect())
    }

    /// Claims memory by name; `size` is bytes as an int, or a text like "1.53GiB".
    ///
    /// Several claims may have one name. Raises BudgetError, with nothing changed, when less is unclaimed.
    fn claim(&self, name: &str, size: &Bound<'_, PyAny>) -> PyResult<Claim> {
        let OpenBudget { envelope, device, .. } = self.opened.get()?;
        let (name, bytes) = (name.parse().map_err(invalid)?, size_of(size)?);
        let claim = envelope.claim(name, bytes).map_err(over_budget)?;
        Ok(Claim::new(claim, device.clone()))
    }

    /// The decision as plain values, like the command line's JSON.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut decided = self.decided.clone();
        // Unknown in a forked child.
        decided.reclaimable_bytes = self.reclaimable_bytes(py).ok().flatten();
        let json = serde_json::to_string(&decided).map_err(refused)?;
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
        let winner = self.winner().unwrap_or("no source");
        format!("<poorwill.Budget {}: {budget} of {total}, from {winner}; {unclaimed}>", self.device)
    }
}

/// A source of a device's memory figure, and its result.
#[pyclass(frozen, eq, hash, get_all, module = "poorwill")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    /// Name of the source.
    name: String,
    /// Its figure; None where it had none.
    bytes: Option<u64>,
    /// Why there is none, or what is unusual about it.
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

/// A claim, as its budget lists it.
#[pyclass(frozen, eq, hash, get_all, module = "poorwill")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Claimed {
    /// Name of the claim.
    name: String,
    /// Claimed size.
    bytes: u64,
    /// Measured peak; None if not measured.
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
