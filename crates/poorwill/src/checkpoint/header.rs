//! Parses the header of a safetensors file into entries.
//!
//! The header is one JSON object in UTF-8, without repeated keys. `__metadata__` holds only strings, and each
//! tensor has exactly the format's fields. `layout` checks the numbers. `serde_json`'s recursion limit bounds
//! nesting; skipped values need no recursion.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use super::error::HeaderError;
use super::json::{Naturals, StringMap};
use super::text;

/// Size of the header's length, little-endian.
pub(super) const PREFIX_BYTES: u64 = 8;

/// The reference implementation's limit.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;

const METADATA: &str = "__metadata__";

#[derive(Debug)]
pub(super) struct RawEntry {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Naturals,
    pub(super) offsets: Naturals,
}

/// Length of the header, if it fits the file.
pub(super) fn length(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    if &prefix == b"version " {
        return Err(HeaderError::GitLfsPointer);
    }
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(HeaderError::HeaderTooLarge { header_bytes, limit_bytes: HEADER_BYTES_MAX });
    }
    if header_bytes > file_bytes.saturating_sub(PREFIX_BYTES) {
        return Err(HeaderError::HeaderBeyondFile { header_bytes, file_bytes });
    }
    Ok(header_bytes)
}

pub(super) fn parse(header: &[u8]) -> Result<Vec<RawEntry>, HeaderError> {
    let json = std::str::from_utf8(header)
        .map_err(|error| HeaderError::NotUtf8 { position: PREFIX_BYTES + error.valid_up_to() as u64 })?;
    let object: Object = serde_json::from_str(json)
        .map_err(|error| HeaderError::Malformed { reason: text::reason(&error.to_string()) })?;
    if let Some(key) = object.repeated_key() {
        return Err(HeaderError::DuplicateKey { key: key.to_owned() });
    }
    object.tensors.into_iter().map(|(name, fields)| fields.into_entry(name)).collect()
}

#[derive(Default)]
struct Object {
    tensors: Vec<(String, Fields)>,
    metadata: Option<StringMap>,
    metadata_repeated: bool,
}

impl Object {
    fn repeated_key(&self) -> Option<&str> {
        if self.metadata_repeated {
            return Some(METADATA);
        }
        let in_metadata = self.metadata.as_ref().and_then(|metadata| metadata.repeated.as_deref());
        let mut seen = HashSet::with_capacity(self.tensors.len());
        in_metadata
            .or_else(|| self.tensors.iter().map(|(name, _)| name.as_str()).find(|name| !seen.insert(*name)))
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Object, A::Error> {
        let mut object = Object::default();
        while let Some(name) = access.next_key::<String>()? {
            if name == METADATA {
                let metadata = access.next_value().map_err(|error| at(METADATA, &error))?;
                object.metadata_repeated |= object.metadata.replace(metadata).is_some();
            } else {
                let fields = access
                    .next_value()
                    .map_err(|error| at(&format!("tensor {}", text::name(&name)), &error))?;
                object.tensors.push((name, fields));
            }
        }
        Ok(object)
    }
}

fn at<E: Error>(entry: &str, error: &E) -> E {
    E::custom(format_args!("{entry}: {error}"))
}

#[derive(Default)]
struct Fields {
    dtype: Option<String>,
    shape: Option<Naturals>,
    offsets: Option<Naturals>,
    repeated: Option<&'static str>,
    unknown: Option<String>,
}

impl Fields {
    fn into_entry(self, name: String) -> Result<RawEntry, HeaderError> {
        match self.complete() {
            Ok((dtype, shape, offsets)) => Ok(RawEntry { name, dtype, shape, offsets }),
            Err(reason) => Err(HeaderError::EntryMalformed { tensor: name, reason }),
        }
    }

    fn complete(self) -> Result<(String, Naturals, Naturals), String> {
        if let Some(field) = self.repeated {
            return Err(format!("its entry has `{field}` twice"));
        }
        if let Some(field) = self.unknown {
            return Err(format!("its entry has the unknown field {}", text::name(&field)));
        }
        let absent = |field| format!("its entry has no `{field}`");
        Ok((
            self.dtype.ok_or_else(|| absent("dtype"))?,
            self.shape.ok_or_else(|| absent("shape"))?,
            self.offsets.ok_or_else(|| absent("data_offsets"))?,
        ))
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some(field) = access.next_key::<String>()? {
            let repeated = match field.as_str() {
                "dtype" => fields.dtype.replace(access.next_value()?).map(|_| "dtype"),
                "shape" => fields.shape.replace(access.next_value()?).map(|_| "shape"),
                "data_offsets" => fields.offsets.replace(access.next_value()?).map(|_| "data_offsets"),
                _ => {
                    access.next_value::<IgnoredAny>()?;
                    fields.unknown.get_or_insert(field);
                    None
                }
            };
            fields.repeated = fields.repeated.or(repeated);
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(header: &str) -> String {
        parse(header.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn entries_come_in_header_order() {
        let header = r#" {"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},
            "__metadata__":{"format":"pt"},"a":{"data_offsets":[0,4],"shape":[],"dtype":"U8"}}   "#;
        let entries = parse(header.as_bytes()).unwrap();
        assert_eq!(entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(entries[1].dtype, "U8");
        assert_eq!(entries[1].offsets.values, [0, 4]);
        assert!(parse(b"{}").unwrap().is_empty());
    }

    #[test]
    fn faults_in_the_text_say_where() {
        assert_eq!(parse(b"{\"a\xff\"").unwrap_err(), HeaderError::NotUtf8 { position: 11 });
        assert_eq!(reason(""), "malformed header: EOF while parsing a value at line 1 column 0");
        assert!(reason("[]").contains("invalid type: sequence, expected an object of tensors"));
        assert!(reason("{} x").contains("trailing characters at line 1 column 4"));
        assert!(
            reason(r#"{"a":{"dtype":7}}"#)
                .contains("tensor \"a\": invalid type: integer `7`, expected a string at line 1 column 15")
        );
        assert!(reason(r#"{"a":{"shape":[1,"#).contains("tensor \"a\": EOF while parsing"));
        assert!(reason(r#"{"a":null}"#).contains("expected an object with dtype, shape and data_offsets"));
        assert!(reason(r#"{"__metadata__":{"n":1}}"#).contains("__metadata__: invalid type: integer `1`"));
        assert!(reason(r#"{"__metadata__":null}"#).contains("expected an object of strings"));
    }

    #[test]
    fn nothing_comes_twice() {
        let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
        let twice = |key: &str| HeaderError::DuplicateKey { key: key.to_owned() };
        let error = |header: String| parse(header.as_bytes()).unwrap_err();
        assert_eq!(error(format!(r#"{{"a":{entry},"b":{entry},"\u0061":{entry}}}"#)), twice("a"));
        assert_eq!(error(r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned()), twice("__metadata__"));
        assert_eq!(error(r#"{"__metadata__":{"k":"1","k":"2"}}"#.to_owned()), twice("k"));
        assert!(reason(r#"{"a":{"dtype":"U8","dtype":"U8"}}"#).contains("has `dtype` twice"));
    }

    #[test]
    fn entries_have_the_fields_of_the_format_and_no_other() {
        assert!(reason(r#"{"a":{"shape":[],"data_offsets":[0,1]}}"#).contains("no `dtype`"));
        assert!(reason(r#"{"a":{"dtype":"U8","data_offsets":[0,1]}}"#).contains("no `shape`"));
        assert!(reason(r#"{"a":{"dtype":"U8","shape":[]}}"#).contains("no `data_offsets`"));
        assert!(reason(r#"{"a":{"dtype":"U8","stride":[[]]}}"#).contains("unknown field \"stride\""));
    }

    #[test]
    fn nesting_does_not_reach_the_stack() {
        let deep = "[".repeat(3_000_000);
        for header in [
            deep.clone(),
            format!("{{\"a\":{deep}"),
            format!("{{\"__metadata__\":{deep}"),
            format!("{{\"a\":{{\"shape\":{deep}"),
            format!("{{\"a\":{{\"x\":{deep}"),
            "{\"a\":".repeat(1_000_000),
        ] {
            assert!(matches!(parse(header.as_bytes()), Err(HeaderError::Malformed { .. })));
        }
    }

    #[test]
    fn a_hostile_value_is_not_repeated_at_length() {
        let header = format!(r#"{{"a":"\u001b[31m{}"}}"#, "x".repeat(100_000));
        let shown = reason(&header);
        assert!(shown.len() < 500 && !shown.contains('\u{1b}'), "{shown:?}");
    }

    #[test]
    fn the_length_is_checked_before_anything_is_allocated() {
        assert_eq!(length(2u64.to_le_bytes(), 10), Ok(2));
        assert_eq!(
            length(3u64.to_le_bytes(), 10),
            Err(HeaderError::HeaderBeyondFile { header_bytes: 3, file_bytes: 10 })
        );
        assert_eq!(length(100_000_000u64.to_le_bytes(), u64::MAX), Ok(100_000_000));
        assert_eq!(
            length(100_000_001u64.to_le_bytes(), u64::MAX),
            Err(HeaderError::HeaderTooLarge { header_bytes: 100_000_001, limit_bytes: 100_000_000 })
        );
        assert_eq!(length(*b"version ", 130), Err(HeaderError::GitLfsPointer));
    }
}
