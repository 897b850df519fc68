//! A generated text as it comes, by server-sent events of OpenAI's API.

use serde_json::{Value, json};

use crate::config::CanaryKind;

/// Of one choice.
pub(super) struct Parts {
    kind: CanaryKind,
    /// The beginning of a line.
    line: Vec<u8>,
    text: String,
    reasoning: String,
    finish: Value,
    has_begun: bool,
}

impl Parts {
    pub(super) fn of(kind: CanaryKind) -> Self {
        let (line, text, reasoning) = Default::default();
        Self { kind, line, text, reasoning, finish: Value::Null, has_begun: false }
    }

    /// The text so far, without what was thought.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the text has grown.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        let before = self.text.len();
        self.line.extend_from_slice(bytes);
        while let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.line.drain(..=end).collect();
            if let Some(data) = line.trim_ascii().strip_prefix(b"data:")
                && let Ok(event) = serde_json::from_slice::<Value>(data)
            {
                self.take(&event);
            }
        }
        self.text.len() > before
    }

    fn take(&mut self, event: &Value) {
        self.has_begun = true;
        let choice = &event["choices"][0];
        if choice["finish_reason"].is_string() {
            self.finish = choice["finish_reason"].clone();
        }
        if self.kind == CanaryKind::Chat {
            let delta = &choice["delta"];
            self.text.push_str(delta["content"].as_str().unwrap_or_default());
            let thought = ["reasoning_content", "reasoning"].iter().find_map(|name| delta[*name].as_str());
            self.reasoning.push_str(thought.unwrap_or_default());
        } else {
            self.text.push_str(choice["text"].as_str().unwrap_or_default());
        }
    }

    /// As an answer without a stream is; `None` where no event came.
    pub(super) fn whole(&self) -> Option<Value> {
        let message = json!({ "content": self.text, "reasoning_content": self.reasoning });
        let choice = json!({ "text": self.text, "message": message, "finish_reason": self.finish });
        self.has_begun.then(|| json!({ "choices": [choice] }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_the_same_in_any_parts() {
        let event = |text: &str, finish: Value| {
            let choice = json!({ "text": text, "delta": { "content": text }, "finish_reason": finish });
            format!("data: {}\r\n\r\n", json!({ "choices": [choice] }))
        };
        let whole = event(" 7,", Value::Null)
            + ": comment\n\n"
            + &event(" 8, ä", json!("length"))
            + "data: [DONE]\n\n";
        for kind in [CanaryKind::Completion, CanaryKind::Chat] {
            for size in [1, 2, 7, 1000] {
                let mut parts = Parts::of(kind);
                let mut seen = Vec::new();
                for bytes in whole.as_bytes().chunks(size) {
                    if parts.push(bytes) {
                        seen.push(parts.text().to_owned());
                    }
                }
                assert_eq!(seen.last().unwrap(), " 7, 8, ä");
                assert!(size > 7 || seen[0] == " 7,");
                let content = kind.content(&parts.whole().unwrap()).unwrap();
                assert_eq!(content, crate::engine::Content::Text(" 7, 8, ä".to_owned()));
            }
        }
    }

    #[test]
    fn what_was_only_thought_counts_as_without_a_stream() {
        let mut parts = Parts::of(CanaryKind::Chat);
        assert!(parts.whole().is_none());
        let delta = json!({ "reasoning": "Seven?" });
        let event = json!({ "choices": [{ "delta": delta, "finish_reason": "length" }] });
        assert!(!parts.push(format!("data: {event}\n\n").as_bytes()));
        let content = CanaryKind::Chat.content(&parts.whole().unwrap()).unwrap();
        assert_eq!(content, crate::engine::Content::Text("Seven?".to_owned()));
    }
}
