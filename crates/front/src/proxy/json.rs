//! The fields of a request body that the front needs.
//!
//! The body is parsed once, which also proves that it is JSON. The positions of its fields are searched only if one of
//! them has to be changed.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct RequestFields {
    /// The model's; `None` if there is none.
    pub(super) name: Option<String>,
    pub(super) is_stream: bool,
    pub(super) prompt: PromptPlaces,
}

/// Where a body says what belongs together. Nothing of it is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PromptPlaces {
    /// The value of `prompt_cache_key`, by which clients say it themselves.
    pub(super) cache_key: Option<usize>,
    /// The value of `messages`, `prompt` or `input`.
    pub(super) prompt: Option<usize>,
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
    let top = top.map_err(|error| BodyError::NotJson(error.to_string()))?;
    let Top { is_stream, cache_key, prompt, .. } = top;
    let value = |key: Option<&str>| key.and_then(|key| value_behind(body, key));
    let prompt = PromptPlaces { cache_key: value(cache_key), prompt: value(prompt) };
    match top {
        Top { models: 0, .. } => Ok(RequestFields { name: None, is_stream, prompt }),
        Top { models: 1, model: FieldValue::Text(name), .. } => {
            Ok(RequestFields { name: Some(name), is_stream, prompt })
        }
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
    let mut scan = Scan::new(body);
    loop {
        let (key, value) = scan.key()?;
        if is_key(body.get(key)?, |key| key == wanted) {
            return Some(value);
        }
        scan.skip(value)?;
    }
}

/// Where the value of a key begins that was read from this body, without escapes.
fn value_behind(body: &[u8], key: &str) -> Option<usize> {
    let start = key.as_ptr().addr().checked_sub(body.as_ptr().addr())?;
    // Behind its last quote.
    let colon = skip_blanks(body, start + key.len() + 1);
    body.get(colon).filter(|byte| **byte == b':').map(|_| skip_blanks(body, colon + 1))
}

/// A key and its value, as the body has them.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// With quotes.
    key: Range<usize>,
    pub(super) value: Range<usize>,
}

impl Member {
    pub(super) fn start(&self) -> usize {
        self.key.start
    }

    pub(super) fn has_key(&self, body: &[u8], is_it: impl Fn(&str) -> bool) -> bool {
        is_key(body.get(self.key.clone()).unwrap_or_default(), is_it)
    }
}

/// The members of the top level, in a body that [`parse`] accepted.
pub(super) fn members(body: &[u8]) -> impl Iterator<Item = Member> {
    let mut scan = Scan::new(body);
    std::iter::from_fn(move || {
        let (key, value) = scan.key()?;
        let end = scan.skip(value)?;
        Some(Member { key, value: value..end })
    })
}

/// Walks along the top level.
struct Scan<'a> {
    body: &'a [u8],
    /// The brace, or the comma behind the member before.
    at: Option<usize>,
}

impl<'a> Scan<'a> {
    fn new(body: &'a [u8]) -> Self {
        let begin = skip_blanks(body, 0);
        Self { body, at: body.get(begin).filter(|byte| **byte == b'{').map(|_| begin) }
    }

    /// The next key, and where its value begins.
    fn key(&mut self) -> Option<(Range<usize>, usize)> {
        let key = skip_blanks(self.body, self.at.take()? + 1);
        let key = key..skip_text(self.body, key)?;
        let colon = skip_blanks(self.body, key.end);
        Some((key, skip_blanks(self.body, colon + 1)))
    }

    /// The end of the value.
    fn skip(&mut self, value: usize) -> Option<usize> {
        let end = skip_value(self.body, value)?;
        let next = skip_blanks(self.body, end);
        self.at = self.body.get(next).filter(|byte| **byte == b',').map(|_| next);
        Some(end)
    }
}

/// Also with escapes.
fn is_key(key: &[u8], is_it: impl Fn(&str) -> bool) -> bool {
    if key.contains(&b'\\') {
        return serde_json::from_slice::<String>(key).is_ok_and(|key| is_it(&key));
    }
    let plain = key.strip_prefix(b"\"").and_then(|key| key.strip_suffix(b"\""));
    plain.and_then(|key| std::str::from_utf8(key).ok()).is_some_and(is_it)
}

pub(super) fn skip_blanks(body: &[u8], from: usize) -> usize {
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
pub(super) fn skip_value(body: &[u8], from: usize) -> Option<usize> {
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
struct Top<'de> {
    models: usize,
    model: FieldValue,
    is_stream: bool,
    /// Keys as the body has them, so that it is known where they are.
    cache_key: Option<&'de str>,
    prompt: Option<&'de str>,
}

enum FieldKey<'de> {
    Model,
    Stream,
    CacheKey(&'de str),
    Prompt(&'de str),
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
    type Value = Top<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object with a model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Top<'de>, A::Error> {
        let (model, is_stream) = (FieldValue::Other, false);
        let mut top = Top { models: 0, model, is_stream, cache_key: None, prompt: None };
        while let Some(key) = map.next_key()? {
            match key {
                FieldKey::Model => {
                    top.models += 1;
                    top.model = map.next_value()?;
                }
                FieldKey::Stream => top.is_stream = matches!(map.next_value()?, FieldValue::Bool(true)),
                FieldKey::CacheKey(key) => {
                    top.cache_key = Some(key);
                    map.next_value::<IgnoredAny>()?;
                }
                FieldKey::Prompt(key) => {
                    top.prompt = Some(key);
                    map.next_value::<IgnoredAny>()?;
                }
                FieldKey::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(top)
    }
}

impl<'de> Deserialize<'de> for FieldKey<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = FieldKey<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }

            fn visit_borrowed_str<E: serde::de::Error>(self, key: &'de str) -> Result<FieldKey<'de>, E> {
                match key {
                    "prompt_cache_key" => Ok(FieldKey::CacheKey(key)),
                    "messages" | "prompt" | "input" => Ok(FieldKey::Prompt(key)),
                    _ => self.visit_str(key),
                }
            }

            // With escapes, so its place is not known.
            fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<FieldKey<'de>, E> {
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
        parse(body.as_bytes())?.name.ok_or(BodyError::NoModel)
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
