//! Which keys the tables of a file have, so that a key in the wrong table is explained by the right one.

use serde::de::value::Error as NoValue;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;

/// A table of a kind of file.
#[derive(Debug, Clone, Copy)]
pub struct TableKeys {
    /// As an operator writes it, such as `[model.rules]`.
    header: &'static str,
    keys: &'static [&'static str],
}

impl TableKeys {
    /// The table that is read as `T`.
    #[must_use]
    pub fn of<'de, T: Deserialize<'de>>(header: &'static str) -> Self {
        let mut keys: &'static [&'static str] = &[];
        // Only the names are asked for: there is no value to read.
        drop(T::deserialize(FieldNames(&mut keys)));
        Self { header, keys }
    }

    pub(super) fn header(&self) -> &'static str {
        self.header
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.contains(&key)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().copied()
    }
}

struct FieldNames<'k>(&'k mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = NoValue;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, NoValue> {
        Err(NoValue::custom("this is no table"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, NoValue> {
        *self.0 = fields;
        Err(NoValue::custom("only the names are read"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
