//! Dicts of a snapshot, by the keys that are looked for.
//!
//! Promises: each value of the file is looked at once, however often the file shares it.

use std::cell::Cell;

use crate::read::fault::{AGAIN, Fault, Location};
use crate::read::value::{Arena, Sequence, Text, Value};

/// A file's values, of which no more can be looked at than it has.
pub(super) struct View<'a> {
    arena: &'a Arena,
    left: Cell<usize>,
}

impl<'a> View<'a> {
    /// For what is looked at twice: the keys of the root and of the settings.
    const SPARE: usize = 1024;

    pub(super) fn new(arena: &'a Arena) -> Self {
        Self { arena, left: Cell::new(arena.items_len() + Self::SPARE) }
    }

    pub(super) fn arena(&self) -> &'a Arena {
        self.arena
    }

    pub(super) fn keys<const N: usize>(&self, names: [&'static str; N]) -> Keys<N> {
        Keys { names, texts: names.map(|name| self.arena.find(name)) }
    }

    /// Items of a list or tuple; none where nothing is.
    pub(super) fn items(&self, value: Value, place: Location) -> Result<impl Iterator<Item = Value>, Fault> {
        let sequence = match value {
            Value::List(sequence) | Value::Tuple(sequence) => sequence,
            Value::None => self.arena.empty(),
            _ => return Err(Fault::new(place, "this is no list")),
        };
        self.spend(self.arena.items(sequence).len(), place)?;
        Ok(self.arena.items(sequence))
    }

    /// The values of these keys of a dict; `None` for those that it lacks.
    pub(super) fn fields<const N: usize>(
        &self,
        value: Value,
        keys: &Keys<N>,
        place: Location,
    ) -> Result<[Value; N], Fault> {
        let mut found = [Value::None; N];
        for (key, value) in self.dict(value, place)? {
            let Value::Text(key) = key else { continue };
            if let Some(at) = keys.texts.iter().position(|text| *text == Some(key)) {
                found[at] = value;
            }
        }
        Ok(found)
    }

    pub(super) fn dict(
        &self,
        value: Value,
        place: Location,
    ) -> Result<impl Iterator<Item = (Value, Value)>, Fault> {
        let Value::Dict(sequence) = value else { return Err(Fault::new(place, "this is no dict")) };
        self.spend(self.arena.items(sequence).len(), place)?;
        Ok(self.arena.items(sequence).pairs())
    }

    fn spend(&self, items: usize, place: Location) -> Result<(), Fault> {
        let left = self.left.get().checked_sub(items);
        self.left.set(
            left.ok_or_else(|| Fault::new(place, "the same values come again and again").with_next(AGAIN))?,
        );
        Ok(())
    }

    /// A whole number of no less than 0.
    pub(super) fn unsigned(&self, value: Value, key: &str, place: Location) -> Result<u64, Fault> {
        let number = self.arena.as_unsigned(value);
        number.ok_or_else(|| Fault::new(place, format!("`{key}` {}", Self::instead(value))))
    }

    fn instead(value: Value) -> &'static str {
        match value {
            Value::None => "is missing",
            Value::Int(_) | Value::Wide(_) => "is below 0",
            _ => "is no whole number",
        }
    }

    /// Any number, as one without a sign: streams may be pointers.
    pub(super) fn stream(&self, value: Value) -> u64 {
        let int = self.arena.as_int(value).map(i64::cast_unsigned);
        int.or_else(|| self.arena.as_unsigned(value)).unwrap_or(0)
    }
}

/// Keys that are looked for together.
pub(super) struct Keys<const N: usize> {
    pub(super) names: [&'static str; N],
    texts: [Option<Text>; N],
}

/// A table with a row for each sequence of an arena.
pub(super) struct PerSequence(Vec<u32>);

impl PerSequence {
    pub(super) fn new(arena: &Arena) -> Self {
        Self(vec![u32::MAX; arena.sequences_len()])
    }

    pub(super) fn get(&self, sequence: Sequence) -> Option<u32> {
        self.0.get(sequence.index()).copied().filter(|number| *number != u32::MAX)
    }

    pub(super) fn set(&mut self, sequence: Sequence, number: u32) {
        if let Some(at) = self.0.get_mut(sequence.index()) {
            *at = number;
        }
    }
}
