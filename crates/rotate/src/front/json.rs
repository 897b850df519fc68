//! The fields of a request body that the front needs.
//!
//! The body is parsed once, which also proves that it is JSON. The position of the model's name is searched only if the
//! name has to be replaced.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct RequestFields {
    pub(super) name: String,
    pub(super) is_stream: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// Not a JSON object; the parser's message.
    NotJson(String),
    /// Not a form; why.
    NotForm(String),
    NoModel,
    NotString,
    /// The engine might use another one than the front.
    Duplicate,
}

pub(super) fn parse(body: &[u8]) -> Result<RequestFields, BodyError> {
    let mut parser = serde_json::Deserializer::from_slice(body);
    let top = parser.deserialize_map(TopVisitor).and_then(|top| parser.end().map(|()| top));
    match top.map_err(|error| BodyError::NotJson(error.to_string()))? {
        Top { models: 0, .. } => Err(BodyError::NoModel),
        Top { models: 1, model: FieldValue::Text(name), is_stream } => Ok(RequestFields { name, is_stream }),
        Top { models: 1, .. } => Err(BodyError::NotString),
        _ => Err(BodyError::Duplicate),
    }
}

/// The top-level `model` value, with quotes, in a body that [`parse`] accepted.
pub(super) fn name_span(body: &[u8]) -> Option<Range<usize>> {
    let start = value_at(body, "model")?;
    Some(start..skip_value(body, start)?)
}

/// Where the value of a top-level key begins, in JSON that may be cut anywhere.
pub(super) fn value_at(body: &[u8], wanted: &str) -> Option<usize> {
    let mut at = skip_blanks(body, 0);
    if *body.get(at)? != b'{' {
        return None;
    }
    loop {
        let key = skip_blanks(body, at + 1);
        let key_end = skip_text(body, key)?;
        let colon = skip_blanks(body, key_end);
        let value = skip_blanks(body, colon + 1);
        if is_key(body.get(key..key_end)?, wanted) {
            return Some(value);
        }
        at = skip_blanks(body, skip_value(body, value)?);
        if *body.get(at)? != b',' {
            return None;
        }
    }
}

/// Also with escapes.
fn is_key(key: &[u8], wanted: &str) -> bool {
    let plain = key.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\""));
    let is_escaped =
        || key.contains(&b'\\') && serde_json::from_slice::<String>(key).is_ok_and(|key| key == wanted);
    plain == Some(wanted.as_bytes()) || is_escaped()
}

fn skip_blanks(body: &[u8], from: usize) -> usize {
    let rest = body.get(from..).unwrap_or_default();
    let blanks = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
    from + blanks
}

/// The end of the string at `from`.
fn skip_text(body: &[u8], from: usize) -> Option<usize> {
    if *body.get(from)? != b'"' {
        return None;
    }
    let mut at = from + 1;
    loop {
        match body.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// The end of the value at `from`.
fn skip_value(body: &[u8], from: usize) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = from;
    loop {
        match body.get(at)? {
            b'"' => at = skip_text(body, at)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            // A number, a literal, or text between values.
            _ if depth > 0 => {
                at += 1;
                continue;
            }
            b',' | b'}' | b']' | b' ' | b'\t' | b'\n' | b'\r' => return Some(at),
            _ => {
                at += 1;
                continue;
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// The fields of the top level.
struct Top {
    models: usize,
    model: FieldValue,
    is_stream: bool,
}

enum FieldKey {
    Model,
    Stream,
    Other,
}

/// A value, as far as the front needs it.
enum FieldValue {
    Text(String),
    Bool(bool),
    Other,
}

struct TopVisitor;

impl<'de> Visitor<'de> for TopVisitor {
    type Value = Top;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object with a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Top, A::Error> {
        let mut top = Top { models: 0, model: FieldValue::Other, is_stream: false };
        while let Some(key) = map.next_key()? {
            match key {
                FieldKey::Model => {
                    top.models += 1;
                    top.model = map.next_value()?;
                }
                FieldKey::Stream => top.is_stream = matches!(map.next_value()?, FieldValue::Bool(true)),
                FieldKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(top)
    }
}

impl<'de> Deserialize<'de> for FieldKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl Visitor<'_> for KeyVisitor {
            type Value = FieldKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<FieldKey, E> {
                Ok(match key {
                    "model" => FieldKey::Model,
                    "stream" => FieldKey::Stream,
                    _ => FieldKey::Other,
                })
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

impl<'de> Deserialize<'de> for FieldValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ValueVisitor;
        impl<'de> Visitor<'de> for ValueVisitor {
            type Value = FieldValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<FieldValue, E> {
                Ok(FieldValue::Text(text.to_owned()))
            }

            fn visit_bool<E>(self, is_true: bool) -> Result<FieldValue, E> {
                Ok(FieldValue::Bool(is_true))
            }

            fn visit_u64<E>(self, _: u64) -> Result<FieldValue, E> {
                Ok(FieldValue::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<FieldValue, E> {
                Ok(FieldValue::Other)
            }

            fn visit_f64<E>(self, _: f64) -> Result<FieldValue, E> {
                Ok(FieldValue::Other)
            }

            fn visit_unit<E>(self) -> Result<FieldValue, E> {
                Ok(FieldValue::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<FieldValue, A::Error> {
                while all.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FieldValue::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<FieldValue, A::Error> {
                while all.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(FieldValue::Other)
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, _: D) -> Result<FieldValue, D::Error> {
                Err(D::Error::custom("JSON has no such value"))
            }
        }
        deserializer.deserialize_any(ValueVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(body: &str) -> Result<String, BodyError> {
        parse(body.as_bytes()).map(|fields| fields.name)
    }

    #[test]
    fn the_model_is_that_of_the_top_level_however_it_is_written() {
        for body in [
            r#"{"model":"a"}"#,
            " \n{ \"model\"\t:\r\n\"a\" , \"stream\" : true}\n",
            r#"{"messages":[{"model":"b"},"model"],"x":{"model":"c"},"model":"a"}"#,
            r#"{"mod\u0065l":"\u0061","x":"}\"{"}"#,
            r#"{"x":-1.5e+3,"y":null,"z":[],"w":"\ud800","model":"a"}"#,
        ] {
            assert_eq!(name(body).as_deref(), Ok("a"), "{body}");
            let span = name_span(body.as_bytes()).unwrap();
            assert_eq!(serde_json::from_str::<String>(&body[span]).unwrap(), "a", "{body}");
        }
    }

    #[test]
    fn what_asks_for_nothing_says_why() {
        assert_eq!(name("{}"), Err(BodyError::NoModel));
        assert_eq!(name(r#"{"x":{"model":"a"}}"#), Err(BodyError::NoModel));
        for value in ["1", "-1", "1.5", "null", "true", "[]", "{}", r#"["a"]"#, r#"{"a":1}"#] {
            assert_eq!(name(&format!("{{\"model\":{value}}}")), Err(BodyError::NotString), "{value}");
        }
        assert_eq!(name(r#"{"model":"a","mod\u0065l":"b"}"#), Err(BodyError::Duplicate));
        for body in [
            "",
            "x",
            "[]",
            "\"model\"",
            "{",
            r#"{"model":"a"} x"#,
            r#"{"model":"a",}"#,
            "{\"model\":\"a\n\"}",
        ] {
            assert!(matches!(name(body), Err(BodyError::NotJson(_))), "{body}");
        }
    }

    #[test]
    fn deep_bodies_are_read_without_a_deep_stack() {
        let deep = format!("{{\"x\":{}1{},\"model\":\"a\"}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert_eq!(name(&deep).as_deref(), Ok("a"));
        assert_eq!(&deep[name_span(deep.as_bytes()).unwrap()], "\"a\"");
    }

    #[test]
    fn only_true_is_a_stream() {
        for (value, is_stream) in
            [("true", true), ("false", false), ("1", false), ("\"true\"", false), ("null", false)]
        {
            let body = format!("{{\"stream\":{value},\"model\":\"a\"}}");
            assert_eq!(parse(body.as_bytes()).unwrap().is_stream, is_stream, "{value}");
        }
    }
}
