//! Values of Python's and JSON's builtins, in flat tables: a snapshot has tens of millions.
//!
//! Promises:
//!
//! - A value takes 8 bytes. What a pickle shares, such as frames, is there once.
//! - Collections may grow in any order, and may contain each other.
//! - Dicts with the same keys in the same order have them once.
//! - Of lists that are equal when they are written, such as stacks, most have their items once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// A value, or where its [`Arena`] has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Value {
    /// Python's `None`, and what is not there.
    None,
    Bool(bool),
    Int(i32),
    /// A whole number of 64 bits with a sign.
    Wide(Number),
    /// One of `i64::MAX + 1` or more.
    Huge(Number),
    Float(Number),
    Text(Text),
    /// Of bytes, nothing but that they were there is kept.
    Bytes,
    List(Sequence),
    Tuple(Sequence),
    /// Keys and values in turn.
    Dict(Sequence),
    Set(Sequence),
}

/// 64 bits of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Number(u32);

/// A text of an arena. Equal texts are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Text(u32);

/// Items of an arena, that may grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Sequence(u32);

impl Sequence {
    /// For tables with a row for each.
    pub(super) fn index(self) -> usize {
        index(self.0)
    }
}

/// Values of one file.
#[derive(Debug)]
pub(super) struct Arena {
    numbers: Vec<u64>,
    texts: Texts,
    items: Vec<Value>,
    sequences: Vec<Extents>,
    more: Vec<Extent>,
    shapes: Shapes,
    empty: Sequence,
    /// By a hash of the items, the last sequence that was written with it, or `NONE`.
    known: Vec<u32>,
    /// How many items are not in `items`, since equal ones are.
    shared: usize,
}

/// The items of a sequence: most are in one place. Equal ones have equal items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Extents {
    first: Extent,
    /// The last one of `more`, or `NONE`. Of a dict with a shape, the shape, [`SHAPED`].
    last: u32,
}

/// Keys of dicts, as Python writes them: in one piece, and again and again.
#[derive(Debug, Default)]
struct Shapes {
    keys: Vec<Vec<Value>>,
    numbers: HashMap<Vec<Value>, u32>,
    /// That of the last dict, which the next one has as well, mostly.
    last: u32,
    /// How many keys are not among the items.
    left_out: usize,
}

/// In `last`, what tells a shape.
const SHAPED: u32 = 1 << 31;
/// Dicts of more keys are no records, nor are those that begin with one.
const SHAPE_KEYS: std::ops::RangeInclusive<usize> = 2..=64;
/// A snapshot has a few.
const SHAPES_MAX: usize = 256;

impl Shapes {
    /// The number of these keys; `None` if there are too many others.
    fn number(&mut self, keys: impl Iterator<Item = Value> + Clone) -> Option<u32> {
        let last = self.keys.get(index(self.last));
        if last.is_some_and(|known| known.iter().copied().eq(keys.clone())) {
            return Some(self.last);
        }
        let keys: Vec<Value> = keys.collect();
        if let Some(number) = self.numbers.get(&keys) {
            self.last = *number;
        } else if self.keys.len() < SHAPES_MAX {
            self.last = position(self.keys.len());
            self.keys.push(keys.clone());
            self.numbers.insert(keys, self.last);
        } else {
            return None;
        }
        Some(self.last)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Extent {
    start: u32,
    len: u32,
    /// The one of `more` that follows, or `NONE`.
    next: u32,
}

const NONE: u32 = u32::MAX;

/// Places for known sequences. There are none before items take as much memory twice.
const KNOWN_BITS: u32 = 16;

/// Mixes values fast. A file with collisions takes more memory, and has the same values.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Extent {
    const EMPTY: Self = Self { start: 0, len: 0, next: NONE };

    const fn end(self) -> u32 {
        self.start.saturating_add(self.len)
    }
}

impl Arena {
    pub(super) fn new() -> Self {
        let sequences = vec![Extents { first: Extent::EMPTY, last: NONE }];
        let empty = Sequence(0);
        Self {
            numbers: Vec::new(),
            texts: Texts::default(),
            items: Vec::new(),
            sequences,
            more: Vec::new(),
            shapes: Shapes::default(),
            empty,
            known: Vec::new(),
            shared: 0,
        }
    }

    pub(super) fn int(&mut self, int: i64) -> Value {
        match i32::try_from(int) {
            Ok(int) => Value::Int(int),
            Err(_) => Value::Wide(self.number(int.cast_unsigned())),
        }
    }

    pub(super) fn unsigned(&mut self, int: u64) -> Value {
        match i64::try_from(int) {
            Ok(int) => self.int(int),
            Err(_) => Value::Huge(self.number(int)),
        }
    }

    pub(super) fn float(&mut self, float: f64) -> Value {
        Value::Float(self.number(float.to_bits()))
    }

    fn number(&mut self, bits: u64) -> Number {
        self.numbers.push(bits);
        Number(position(self.numbers.len() - 1))
    }

    pub(super) fn text(&mut self, text: &str) -> Value {
        Value::Text(self.texts.add(text))
    }

    /// One that nothing may be added to.
    pub(super) const fn empty(&self) -> Sequence {
        self.empty
    }

    /// A new one with these items.
    pub(super) fn sequence(&mut self, items: &[Value]) -> Sequence {
        self.sequences.push(Extents { first: Extent::EMPTY, last: NONE });
        let sequence = Sequence(position(self.sequences.len() - 1));
        self.extend(sequence, items);
        sequence
    }

    /// One with these items that nothing may be added to.
    pub(super) fn shared(&mut self, items: &[Value]) -> Sequence {
        if items.is_empty() {
            return self.empty;
        }
        let known = self.equal(Sequence(position(self.sequences.len())), items);
        if known.is_some() {
            self.shared += items.len();
        }
        known.unwrap_or_else(|| self.sequence(items))
    }

    /// A dict with these keys and values in turn that nothing may be added to.
    pub(super) fn shared_dict(&mut self, items: &[Value]) -> Sequence {
        if items.is_empty() {
            return self.empty;
        }
        let own = Sequence(position(self.sequences.len()));
        if let Some(known) = self.equal(own, items) {
            self.shared += items.len();
            return known;
        }
        let dict = self.sequence(&[]);
        self.extend_dict(dict, items);
        dict
    }

    /// A sequence with the same items, if one is known. Otherwise `own` is known from now on.
    fn equal(&mut self, own: Sequence, items: &[Value]) -> Option<Sequence> {
        if self.known.is_empty() {
            if self.items.len() < 1 << KNOWN_BITS {
                return None;
            }
            self.known = vec![NONE; 1 << KNOWN_BITS];
        }
        let mut mixer = Mixer::default();
        items.iter().for_each(|item| item.hash(&mut mixer));
        let slot = usize::try_from(mixer.finish() >> (u64::BITS - KNOWN_BITS)).unwrap_or(0);
        let known = Sequence(self.known[slot]);
        let is_equal = match self.extents(known) {
            Some(Extents { first, last: NONE }) => {
                self.items.get(index(first.start)..index(first.end())) == Some(items)
            }
            _ => self.items(known).eq(items.iter().copied()),
        };
        if !is_equal {
            self.known[slot] = own.0;
        }
        is_equal.then_some(known)
    }

    /// Adds keys and values in turn to a dict.
    pub(super) fn extend_dict(&mut self, dict: Sequence, items: &[Value]) {
        let Extents { first, last } = self.sequences[dict.index()];
        if last & SHAPED != 0 && last != NONE {
            let all: Vec<Value> = self.items(dict).collect();
            self.sequences[dict.index()] = Extents { first: Extent::EMPTY, last: NONE };
            self.extend(dict, &all);
        }
        let is_record = first.len == 0 && SHAPE_KEYS.contains(&(items.len() / 2));
        let shape = is_record.then(|| self.shapes.number(items.iter().step_by(2).copied())).flatten();
        let Some(shape) = shape else { return self.extend(dict, items) };
        self.shapes.left_out += items.len() / 2;
        let start = position(self.items.len());
        self.items.extend(items.iter().skip(1).step_by(2));
        let first = Extent { start, len: position(items.len() / 2), next: NONE };
        self.sequences[dict.index()] = Extents { first, last: SHAPED | shape };
    }

    pub(super) fn extend(&mut self, sequence: Sequence, items: &[Value]) {
        if items.is_empty() {
            return;
        }
        let is_new = self.sequences[sequence.index()] == Extents { first: Extent::EMPTY, last: NONE };
        let known = if is_new { self.equal(sequence, items) } else { None };
        // Those in one place only: the others' further places are their own.
        if let Some(Extents { first, last: NONE }) = known.map(|known| self.sequences[known.index()]) {
            self.sequences[sequence.index()].first = first;
            self.shared += items.len();
            return;
        }
        let (start, len) = (position(self.items.len()), position(items.len()));
        self.items.extend_from_slice(items);
        let new = Extent { start, len, next: NONE };
        let at = position(self.more.len());
        let Extents { first, last } = &mut self.sequences[sequence.index()];
        let tail = if *last == NONE { first } else { &mut self.more[index(*last)] };
        if tail.len == 0 {
            *tail = new;
        } else if tail.end() == start {
            tail.len = tail.len.saturating_add(len);
        } else {
            (tail.next, *last) = (at, at);
            self.more.push(new);
        }
    }

    pub(super) fn items(&self, sequence: Sequence) -> Items<'_> {
        let Some(Extents { first, last }) = self.sequences.get(sequence.index()).copied() else {
            return Items { arena: self, keys: &[], left: &[], next: None, is_value: false };
        };
        let is_shaped = last != NONE && last & SHAPED != 0;
        let keys = is_shaped.then(|| self.shapes.keys.get(index(last ^ SHAPED))).flatten();
        let keys = keys.map(Vec::as_slice).unwrap_or_default();
        Items { arena: self, keys, left: &[], next: Some(first), is_value: false }
    }

    /// Where the items of a sequence are.
    pub(super) fn extents(&self, sequence: Sequence) -> Option<Extents> {
        self.sequences.get(sequence.index()).copied()
    }

    /// How many items all sequences have.
    pub(super) fn items_len(&self) -> usize {
        self.items.len() + self.shapes.left_out + self.shared
    }

    pub(super) fn sequences_len(&self) -> usize {
        self.sequences.len()
    }

    /// A text, if any value is equal to it.
    pub(super) fn find(&self, text: &str) -> Option<Text> {
        self.texts.find(text)
    }

    pub(super) fn as_text(&self, value: Value) -> Option<&str> {
        if let Value::Text(text) = value { Some(self.texts.get(text)) } else { None }
    }

    /// A whole number of no less than 0.
    pub(super) fn as_unsigned(&self, value: Value) -> Option<u64> {
        match value {
            Value::Huge(number) => Some(self.bits(number)),
            _ => self.as_int(value).and_then(|int| u64::try_from(int).ok()),
        }
    }

    pub(super) fn as_int(&self, value: Value) -> Option<i64> {
        match value {
            Value::Int(int) => Some(int.into()),
            Value::Wide(number) => Some(self.bits(number).cast_signed()),
            _ => None,
        }
    }

    pub(super) fn as_float(&self, value: Value) -> Option<f64> {
        match value {
            Value::Float(number) => Some(f64::from_bits(self.bits(number))),
            Value::Int(int) => Some(int.into()),
            _ => None,
        }
    }

    fn bits(&self, number: Number) -> u64 {
        self.numbers[index(number.0)]
    }

    /// How much memory the values take.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.numbers)
            + size_of_val(&*self.items)
            + size_of_val(&*self.sequences)
            + size_of_val(&*self.more)
            + size_of_val(&*self.known)
            + self.shapes.keys.iter().map(|keys| 2 * size_of_val(&**keys)).sum::<usize>()
            + self.texts.all.len()
            + size_of_val(&*self.texts.ends)
            + size_of_val(&*self.texts.slots)
    }
}

/// The items of a sequence, in order.
#[derive(Debug, Clone)]
pub(super) struct Items<'a> {
    arena: &'a Arena,
    /// Keys of a dict with a shape that are left.
    keys: &'a [Value],
    left: &'a [Value],
    next: Option<Extent>,
    /// Whether a key of a shape was the last.
    is_value: bool,
}

impl Items<'_> {
    /// How many are left.
    pub(super) fn len(&self) -> usize {
        let mut len = self.left.len() + self.keys.len();
        let mut next = self.next;
        while let Some(extent) = next {
            len += index(extent.len);
            next = self.arena.more.get(index(extent.next)).copied();
        }
        len
    }

    /// Of a dict, in pairs.
    pub(super) fn pairs(mut self) -> impl Iterator<Item = (Value, Value)> {
        std::iter::from_fn(move || Some((self.next()?, self.next()?)))
    }
}

impl Iterator for Items<'_> {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        if let Some((key, keys)) = self.keys.split_first().filter(|_| !self.is_value) {
            (self.keys, self.is_value) = (keys, true);
            return Some(*key);
        }
        self.is_value = false;
        loop {
            if let Some((first, left)) = self.left.split_first() {
                self.left = left;
                return Some(*first);
            }
            let extent = self.next.take()?;
            self.left = self.arena.items.get(index(extent.start)..index(extent.end()))?;
            self.next = self.arena.more.get(index(extent.next)).copied();
        }
    }
}

/// Texts, each once, in a table with open addresses.
#[derive(Debug, Default)]
struct Texts {
    all: String,
    /// Where each ends in `all`.
    ends: Vec<u32>,
    /// The texts by their hash, or `NONE`. At most half of them are taken.
    slots: Vec<u32>,
    hasher: RandomState,
}

impl Texts {
    const SLOTS_MIN: usize = 64;

    fn get(&self, text: Text) -> &str {
        let at = index(text.0);
        let start = at.checked_sub(1).map_or(0, |before| index(self.ends[before]));
        &self.all[start..index(self.ends[at])]
    }

    fn add(&mut self, text: &str) -> Text {
        if self.slots.len() <= self.ends.len() * 2 {
            self.grow();
        }
        let slot = self.slot(text);
        if self.slots[slot] == NONE {
            self.all.push_str(text);
            self.slots[slot] = position(self.ends.len());
            self.ends.push(position(self.all.len()));
        }
        Text(self.slots[slot])
    }

    fn find(&self, text: &str) -> Option<Text> {
        if self.slots.is_empty() {
            return None;
        }
        let at = self.slots[self.slot(text)];
        (at != NONE).then_some(Text(at))
    }

    /// The one that has the text, or that is free for it.
    fn slot(&self, text: &str) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = usize::try_from(self.hasher.hash_one(text) >> 16).unwrap_or(0) & mask;
        while self.slots[slot] != NONE && self.get(Text(self.slots[slot])) != text {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn grow(&mut self) {
        self.slots = vec![NONE; (self.slots.len() * 2).max(Self::SLOTS_MIN)];
        for number in 0..position(self.ends.len()) {
            let slot = self.slot(self.get(Text(number)));
            self.slots[slot] = number;
        }
    }
}

/// Files of less than 4 GiB have fewer values of each kind.
fn position(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}

fn index(position: u32) -> usize {
    usize::try_from(position).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_small() {
        assert_eq!([size_of::<Value>(), size_of::<Option<Value>>(), size_of::<Extents>()], [8, 8, 16]);
    }

    #[test]
    fn numbers_keep_their_bits() {
        let mut arena = Arena::new();
        for int in [0, -1, i64::from(i32::MAX), i64::from(i32::MAX) + 1, i64::MIN, i64::MAX] {
            let value = arena.int(int);
            assert_eq!(arena.as_int(value), Some(int));
            assert_eq!(arena.as_unsigned(value), u64::try_from(int).ok());
        }
        let value = arena.unsigned(u64::MAX);
        assert_eq!((arena.as_unsigned(value), arena.as_int(value)), (Some(u64::MAX), None));
        let value = arena.float(0.8);
        assert_eq!((arena.as_float(value), arena.as_int(value)), (Some(0.8), None));
    }

    #[test]
    fn equal_texts_are_one() {
        let mut arena = Arena::new();
        assert_eq!(arena.find("a"), None);
        let texts: Vec<_> = (0..500).map(|n| arena.text(&format!("text {}", n % 200))).collect();
        assert_eq!(texts[..200], texts[200..400]);
        assert_eq!(arena.texts.ends.len(), 200);
        assert_eq!(arena.as_text(texts[201]), Some("text 1"));
        assert_eq!(arena.find("text 7").map(Value::Text), Some(texts[7]));
        assert_eq!([arena.find("text 200"), arena.find("")], [None, None]);
    }

    #[test]
    fn dicts_with_the_same_keys_have_them_once() {
        let mut arena = Arena::new();
        let [a, b, c] = ["a", "b", "c"].map(|text| arena.text(text));
        let ints = |numbers: [i32; 2]| numbers.map(Value::Int);
        let dicts: Vec<Sequence> = (0..5).map(|_| arena.sequence(&[])).collect();
        for (number, dict) in (0..4).zip(&dicts) {
            let [x, y] = ints([number, -number]);
            arena.extend_dict(*dict, &[a, x, b, y]);
        }
        assert_eq!((arena.items.len(), arena.items_len(), arena.shapes.keys.len()), (8, 16, 1));
        // A dict that grows has its own keys, also if it grows more than once.
        arena.extend_dict(dicts[3], &[c, Value::None]);
        arena.extend_dict(dicts[3], &[a, Value::Int(9)]);
        let of = |dict: Sequence| arena.items(dict).collect::<Vec<_>>();
        assert_eq!(of(dicts[2]), [a, Value::Int(2), b, Value::Int(-2)]);
        assert_eq!(arena.items(dicts[2]).len(), 4);
        let grown = [a, Value::Int(3), b, Value::Int(-3), c, Value::None, a, Value::Int(9)];
        assert_eq!(of(dicts[3]), grown);
        assert_eq!(of(dicts[4]), []);
    }

    #[test]
    fn equal_lists_have_their_items_once_and_grow_alone() {
        let mut arena = Arena::new();
        let filler = vec![Value::None; 1 << KNOWN_BITS];
        arena.sequence(&filler);
        let ints = [1, 2, 3].map(Value::Int);
        let all: Vec<Sequence> = (0..100).map(|_| arena.sequence(&ints)).collect();
        assert_eq!((arena.items.len(), arena.items_len()), (filler.len() + 3, filler.len() + 300));
        assert!(all.iter().all(|list| arena.extents(*list) == arena.extents(all[0])));
        for (list, more) in [(7, 40), (9, 50), (7, 60)] {
            arena.extend(all[list], &[Value::Int(more)]);
        }
        let of = |list: usize| arena.items(all[list]).skip(3).collect::<Vec<_>>();
        assert_eq!(
            [of(7), of(8), of(9)],
            [vec![Value::Int(40), Value::Int(60)], vec![], vec![Value::Int(50)]]
        );
        assert_ne!(arena.extents(all[7]), arena.extents(all[9]));
    }

    #[test]
    fn what_never_grows_is_one_sequence() {
        let mut arena = Arena::new();
        arena.sequence(&vec![Value::None; 1 << KNOWN_BITS]);
        let [a, b] = ["a", "b"].map(|text| arena.text(text));
        let dict = [a, Value::Int(1), b, Value::Int(2)];
        let dicts = [arena.shared_dict(&dict), arena.shared_dict(&dict)];
        let lists = [(); 2].map(|()| arena.shared(&dicts.map(Value::Dict)));
        assert_eq!((dicts[0], lists[0]), (dicts[1], lists[1]));
        assert_eq!(arena.items(dicts[1]).collect::<Vec<_>>(), dict);
        assert_eq!(arena.items_len(), (1 << KNOWN_BITS) + 2 * dict.len() + 2 * dicts.len());
        // A list of what a dict has keeps its own place.
        let list = arena.sequence(&dict);
        arena.extend(list, &[Value::None]);
        assert_eq!((arena.items(list).len(), arena.items(dicts[0]).len()), (5, 4));
        assert_eq!([arena.shared(&[]), arena.shared_dict(&[])], [arena.empty(); 2]);
    }

    #[test]
    fn sequences_grow_in_turn() {
        let mut arena = Arena::new();
        let of = |arena: &Arena, sequence| arena.items(sequence).collect::<Vec<_>>();
        let all = [arena.sequence(&[]), arena.sequence(&[Value::None])];
        let mut expected = [vec![], vec![Value::None]];
        for turn in 0..20 {
            let which = usize::from(turn % 3 == 0);
            let items = vec![Value::Int(turn); usize::try_from(turn % 4).unwrap()];
            arena.extend(all[which], &items);
            expected[which].extend(items);
            assert_eq!(all.map(|sequence| of(&arena, sequence)), expected);
        }
        arena.extend(all[0], &[Value::List(all[0])]);
        assert_eq!(arena.items(all[0]).last(), Some(Value::List(all[0])));
        assert_eq!(of(&arena, arena.empty()), []);
    }
}
