//! `Decision`: where ranks that sleep or wake together read their verdict.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use poorwill::ranks::{CountedDecision, FileDecision};
use poorwill::{
    Arena, PoolError, SleepReport, SleepRequest, Verdict, WakeReport, WakeRequest, chain, decision,
};
use pyo3::prelude::*;

use crate::errors::{invalid, refused};
use crate::request::timeout;

/// Longest wait of a rank that is ready for the others, by default.
const UNDO_AFTER: Duration = Duration::from_secs(300);

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Decision>()
}

/// Where ranks that sleep or wake together read whether they do it: all of them, or none.
///
/// One process makes it with `create` and gives its path to the ranks. Each rank joins it, and names it in
/// `Arena.sleep` or `Arena.wake`. The last rank that is ready commits for all.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct Decision(DecisionKind);

#[derive(Debug)]
enum DecisionKind {
    Made(Arc<FileDecision>),
    Joined(Arc<CountedDecision>),
}

impl Decision {
    fn file(&self) -> &FileDecision {
        match &self.0 {
            DecisionKind::Made(file) => file,
            DecisionKind::Joined(counted) => counted.file(),
        }
    }

    fn shared(&self) -> Arc<dyn decision::Decision> {
        match &self.0 {
            DecisionKind::Made(file) => Arc::clone(file) as _,
            DecisionKind::Joined(counted) => Arc::clone(counted) as _,
        }
    }
}

#[pymethods]
impl Decision {
    /// Makes a decision in `folder`, or in a folder of this user in memory.
    ///
    /// Ranks on several machines need a folder of a file system that they share.
    ///
    /// Raises PoorwillError where the folder belongs to another user, or others may write into it.
    #[staticmethod]
    #[pyo3(signature = (folder=None))]
    fn create(py: Python<'_>, folder: Option<PathBuf>) -> PyResult<Self> {
        let made = py.detach(move || FileDecision::create(folder.as_deref()));
        made.map(|file| Self(DecisionKind::Made(Arc::new(file)))).map_err(|error| refused(chain(&error)))
    }

    /// Joins a decision as one of `ranks` ranks, counted from 0, for one sleep or wake.
    ///
    /// Raises PoorwillError where it was removed, and ValueError where there is no such rank.
    #[staticmethod]
    fn join(py: Python<'_>, path: PathBuf, rank: u32, ranks: u32) -> PyResult<Self> {
        if rank >= ranks {
            return Err(invalid(format!("there is no rank {rank} of {ranks}: ranks are counted from 0")));
        }
        let joined = py.detach(move || CountedDecision::join(&path, rank, ranks));
        joined
            .map(|counted| Self(DecisionKind::Joined(Arc::new(counted))))
            .map_err(|error| refused(chain(&error)))
    }

    /// Its folder, for the other ranks.
    #[getter]
    fn path(&self) -> PathBuf {
        self.file().path().to_owned()
    }

    /// The verdict, "commit" or "undo"; None while there is none.
    ///
    /// Raises PoorwillError where it was removed, or cannot be read.
    #[getter]
    fn verdict(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let found = py.detach(|| decision::Decision::verdict(self.file()));
        Ok(found.map_err(refused)?.map(|verdict| verdict.to_string()))
    }

    /// Decides, unless that was done before. Returns the verdict that holds.
    ///
    /// Raises PoorwillError where it was removed, or cannot be written.
    fn decide(&self, py: Python<'_>, verdict: &str) -> PyResult<String> {
        let proposed = match verdict {
            "commit" => Verdict::Commit,
            "undo" => Verdict::Undo,
            _ => {
                let word = verdict.escape_debug();
                return Err(invalid(format!("`{word}` is no verdict; it is \"commit\" or \"undo\"")));
            }
        };
        let holds = py.detach(|| decision::Decision::decide(self.file(), proposed));
        holds.map(|verdict| verdict.to_string()).map_err(refused)
    }

    /// Says that this rank is ready, where it has nothing to sleep or wake.
    ///
    /// Raises PoorwillError where it was removed, or cannot be written.
    fn note_staged(&self, py: Python<'_>) -> PyResult<()> {
        let DecisionKind::Joined(counted) = &self.0 else {
            return Err(invalid("the process that made a decision is no rank of it; join it".to_owned()));
        };
        py.detach(|| decision::Decision::note_staged(&**counted)).map_err(refused)
    }

    /// Removes it. A rank that has not read it by then keeps its memory, and waits for good.
    ///
    /// Raises PoorwillError where it cannot be removed.
    fn remove(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.file().remove()).map_err(|error| refused(chain(&error)))
    }

    fn __repr__(&self) -> String {
        format!("<poorwill.Decision {}>", self.file().path().display())
    }
}

/// What a rank needs to sleep or wake together with others.
pub(crate) struct Group {
    decision: Arc<dyn decision::Decision>,
    undo_after: Duration,
}

impl Group {
    pub(crate) fn of(
        decision: Option<Bound<'_, Decision>>,
        undo_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Self>> {
        let undo_after = undo_after.map(timeout).transpose()?;
        let Some(decision) = decision else {
            return match undo_after {
                None => Ok(None),
                Some(_) => {
                    Err(invalid("undo_after is for ranks that share a decision: name it, too".to_owned()))
                }
            };
        };
        let undo_after = undo_after.unwrap_or(UNDO_AFTER);
        Ok(Some(Self { decision: decision.get().shared(), undo_after }))
    }

    pub(crate) fn sleep(&self, arena: &Arena, request: &SleepRequest) -> Result<SleepReport, PoolError> {
        arena.stage_sleep(request, Arc::clone(&self.decision), self.undo_after)?.wait()
    }

    pub(crate) fn wake(&self, arena: &Arena, request: &WakeRequest) -> Result<WakeReport, PoolError> {
        arena.stage_wake(request, Arc::clone(&self.decision), self.undo_after)?.wait()
    }

    /// After an error the others need not wait for this rank.
    pub(crate) fn carried_out<T>(py: Python<'_>, group: Option<&Self>, result: PyResult<T>) -> PyResult<T> {
        if let (Some(group), Err(_)) = (group, &result) {
            // Otherwise they find out when their time is up.
            let _ = py.detach(|| group.decision.decide(Verdict::Undo));
        }
        result
    }
}
