//! Generated text in the formats of OpenAI's API, and of Anthropic's messages.
//!
//! The same request gives the same bytes. `created` is always 0, and the identifier is `X-Request-Id`, or a
//! hash of the body.

mod message;

use serde_json::{Value, json};

use crate::delta::{Delta, Finish};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    Completion,
    Chat,
    Response,
    Message,
}

/// An answer while it is generated.
#[derive(Debug)]
pub(crate) struct Shape {
    kind: AnswerKind,
    id: String,
    model: String,
    prompt_tokens: u64,
    /// Whether a stream ends with the usage.
    includes_usage: bool,
    choices: Vec<Choice>,
    completion_tokens: u64,
    /// Events sent.
    events: u64,
}

#[derive(Debug, Clone, Default)]
struct Choice {
    text: String,
    finish: Option<Finish>,
}

impl Shape {
    pub(crate) fn new(kind: AnswerKind, id: &str, model: &str, choices: usize, prompt_tokens: u64) -> Self {
        let prefix = match kind {
            AnswerKind::Completion => "cmpl-",
            AnswerKind::Chat => "chatcmpl-",
            AnswerKind::Response => "resp_",
            AnswerKind::Message => "msg_",
        };
        Self {
            kind,
            id: format!("{prefix}{id}"),
            model: model.to_owned(),
            prompt_tokens,
            includes_usage: false,
            choices: vec![Choice::default(); choices],
            completion_tokens: 0,
            events: 0,
        }
    }

    pub(crate) fn including_usage(mut self, includes_usage: bool) -> Self {
        self.includes_usage = includes_usage;
        self
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    pub(crate) fn take(&mut self, delta: &Delta) {
        self.completion_tokens += u64::from(delta.text.is_some());
        if let Some(choice) = self.choices.get_mut(delta.choice) {
            choice.text.push_str(delta.text.as_deref().unwrap_or_default());
            choice.finish = delta.finish;
        }
    }

    /// The whole answer.
    pub(crate) fn whole(&self) -> Value {
        match self.kind {
            AnswerKind::Response => return self.response(None),
            AnswerKind::Message => return self.message(false),
            AnswerKind::Completion | AnswerKind::Chat => {}
        }
        let choices: Vec<Value> =
            (0..).zip(&self.choices).map(|(at, choice)| self.choice(at, choice)).collect();
        let object = if self.kind == AnswerKind::Chat { "chat.completion" } else { "text_completion" };
        let mut whole = self.envelope(object, &json!(choices));
        whole["usage"] = self.usage();
        whole
    }

    fn choice(&self, index: usize, choice: &Choice) -> Value {
        let mut value = json!({ "index": index, "logprobs": null, "finish_reason": name(choice.finish) });
        if self.kind == AnswerKind::Chat {
            value["message"] = json!({ "role": "assistant", "content": choice.text });
        } else {
            value["text"] = json!(choice.text);
        }
        value
    }

    /// The start of a stream.
    pub(crate) fn opening(&mut self) -> String {
        match self.kind {
            AnswerKind::Completion => String::new(),
            AnswerKind::Message => self.message_opening(),
            AnswerKind::Chat => {
                let delta = json!({ "role": "assistant", "content": "" });
                let choices =
                    json!([{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": null }]);
                data(&self.envelope("chat.completion.chunk", &choices))
            }
            AnswerKind::Response => {
                let response = self.response(Some("in_progress"));
                let item = self.item("in_progress", &json!([]));
                let part = json!({ "type": "output_text", "text": "", "annotations": [] });
                [
                    self.event("response.created", json!({ "response": response })),
                    self.event("response.in_progress", json!({ "response": response })),
                    self.event("response.output_item.added", json!({ "output_index": 0, "item": item })),
                    self.event("response.content_part.added", self.in_part("part", &part)),
                ]
                .concat()
            }
        }
    }

    /// A token as part of a stream, after it was added.
    pub(crate) fn chunk(&mut self, delta: &Delta) -> String {
        let text = delta.text.as_deref();
        let finish = name(delta.finish);
        match self.kind {
            AnswerKind::Completion => {
                let text = text.unwrap_or_default();
                let choice =
                    json!({ "index": delta.choice, "text": text, "logprobs": null, "finish_reason": finish });
                data(&self.envelope("text_completion", &json!([choice])))
            }
            AnswerKind::Chat => {
                let content = text.map_or(json!({}), |text| json!({ "content": text }));
                let choice = json!({ "index": delta.choice, "delta": content, "logprobs": null, "finish_reason": finish });
                data(&self.envelope("chat.completion.chunk", &json!([choice])))
            }
            AnswerKind::Message => text.map_or(String::new(), Self::message_chunk),
            AnswerKind::Response => text.map_or(String::new(), |text| {
                self.event("response.output_text.delta", self.in_part("delta", &json!(text)))
            }),
        }
    }

    /// The end of a stream, after each choice has ended.
    pub(crate) fn closing(&mut self) -> String {
        if self.kind == AnswerKind::Message {
            return self.message_closing();
        }
        let usage = if self.includes_usage && self.kind != AnswerKind::Response {
            let object =
                if self.kind == AnswerKind::Chat { "chat.completion.chunk" } else { "text_completion" };
            let mut last = self.envelope(object, &json!([]));
            last["usage"] = self.usage();
            data(&last)
        } else {
            String::new()
        };
        if self.kind != AnswerKind::Response {
            return usage + "data: [DONE]\n\n";
        }
        let text = self.text();
        let part = json!({ "type": "output_text", "text": text, "annotations": [] });
        let item = self.item(self.status(), &json!([part]));
        let response = self.response(None);
        let last = format!("response.{}", self.status());
        [
            self.event("response.output_text.done", self.in_part("text", &json!(text))),
            self.event("response.content_part.done", self.in_part("part", &part)),
            self.event("response.output_item.done", json!({ "output_index": 0, "item": item })),
            self.event(&last, json!({ "response": response })),
        ]
        .concat()
    }

    fn envelope(&self, object: &str, choices: &Value) -> Value {
        json!({ "id": self.id, "object": object, "created": 0, "model": self.model, "choices": choices })
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        })
    }

    fn text(&self) -> String {
        self.choices.iter().map(|choice| choice.text.as_str()).collect()
    }

    fn status(&self) -> &'static str {
        let has_stopped = self.choices.iter().all(|choice| choice.finish == Some(Finish::Stop));
        if has_stopped { "completed" } else { "incomplete" }
    }

    /// A response as it is now, or an empty one with this status.
    fn response(&self, begun: Option<&str>) -> Value {
        let status = begun.unwrap_or(self.status());
        let (output, usage) = if begun.is_some() {
            (json!([]), Value::Null)
        } else {
            let part = json!({ "type": "output_text", "text": self.text(), "annotations": [] });
            let usage = json!({
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": { "cached_tokens": 0 },
                "output_tokens": self.completion_tokens,
                "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": self.prompt_tokens + self.completion_tokens,
            });
            (json!([self.item(status, &json!([part]))]), usage)
        };
        let why = match self.choices.first().and_then(|choice| choice.finish) {
            Some(Finish::Length) => json!({ "reason": "max_output_tokens" }),
            Some(Finish::Abort) => json!({ "reason": "abort" }),
            Some(Finish::Stop) | None => Value::Null,
        };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": 0,
            "status": status,
            "error": null,
            "incomplete_details": if begun.is_some() { Value::Null } else { why },
            "model": self.model,
            "output": output,
            "parallel_tool_calls": true,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        })
    }

    fn item_id(&self) -> String {
        format!("msg_{}", self.id.strip_prefix("resp_").unwrap_or(&self.id))
    }

    fn item(&self, status: &str, content: &Value) -> Value {
        let id = self.item_id();
        json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
    }

    /// An event's value about the only part of the only item.
    fn in_part(&self, name: &str, value: &Value) -> Value {
        json!({ "item_id": self.item_id(), "output_index": 0, "content_index": 0, name: value })
    }

    fn event(&mut self, kind: &str, mut value: Value) -> String {
        value["type"] = json!(kind);
        value["sequence_number"] = json!(self.events);
        self.events += 1;
        format!("event: {kind}\ndata: {value}\n\n")
    }
}

fn name(finish: Option<Finish>) -> Option<&'static str> {
    finish.map(Finish::name)
}

fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}
