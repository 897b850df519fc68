//! JSON of a snapshot, into the values that a pickle of it has.
//!
//! Promises: nesting is limited to `serde_json`'s 128 levels, and errors have their line.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::fault::{Fault, Location, quoted};
use super::value::{Arena, Value};

/// The value of a file.
pub(super) fn read(bytes: &[u8]) -> Result<(Arena, Value), Fault> {
    let mut reader = Reader { arena: Arena::new(), open: Vec::new() };
    let mut source = serde_json::Deserializer::from_slice(bytes);
    let root = Seed(&mut reader).deserialize(&mut source);
    let root = root.and_then(|root| source.end().map(|()| root)).map_err(|error| fault(&error))?;
    Ok((reader.arena, root))
}

/// The error of one line.
pub(super) fn fault(error: &serde_json::Error) -> Fault {
    let text = error.to_string();
    let what = text.rsplit_once(" at line ").map_or(&*text, |(what, _)| what);
    let what = format!("the JSON cannot be read: {} (column {})", quoted(what), error.column());
    Fault::new(Location::Line(error.line()), what)
}

struct Reader {
    arena: Arena,
    /// Items of collections that have not ended.
    open: Vec<Value>,
}

impl Reader {
    /// What was opened since, as a list. JSON has equal frames again and again.
    fn close(&mut self, since: usize) -> Value {
        let list = self.arena.shared(&self.open[since..]);
        self.open.truncate(since);
        Value::List(list)
    }

    fn close_dict(&mut self, since: usize) -> Value {
        let dict = self.arena.shared_dict(&self.open[since..]);
        self.open.truncate(since);
        Value::Dict(dict)
    }
}

struct Seed<'r>(&'r mut Reader);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(self.0.arena.int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(self.0.arena.unsigned(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(self.0.arena.float(value))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(self.0.arena.text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let since = self.0.open.len();
        while let Some(item) = items.next_element_seed(Seed(self.0))? {
            self.0.open.push(item);
        }
        Ok(self.0.close(since))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let since = self.0.open.len();
        while let Some(key) = entries.next_key_seed(KeySeed(self.0))? {
            self.0.open.push(key);
            let value = entries.next_value_seed(Seed(self.0))?;
            self.0.open.push(value);
        }
        Ok(self.0.close_dict(since))
    }
}

struct KeySeed<'r>(&'r mut Reader);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(self.0.arena.text(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_the_values_of_a_pickle() {
        let (arena, root) =
            read(br#" [null, true, -3, 18446744073709551615, 0.5, "\u00e9", [], {"a": [1], "b": 2}] "#)
                .unwrap();
        let Value::List(root) = root else { panic!("{root:?}") };
        let items: Vec<_> = arena.items(root).collect();
        assert_eq!(items[..3], [Value::None, Value::Bool(true), Value::Int(-3)]);
        assert_eq!(arena.as_unsigned(items[3]), Some(u64::MAX));
        assert_eq!(arena.as_float(items[4]), Some(0.5));
        assert_eq!(arena.as_text(items[5]), Some("é"));
        let Value::Dict(dict) = items[7] else { panic!("{items:?}") };
        let pairs: Vec<_> = arena.items(dict).pairs().collect();
        assert_eq!(pairs[1], (Value::Text(arena.find("b").unwrap()), Value::Int(2)));
        let Value::List(list) = pairs[0].1 else { panic!("{pairs:?}") };
        assert_eq!(arena.items(list).collect::<Vec<_>>(), [Value::Int(1)]);
    }

    #[test]
    fn broken_json_has_its_line() {
        for (bytes, line) in [(&b"[1,\n2"[..], 2), (b"{}\n\nx", 3), (b"[\n\xff]", 2), (b"{1: 2}", 1)] {
            assert_eq!(read(bytes).unwrap_err().place, Location::Line(line), "{}", bytes.escape_ascii());
        }
        let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
        assert!(read(&deep).unwrap_err().what.contains("recursion limit"));
    }

    #[test]
    fn values_take_a_small_multiple_of_their_text() {
        for text in ["[],", "{},", "1,", "-9999999999,", "\"\",", "{\"\":[1]},"] {
            let text = format!("[{}0]", text.repeat(20_000));
            let (arena, _) = read(text.as_bytes()).unwrap();
            assert!(arena.bytes() <= 12 * text.len(), "{}: {} of {}", &text[..9], arena.bytes(), text.len());
        }
    }
}
