//! Token counts in an answer, read from the bytes that pass.
//!
//! Promises: no byte is delayed or changed. At most the first and the last `WINDOW_BYTES` of an answer are copied. Text
//! that a model wrote is never taken for a count.

use crate::requests::Tokens;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Deserialize;

/// Engines send their counts within so many bytes of the end of an answer.
const WINDOW_BYTES: usize = 4 << 10;
/// A quote within a text is escaped, so this is a key.
const KEY: &[u8] = b"\"usage\"";

/// The two ends of an answer.
#[derive(Debug, Default)]
pub(super) struct UsageReader {
    head: Vec<u8>,
    tail: Vec<u8>,
}

/// By OpenAI's names, and by those of its responses and of Anthropic.
#[derive(Debug, Deserialize)]
struct Counts {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

impl UsageReader {
    /// `None` for answers without counts: errors, and what is neither JSON nor events.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap) -> Option<Self> {
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let kind = text(header::CONTENT_TYPE)?.split(';').next().unwrap_or_default().trim();
        let is_counted = ["application/json", "text/event-stream"]
            .iter()
            .any(|counted| kind.eq_ignore_ascii_case(counted));
        let is_plain =
            text(header::CONTENT_ENCODING).is_none_or(|coding| coding.eq_ignore_ascii_case("identity"));
        (status.is_success() && is_counted && is_plain).then(Self::default)
    }

    pub(super) fn push(&mut self, data: &[u8]) {
        let left = WINDOW_BYTES - self.head.len();
        self.head.extend_from_slice(&data[..data.len().min(left)]);
        let last = &data[data.len().saturating_sub(WINDOW_BYTES)..];
        if self.tail.len() + last.len() > 2 * WINDOW_BYTES {
            let over = (self.tail.len() + last.len()).saturating_sub(WINDOW_BYTES).min(self.tail.len());
            self.tail.drain(..over);
        }
        self.tail.extend_from_slice(last);
    }

    /// The last counts so far. Anthropic's streams count the prompt in their first event.
    pub(super) fn tokens(&self) -> Tokens {
        let mut tokens = last_tokens(&self.tail).unwrap_or_default();
        if tokens.prompt.is_none() {
            tokens.prompt = last_tokens(&self.head).and_then(|first| first.prompt);
        }
        tokens
    }
}

fn last_tokens(bytes: &[u8]) -> Option<Tokens> {
    let mut before = bytes.len();
    loop {
        let at = bytes[..before].windows(KEY.len()).rposition(|window| window == KEY)?;
        let is_escaped = at > 0 && bytes[at - 1] == b'\\';
        if let Some(tokens) = (!is_escaped).then(|| tokens_at(&bytes[at + KEY.len()..])).flatten() {
            return Some(tokens);
        }
        before = at;
    }
}

/// After the key.
fn tokens_at(bytes: &[u8]) -> Option<Tokens> {
    let value = bytes.trim_ascii_start().strip_prefix(b":")?;
    let counts = Counts::deserialize(&mut serde_json::Deserializer::from_slice(value)).ok()?;
    let prompt = counts.prompt_tokens.or(counts.input_tokens);
    let completion = counts.completion_tokens.or(counts.output_tokens);
    (prompt.is_some() || completion.is_some()).then_some(Tokens { prompt, completion })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> (Option<u64>, Option<u64>) {
        let mut reader = UsageReader::default();
        pieces.iter().for_each(|piece| reader.push(piece.as_bytes()));
        assert!(reader.head.len() <= WINDOW_BYTES && reader.tail.len() <= 2 * WINDOW_BYTES);
        let Tokens { prompt, completion } = reader.tokens();
        (prompt, completion)
    }

    #[test]
    fn counts_are_read_in_each_form() {
        let long = "x".repeat(3 * WINDOW_BYTES);
        let content = format!(r#"{{"choices":[{{"text":"{long}"}}],"#);
        for (pieces, wanted) in [
            (
                &[r#"{"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}"#][..],
                (Some(3), Some(5)),
            ),
            (
                &[&content, r#""usage" : {"prompt_tokens":3,"#, r#""completion_tokens":5}}"#],
                (Some(3), Some(5)),
            ),
            (&[r#"{"data":[0.5],"usage":{"prompt_tokens":3,"total_tokens":3}}"#], (Some(3), None)),
            (
                &[r#"{"usage":{"input_tokens":3,"input_tokens_details":{"x":1},"output_tokens":5}}"#],
                (Some(3), Some(5)),
            ),
            (
                &[
                    "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}}\n\n",
                    "data: {\"usage\":null}\n\n",
                    "data: [DONE]\n\n",
                ],
                (Some(3), Some(5)),
            ),
            (
                &[
                    "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4}}\n\n",
                    "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}}\n\n",
                ],
                (Some(3), Some(5)),
            ),
            (
                &[
                    r#"data: {"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1}}}"#,
                    &long,
                    r#"data: {"type":"message_delta","usage":{"output_tokens":5}}"#,
                ],
                (Some(3), Some(5)),
            ),
            (
                &[
                    "",
                    "{}",
                    r#"{"usage":7}"#,
                    r#"{"usage":{"prompt_tokens":-1}}"#,
                    r#"{"usage":{"prompt_tokens":3"#,
                ],
                (None, None),
            ),
        ] {
            assert_eq!(read(pieces), wanted, "{pieces:?}");
            let bytes: Vec<String> = pieces.concat().chars().map(String::from).collect();
            assert_eq!(read(&bytes.iter().map(String::as_str).collect::<Vec<_>>()), wanted, "{pieces:?}");
        }
    }

    #[test]
    fn text_is_no_count() {
        let said = r#"{"text":"{\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":9}} \\","#;
        assert_eq!(read(&[said, r#""x":"usage"}"#]), (None, None));
        assert_eq!(
            read(&[said, r#""usage":{"prompt_tokens":3,"completion_tokens":5}}"#]),
            (Some(3), Some(5))
        );
    }

    #[test]
    fn only_answers_with_counts_are_read() {
        let reads = |status: u16, lines: &[(header::HeaderName, &'static str)]| {
            let headers = lines.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
            UsageReader::of(StatusCode::from_u16(status).unwrap(), &headers.collect()).is_some()
        };
        let kind = header::CONTENT_TYPE;
        assert!(reads(200, &[(kind.clone(), "application/json")]));
        assert!(reads(200, &[(kind.clone(), "Text/Event-Stream; charset=utf-8")]));
        assert!(!reads(400, &[(kind.clone(), "application/json")]));
        assert!(!reads(200, &[(kind.clone(), "audio/wav")]) && !reads(200, &[]));
        assert!(!reads(200, &[(kind, "application/json"), (header::CONTENT_ENCODING, "gzip")]));
    }
}
