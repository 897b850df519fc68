//! What a page says beside its data.

use super::claims::Claim;

/// What a page says beside its data.
///
/// ```
/// use poorwill_replay::page::{Claim, PageOptions, page};
/// use poorwill_replay::trace::{Block, TraceBuilder};
/// use poorwill_replay::{Card, replay};
///
/// let mut trace = TraceBuilder::new("a load");
/// let stack = trace.stack(vec!["model.py:12 load".into()]);
/// trace.phase("load");
/// trace.alloc(1, Block { bytes: 3 << 20, stream: 0, pool: 0, stack }).unwrap();
/// let trace = trace.finish(None);
///
/// let card = Card { total_bytes: 1 << 30, taken_bytes: 0, budget_bytes: None };
/// let run = replay(&trace, &"pytorch".parse()?, card)?;
/// let graphs = Claim { name: "graphs".into(), bytes: 1 << 20, from_step: 0, to_step: 1 };
/// let options = PageOptions { answer: "It fits.".into(), claims: vec![graphs] };
/// assert!(page(&trace, &[run], &options)?.starts_with("<!doctype html>"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageOptions {
    /// A sentence: whether it fits, and what would make it fit.
    pub answer: String,
    /// Parts of a budget, in the order in which they are stacked.
    pub claims: Vec<Claim>,
}
