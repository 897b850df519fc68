//! What `poorwill.record` adds to a snapshot: phases, and the card of each device.
//!
//! ```text
//! {"phases": [{"name": "load", "time_us": 1700000000000000}],
//!  "cards": [{"device": 0, "total_bytes": 150000000000, "taken_bytes": 500000000}]}
//! ```
//!
//! Promises: phases stay in the order of the file, also where the clock was set back meanwhile.

use std::collections::HashMap;

use super::view::View;
use crate::card::Card;
use crate::read::fault::{Fault, Location};
use crate::read::value::Value;
use crate::trace;

pub(super) const KEY: &str = "poorwill";

/// All of it; empty where there is none.
#[derive(Debug, Default)]
pub(super) struct Additions<'a> {
    pub(super) phases: Vec<Mark<'a>>,
    /// By device.
    pub(super) cards: HashMap<usize, Card>,
}

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

pub(super) fn read<'a>(view: &View<'a>, added: Value) -> Result<Additions<'a>, Fault> {
    if added == Value::None {
        return Ok(Additions::default());
    }
    let place = Location::Key(KEY);
    let [phases, cards] = view.fields(added, &view.keys(["phases", "cards"]), place)?;
    Ok(Additions { phases: read_phases(view, phases)?, cards: read_cards(view, cards)? })
}

fn read_phases<'a>(view: &View<'a>, phases: Value) -> Result<Vec<Mark<'a>>, Fault> {
    let keys = view.keys(["name", "time_us"]);
    let mut found = Vec::new();
    for (phase, value) in view.items(phases, Location::Key(KEY))?.enumerate() {
        let place = Location::Phase(phase);
        let [name, time] = view.fields(value, &keys, place)?;
        let name = view.arena().as_text(name).ok_or_else(|| Fault::new(place, "`name` is no text"))?;
        found.push(Mark { name, time_us: view.unsigned(time, "time_us", place)? });
    }
    Ok(found)
}

fn read_cards(view: &View<'_>, cards: Value) -> Result<HashMap<usize, Card>, Fault> {
    let (place, keys) = (Location::Key(KEY), view.keys(["device", "total_bytes", "taken_bytes"]));
    let mut found = HashMap::new();
    for card in view.items(cards, place)? {
        let [device, total, taken] = view.fields(card, &keys, place)?;
        let device = view.unsigned(device, "device", place)?;
        let total_bytes = view.unsigned(total, "total_bytes", place)?;
        let taken_bytes = view.unsigned(taken, "taken_bytes", place)?;
        if let Ok(device) = usize::try_from(device) {
            found.insert(device, Card { total_bytes, taken_bytes, budget_bytes: None });
        }
    }
    Ok(found)
}
