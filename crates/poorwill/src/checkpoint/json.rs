//! JSON types stricter than those of `serde_json`.
//!
//! Its maps keep the last of two equal keys, and its number errors lack positions. The types here record
//! both.

use std::collections::btree_map::{BTreeMap, Entry as MapEntry};
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// An object of strings, and its first repeated key.
#[derive(Debug, Default)]
pub(super) struct StringMap {
    pub(super) entries: BTreeMap<String, String>,
    pub(super) repeated: Option<String>,
}

impl<'de> Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(StringMapVisitor)
    }
}

struct StringMapVisitor;

impl<'de> Visitor<'de> for StringMapVisitor {
    type Value = StringMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<StringMap, A::Error> {
        let mut map = StringMap::default();
        while let Some((key, value)) = access.next_entry::<String, String>()? {
            match map.entries.entry(key) {
                MapEntry::Vacant(entry) => {
                    entry.insert(value);
                }
                MapEntry::Occupied(entry) => {
                    map.repeated.get_or_insert_with(|| entry.key().clone());
                }
            }
        }
        Ok(map)
    }
}

/// A list of natural numbers, and the first other element.
#[derive(Debug, Default)]
pub(super) struct Naturals {
    pub(super) values: Vec<u64>,
    pub(super) invalid: Option<NonNatural>,
}

#[derive(Debug)]
pub(super) struct NonNatural {
    pub(super) position: usize,
    pub(super) value: String,
}

impl<'de> Deserialize<'de> for Naturals {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(NaturalsVisitor)
    }
}

struct NaturalsVisitor;

impl<'de> Visitor<'de> for NaturalsVisitor {
    type Value = Naturals;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Naturals, A::Error> {
        let mut list = Naturals::default();
        let mut position = 0;
        while let Some(element) = access.next_element::<Element>()? {
            match element {
                Element::Natural(value) => list.values.push(value),
                Element::Other(value) => {
                    list.invalid.get_or_insert(NonNatural { position, value });
                }
            }
            position += 1;
        }
        Ok(list)
    }
}

enum Element {
    Natural(u64),
    Other(String),
}

impl Element {
    fn other<E>(what: impl fmt::Display) -> Result<Self, E> {
        Ok(Self::Other(what.to_string()))
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E>(self, value: u64) -> Result<Element, E> {
        Ok(Element::Natural(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Element, E> {
        Element::other(value)
    }

    fn visit_f64<E>(self, value: f64) -> Result<Element, E> {
        Element::other(format_args!("{value:?}"))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Element, E> {
        Element::other(value)
    }

    fn visit_unit<E>(self) -> Result<Element, E> {
        Element::other("null")
    }

    fn visit_str<E>(self, _: &str) -> Result<Element, E> {
        Element::other("a string")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Element, A::Error> {
        while access.next_element::<IgnoredAny>()?.is_some() {}
        Element::other("a list")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Element, A::Error> {
        while access.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Element::other("an object")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naturals(json: &str) -> Naturals {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn natural_numbers_up_to_the_last() {
        let list = naturals("[0, 1, 18446744073709551615]");
        assert_eq!(list.values, [0, 1, u64::MAX]);
        assert!(list.invalid.is_none());
    }

    #[test]
    fn the_first_non_natural_is_named_with_its_position() {
        for (json, value) in [
            ("-1", "-1"),
            ("1.5", "1.5"),
            ("1.0", "1.0"),
            ("18446744073709551616", "1.8446744073709552e19"),
            ("null", "null"),
            ("true", "true"),
            ("\"\u{1f989}\"", "a string"),
            ("[[1],2]", "a list"),
            ("{\"a\":{}}", "an object"),
        ] {
            let invalid = naturals(&format!("[7, {json}, -9]")).invalid.unwrap();
            assert_eq!((invalid.position, invalid.value.as_str()), (1, value));
        }
    }

    #[test]
    fn a_repeated_key_is_remembered() {
        let map: StringMap = serde_json::from_str(r#"{"a":"1","b":"2","\u0061":"3"}"#).unwrap();
        assert_eq!(map.repeated.as_deref(), Some("a"));
        assert_eq!(map.entries["a"], "1");
        assert!(serde_json::from_str::<StringMap>(r#"{"a":1}"#).is_err());
        assert!(serde_json::from_str::<StringMap>("null").is_err());
    }
}
