//! The fields of a form (`multipart/form-data`) that the front needs: its model, and whether it asks for a stream.
//!
//! Stricter than RFC 7578, so that no engine reads a form in another way. It has no preamble and no padding, and one
//! `Content-Disposition` for each part.

use std::ops::Range;

use super::json::{BodyError, PromptPlaces, RequestFields};

const PARTS_MAX: usize = 256;
/// For the headers of one part.
const HEAD_MAX_BYTES: usize = 8 << 10;
/// By RFC 2046.
const BOUNDARY_MAX: usize = 70;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) fields: RequestFields,
    /// The value of `model`.
    pub(super) model: Range<usize>,
}

/// Of a `Content-Type`; `None` if that is another type.
pub(super) fn boundary(kind: &str) -> Option<&str> {
    let (kind, parameters) = kind.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let mut boundaries = parameters.split(';').filter_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim())
    });
    let only = boundaries.next().filter(|_| boundaries.next().is_none())?;
    let plain = only.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(only);
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=?".contains(&byte);
    ((1..=BOUNDARY_MAX).contains(&plain.len()) && plain.bytes().all(is_plain)).then_some(plain)
}

pub(super) fn parse(body: &[u8], boundary: &str) -> Result<Form, BodyError> {
    let malformed = |why: &str| BodyError::NotForm(why.to_owned());
    let delimiter = format!("\r\n--{boundary}");
    let delimiter = delimiter.as_bytes();
    if !body.starts_with(&delimiter[2..]) {
        return Err(malformed("it does not begin with its boundary"));
    }
    let mut at = delimiter.len() - 2;
    let (mut model, mut is_stream) = (None, false);
    for _ in 0..PARTS_MAX {
        let rest = body.get(at..).unwrap_or_default();
        if matches!(rest, b"--" | b"--\r\n") {
            let model: Range<usize> = model.ok_or(BodyError::NoModel)?;
            let name = body.get(model.clone()).and_then(|name| std::str::from_utf8(name).ok());
            let name = name.ok_or(BodyError::NotString)?.to_owned();
            return Ok(Form {
                fields: RequestFields { name: Some(name), is_stream, prompt: PromptPlaces::default() },
                model,
            });
        }
        if !rest.starts_with(b"\r\n") {
            return Err(malformed("something follows a boundary in its line"));
        }
        // The line break before the headers may also be the one that ends them.
        let head = rest.get(..rest.len().min(HEAD_MAX_BYTES)).unwrap_or_default();
        let head_len =
            find(head, b"\r\n\r\n").ok_or_else(|| malformed("a part has no end of its headers"))?;
        let value = at + head_len + 4;
        let len = find(body.get(value..).unwrap_or_default(), delimiter);
        let end = value + len.ok_or_else(|| malformed("it ends without its boundary"))?;
        let part = part(head.get(2..head_len.max(2)).unwrap_or_default())
            .ok_or_else(|| malformed("a part has no single, plain Content-Disposition"))?;
        match part.name {
            "model" if part.is_file => return Err(BodyError::NotString),
            "model" if model.replace(value..end).is_some() => return Err(BodyError::Duplicate),
            "stream" => is_stream = body.get(value..end).is_some_and(|is| is.eq_ignore_ascii_case(b"true")),
            _ => {}
        }
        at = end + delimiter.len();
    }
    Err(malformed("it has too many parts"))
}

fn find(within: &[u8], what: &[u8]) -> Option<usize> {
    let first = *what.first()?;
    let mut at = 0;
    loop {
        let rest = within.get(at..)?;
        at += rest.iter().position(|byte| *byte == first)?;
        if within.get(at..)?.starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
}

struct FormPart<'a> {
    name: &'a str,
    /// Or in an encoding.
    is_file: bool,
}

/// From the headers of a part.
fn part(head: &[u8]) -> Option<FormPart<'_>> {
    let head = std::str::from_utf8(head).ok()?;
    let mut only = None;
    let mut is_encoded = false;
    for line in head.split("\r\n") {
        // Other line breaks, and a line that continues the last one, are read in several ways.
        if line.contains(['\r', '\n']) || line.starts_with([' ', '\t']) {
            return None;
        }
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-disposition") && only.replace(value).is_some() {
            return None;
        }
        is_encoded |= name.eq_ignore_ascii_case("content-transfer-encoding") && !is_identity(value);
    }
    let mut rest = only?.trim().strip_prefix("form-data")?.trim_start();
    let (mut name, mut is_file) = (None, is_encoded);
    while !rest.is_empty() {
        let (key, value) = rest.strip_prefix(';')?.split_once('=')?;
        let (value, after) = quoted(value)?;
        match key.trim().to_ascii_lowercase().as_str() {
            "name" if name.replace(value).is_some() => return None,
            "filename" | "filename*" => is_file = true,
            // Extended and continued parameters are another way to write a name.
            key if key.contains('*') => return None,
            _ => {}
        }
        rest = after.trim_start();
    }
    // An escaped name could be read in two ways.
    Some(FormPart { name: name.filter(|name| !name.contains(['\\', '%']))?, is_file })
}

/// By RFC 2045, these leave the bytes as they are.
fn is_identity(encoding: &str) -> bool {
    ["7bit", "8bit", "binary"].iter().any(|one| encoding.trim().eq_ignore_ascii_case(one))
}

/// A value, quoted or not, and what is behind it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let Some(rest) = text.strip_prefix('"') else {
        return Some(text.split_at(text.find(';').unwrap_or(text.len())));
    };
    let mut is_escaped = false;
    let end = rest.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    })?;
    Some((rest.get(..end)?, rest.get(end + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of parts with headers, a blank line and a value.
    fn form(parts: &[&str]) -> String {
        let parts: String =
            parts.iter().map(|part| format!("--B\r\n{}\r\n", part.replace('|', "\r\n"))).collect();
        parts + "--B--\r\n"
    }

    const MODEL: &str = "Content-Disposition: form-data; name=\"model\"||a";

    fn name(parts: &[&str]) -> Result<String, BodyError> {
        parse(form(parts).as_bytes(), "B").map(|form| form.fields.name.unwrap())
    }

    #[test]
    fn boundaries_are_plain() {
        for kind in ["multipart/form-data; boundary=B", "Multipart/Form-Data;charset=utf-8; Boundary=\"B\""] {
            assert_eq!(boundary(kind), Some("B"), "{kind}");
        }
        for kind in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=B; boundary=C",
            "multipart/form-data; boundary=\"a b\"",
            "multipart/mixed; boundary=B",
            "application/json",
        ] {
            assert_eq!(boundary(kind), None, "{kind}");
        }
    }

    #[test]
    fn the_model_is_found_in_any_place() {
        let file = "Content-Disposition: form-data; name=\"file\"; filename=\"a\\\"; name=\\\"model.wav\"|\
                    Content-Type: audio/wav||RIFF--B|x||Content-Disposition: form-data; name=\"model\"||b";
        for parts in [&[MODEL, file][..], &[file, MODEL], &["content-disposition:form-data;name=model||a"]] {
            assert_eq!(name(parts).as_deref(), Ok("a"), "{parts:?}");
            let text = form(parts);
            assert_eq!(&text[parse(text.as_bytes(), "B").unwrap().model], "a");
        }
        for encoding in ["binary", "8BIT", " 7bit"] {
            let part = MODEL.replace("||", &format!("|Content-Transfer-Encoding:{encoding}||"));
            assert_eq!(name(&[&part]).as_deref(), Ok("a"), "{encoding}");
        }
        let stream = "Content-Disposition: form-data; name=\"stream\"||true";
        assert!(parse(form(&[stream, MODEL]).as_bytes(), "B").unwrap().fields.is_stream);
        assert!(!parse(form(&[MODEL]).as_bytes(), "B").unwrap().fields.is_stream);
    }

    #[test]
    fn what_has_two_meanings_is_refused() {
        assert_eq!(name(&[MODEL, MODEL]), Err(BodyError::Duplicate));
        assert_eq!(name(&[]), Err(BodyError::NoModel));
        for part in [
            "Content-Disposition: form-data; name=\"model\"; filename=\"a\"||a",
            "Content-Disposition: form-data; name=\"model\"; filename*=utf-8''a||a",
            "Content-Disposition: form-data; name=\"model\"|Content-Transfer-Encoding: base64||YQ==",
        ] {
            assert_eq!(name(&[part]), Err(BodyError::NotString), "{part}");
        }
        for part in [
            "||a",
            "X: y||a",
            "Content-Disposition: form-data||a",
            "Content-Disposition: attachment; name=\"model\"||a",
            "Content-Disposition: form-data; name=\"model||a",
            "Content-Disposition: form-data; name=\"mod\\el\"||a",
            "Content-Disposition: form-data; name=\"x\"; name=\"model\"||a",
            "Content-Disposition: form-data; name=\"x\"; name*=utf-8''model||a",
            "Content-Disposition: form-data; name=\"x\"; name*0=\"model\"||a",
            "Content-Disposition: form-data; name=\"x\"|X: y\nContent-Disposition: form-data; name=\"model\"||a",
            "Content-Disposition: form-data; name=\"x\"| ; name=\"model\"||a",
            "Content-Disposition: form-data; name=\"x\"|Content-Disposition: form-data; name=\"model\"||a",
            "Content-Disposition: form-data; name=\"model\"||a|--Bx",
            "Content-Disposition: form-data; name=\"model\"",
        ] {
            assert!(matches!(name(&[part]), Err(BodyError::NotForm(_))), "{part}");
        }
        let whole = form(&[MODEL]);
        for text in [
            "",
            "--B",
            "--B--x",
            &whole[..whole.len() - 6],
            &format!("preamble\r\n{whole}"),
            &format!("{whole}more"),
        ] {
            assert!(parse(text.as_bytes(), "B").is_err(), "{text}");
        }
        let many = form(&vec!["Content-Disposition: form-data; name=\"x\"||"; PARTS_MAX + 1]);
        assert!(matches!(parse(many.as_bytes(), "B"), Err(BodyError::NotForm(_))));
    }
}
