//! Phases that `poorwill.record` marks in a snapshot: `{"phases": [{"name": "load", "time_us": 1700000000000000}]}`.
//!
//! Promises: they stay in the order of the file, also where the clock was set back meanwhile.

use super::view::View;
use crate::read::value::Value;
use crate::read::{Fault, Location};
use crate::trace;

pub(super) const KEY: &str = "poorwill";

/// A phase, and when it began, on the clock of the entries.
#[derive(Debug)]
pub(super) struct Mark<'a> {
    pub(super) name: &'a str,
    pub(super) time_us: u64,
}

impl Mark<'_> {
    /// What it takes in each trace.
    pub(super) const fn bytes(&self) -> usize {
        self.name.len() + size_of::<trace::Phase>()
    }
}

pub(super) fn read<'a>(view: &View<'a>, marks: Value) -> Result<Vec<Mark<'a>>, Fault> {
    if marks == Value::None {
        return Ok(Vec::new());
    }
    let [phases] = view.fields(marks, &view.keys(["phases"]), Location::Key(KEY))?;
    let keys = view.keys(["name", "time_us"]);
    let mut found = Vec::new();
    for (phase, value) in view.items(phases, Location::Key(KEY))?.enumerate() {
        let place = Location::Phase(phase);
        let [name, time] = view.fields(value, &keys, place)?;
        let name = view.arena.as_text(name).ok_or_else(|| Fault::new(place, "`name` is no text"))?;
        found.push(Mark { name, time_us: view.unsigned(time, "time_us", place)? });
    }
    Ok(found)
}
