//! The picture of a replay: one file of HTML that needs no network, and the same chart as an SVG for documents.
//!
//! Promises:
//!
//! - The same input gives the same bytes.
//! - Peaks, failures and beginnings of phases are exact, however many steps there are.
//! - No text of a trace becomes markup.
//! - The page's size has a bound that does not depend on the number of steps.

mod addresses;
mod chosen;
mod claims;
mod curves;
mod data;
mod frames;
mod holders;
mod svg;

use std::fmt::Write;

use crate::replay::{ReplayError, Run};
use crate::trace::Trace;

pub use self::claims::Claim;
pub use self::svg::svg;

/// Only the style and the script in the page may load, by their SHA-256. A test computes both.
const POLICY: &str = "default-src 'none'; \
    style-src 'sha256-P8x0Lq+6NoN48WLAPM1dyVqlzsQ/EpbEDKZ2MTBxb8s='; \
    script-src 'sha256-eSw9l1GXp6y/0uMN2YN6ZRhycTlC9FgCA3dLBgjzzIw='; \
    img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'";
const STYLE: &str = include_str!("page.css");
const BODY: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");

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

/// The page of a trace and of its runs. The first run is the one whose addresses are shown first.
///
/// # Errors
/// Only of Poorwill's pool, where this machine cannot hold its addresses.
pub fn page(trace: &Trace, runs: &[Run], options: &PageOptions) -> Result<String, ReplayError> {
    let data = data::json(trace, runs, options)?;
    let mut page = String::with_capacity(data.len() + STYLE.len() + SCRIPT.len() + BODY.len() + 2048);
    // Writing to a string does not fail.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{} · Poorwill replay</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>{STYLE}</style>\n</head>\n\
         <body>\n{BODY}<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{SCRIPT}</script>\n\
         </body>\n</html>\n",
        escaped(&trace.name)
    );
    Ok(page)
}

/// Text between tags, or in an attribute.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Which colour and dash the lines of these runs have. 0 is Poorwill's own.
fn looks(runs: &[Run]) -> Vec<usize> {
    let mut others = (1..LOOKS).cycle();
    let is_ours = |run: &Run| run.setup.kind() == crate::allocators::Kind::Poorwill;
    runs.iter().map(|run| if is_ours(run) { 0 } else { others.next().unwrap_or(1) }).collect()
}

/// How many kinds of lines there are.
const LOOKS: usize = 8;

/// The end of the vertical axis, and whether the card's usable bytes are on it. They are not if curves would be flat.
fn ceiling(highest_bytes: u64, usable_bytes: u64) -> (u64, bool) {
    const FLAT: u64 = 3;
    let is_shown = usable_bytes <= highest_bytes.saturating_mul(FLAT);
    let highest = if is_shown { highest_bytes.max(usable_bytes) } else { highest_bytes };
    (highest.max(1), is_shown)
}

#[cfg(test)]
mod tests;
