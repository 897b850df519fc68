//! The picture of replays: one file of HTML that needs no network, and the same chart as an SVG for documents.
//!
//! Promises:
//!
//! - The same input gives the same bytes.
//! - Peaks, failures and beginnings of phases are exact, however many steps there are.
//! - No text of a trace becomes markup.
//! - The page's size has a bound for each trace that does not depend on the number of steps.

mod addresses;
mod chosen;
mod claims;
mod curves;
mod data;
mod frames;
mod holders;
mod looks;
mod shown;
mod svg;

use std::fmt::Write;

use crate::replay::ReplayError;

use self::looks::escaped;

pub use self::shown::PageTrace;
pub use self::svg::svg;

/// Only the style and the script in the page may load, by their SHA-256. A test computes both.
const POLICY: &str = "default-src 'none'; \
    style-src 'sha256-vvZAIvbHKfIyr4isZvbD1eqCDQuPCvQkYuTcDey3uBY='; \
    script-src 'sha256-qjk6hHdRvUbitF0Op/dinqUNrhRyEUjwHrfb2dartr8='; \
    img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'";
const STYLE: &str = include_str!("page.css");
const BODY: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");

/// The page of these traces, such as the ranks of a program. The first one is shown first, and the reader chooses others.
///
/// # Errors
/// Only of Poorwill's pool, where this machine cannot hold its addresses.
pub fn page(all: &[PageTrace<'_>]) -> Result<String, ReplayError> {
    let data = all.iter().map(data::json).collect::<Result<Vec<_>, _>>()?.join(",");
    let title = all.first().map(|one| escaped(&one.trace.name)).unwrap_or_default();
    let mut page = String::with_capacity(data.len() + STYLE.len() + SCRIPT.len() + BODY.len() + 2048);
    // Writing to a string does not fail.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{title} · Poorwill replay</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>{STYLE}</style>\n</head>\n\
         <body>\n{BODY}<script type=\"application/json\" id=\"data\">[{data}]</script>\n<script>{SCRIPT}</script>\n\
         </body>\n</html>\n",
    );
    Ok(page)
}

#[cfg(test)]
mod tests;
