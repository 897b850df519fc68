//! Generated text in the format of Anthropic's messages.

use serde_json::{Value, json};

use super::Shape;
use crate::delta::Finish;

impl Shape {
    /// With its text and how it ended, once it has.
    pub(super) fn message(&self, is_begun: bool) -> Value {
        let content = if is_begun { json!([]) } else { json!([{ "type": "text", "text": self.text() }]) };
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": if is_begun { None } else { self.stop_reason() },
            "stop_sequence": null,
            "usage": { "input_tokens": self.prompt_tokens, "output_tokens": self.completion_tokens },
        })
    }

    pub(super) fn message_opening(&self) -> String {
        let block = json!({ "type": "text", "text": "" });
        event("message_start", json!({ "message": self.message(true) }))
            + &event("content_block_start", json!({ "index": 0, "content_block": block }))
    }

    pub(super) fn message_chunk(text: &str) -> String {
        let delta = json!({ "type": "text_delta", "text": text });
        event("content_block_delta", json!({ "index": 0, "delta": delta }))
    }

    pub(super) fn message_closing(&self) -> String {
        let delta = json!({ "stop_reason": self.stop_reason(), "stop_sequence": null });
        let usage = json!({ "output_tokens": self.completion_tokens });
        event("content_block_stop", json!({ "index": 0 }))
            + &event("message_delta", json!({ "delta": delta, "usage": usage }))
            + &event("message_stop", json!({}))
    }

    fn stop_reason(&self) -> Option<&'static str> {
        self.choices.first().and_then(|choice| choice.finish).map(|finish| match finish {
            Finish::Stop => "end_turn",
            Finish::Length => "max_tokens",
            Finish::Abort => "abort",
        })
    }
}

fn event(kind: &str, mut value: Value) -> String {
    value["type"] = json!(kind);
    format!("event: {kind}\ndata: {value}\n\n")
}
