//! What a page shows.

use crate::replay::Run;
use crate::trace::Trace;

/// One of the traces of a page.
///
/// ```
/// use poorwill_replay::page::{PageTrace, page};
/// use poorwill_replay::trace::{Block, TraceBuilder};
/// use poorwill_replay::{Card, Claim, Trace, replay};
///
/// let mut trace = TraceBuilder::new("a load");
/// let stack = trace.stack(vec!["model.py:12 load".into()]);
/// trace.phase("load");
/// trace.alloc(1, Block { bytes: 3 << 20, stream: 0, pool: 0, stack }).unwrap();
/// let graphs = Claim { name: "graphs".into(), bytes: 1 << 20, from_step: 0, to_step: 1 };
/// let trace = Trace { claims: vec![graphs], ..trace.finish(None) };
///
/// let card = Card { total_bytes: 1 << 30, taken_bytes: 0, budget_bytes: None };
/// let run = replay(&trace, &"pytorch".parse()?, card)?;
/// let shown = PageTrace { trace: &trace, runs: &[run], answer: "It fits.", notes: &[] };
/// assert!(page(&[shown])?.starts_with("<!doctype html>"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PageTrace<'a> {
    /// What was recorded.
    pub trace: &'a Trace,
    /// Its runs. The first one's addresses are shown first.
    pub runs: &'a [Run],
    /// Sentences: whether it fits, and what would make it fit.
    pub answer: &'a str,
    /// What is not exact.
    pub notes: &'a [String],
}
