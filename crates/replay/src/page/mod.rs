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
mod looks;
mod options;
mod svg;

use std::fmt::Write;

use crate::replay::{ReplayError, Run};
use crate::trace::Trace;

use self::looks::escaped;

pub use self::claims::Claim;
pub use self::options::PageOptions;
pub use self::svg::svg;

/// Only the style and the script in the page may load, by their SHA-256. A test computes both.
const POLICY: &str = "default-src 'none'; \
    style-src 'sha256-P8x0Lq+6NoN48WLAPM1dyVqlzsQ/EpbEDKZ2MTBxb8s='; \
    script-src 'sha256-eSw9l1GXp6y/0uMN2YN6ZRhycTlC9FgCA3dLBgjzzIw='; \
    img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'";
const STYLE: &str = include_str!("page.css");
const BODY: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");

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

#[cfg(test)]
mod tests;
