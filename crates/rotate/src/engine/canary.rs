//! Requests of a canary, their answers, and whether an answer is right.
//!
//! Each kind asks for what the engine is for: text, a vector, or scores. An unset kind is found by asking: the first of
//! completion, chat, embedding and rerank that the engine serves. Where its command or its list of models says that it
//! embeds or ranks, that comes first.

use http::Method;
use serde_json::{Value, json};

use super::answer::{Answer, Content, numbers};
use super::contract::{EngineError, OnText, is_unserved};
use super::http::{Http, Reply};
use super::parts::Parts;
use crate::config::{Canary, CanaryKind};

/// Unrelated to any usual prompt, so that the scores of a rerank differ.
const OTHER_DOCUMENT: &str = "A river flows through a green valley.";

impl CanaryKind {
    /// The kinds to try in turn: only one if it is configured or known.
    pub(crate) fn candidates(canary: &Canary, known: Option<Self>) -> Vec<Self> {
        if let Some(kind) = canary.kind.or(known) {
            return vec![kind];
        }
        let mut kinds = vec![Self::Completion, Self::Chat];
        if canary.expect.is_none() {
            kinds.extend([Self::Embedding, Self::Rerank]);
            if let Some(at) = kinds.iter().position(|kind| Some(*kind) == canary.hint) {
                kinds[..=at].rotate_right(1);
            }
        }
        kinds
    }

    /// Whether its answer is a text that comes token by token.
    pub(crate) fn is_generation(self) -> bool {
        matches!(self, Self::Completion | Self::Chat)
    }

    /// The path and body of a question by one of OpenAI's paths, or those like them.
    pub(crate) fn question(self, model: &str, prompt: &str, tokens: u32) -> Option<(&'static str, Value)> {
        let generation =
            json!({ "model": model, "max_tokens": tokens, "temperature": 0, "seed": 0, "stream": false });
        match self {
            Self::Completion => Some(("/v1/completions", with(generation, "prompt", json!(prompt)))),
            Self::Chat => {
                let messages = json!([{ "role": "user", "content": prompt }]);
                Some(("/v1/chat/completions", with(generation, "messages", messages)))
            }
            Self::Embedding => Some((
                "/v1/embeddings",
                json!({ "model": model, "input": prompt, "encoding_format": "float" }),
            )),
            Self::Rerank => Some((
                "/v1/rerank",
                json!({ "model": model, "query": prompt, "documents": [prompt, OTHER_DOCUMENT] }),
            )),
            Self::Get | Self::None => None,
        }
    }

    /// Reads the answer to a [`question`](Self::question).
    pub(crate) fn content(self, body: &Value) -> Result<Content, Unreadable> {
        match self {
            Self::Embedding => embedding(body),
            Self::Rerank => scores(body),
            Self::Chat => generated(body, "choices[0].message.content", |choice| {
                let message = &choice["message"];
                let parts = ["content", "reasoning_content", "reasoning"];
                let texts = || parts.iter().filter_map(|part| message[*part].as_str());
                texts().find(|text| !text.is_empty()).or_else(|| texts().next())
            }),
            _ => generated(body, "choices[0].text", |choice| choice["text"].as_str()),
        }
    }
}

/// Why an answer cannot be read.
#[derive(Debug)]
pub(crate) enum Unreadable {
    /// It is not of this kind: worth quoting.
    Foreign(String),
    /// It is, and is wrong.
    Wrong(String),
}

impl Unreadable {
    pub(crate) fn reason(self) -> String {
        match self {
            Self::Foreign(reason) | Self::Wrong(reason) => reason,
        }
    }

    fn about(self, reply: &Reply) -> EngineError {
        match self {
            Self::Foreign(reason) => reply.unexpected_with_excerpt(&reason),
            Self::Wrong(reason) => reply.unexpected(&reason),
        }
    }
}

/// A model's canary.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    served_as: String,
    canary: Canary,
    /// Whether the engine may say in `/v1/models` what it is for.
    lists_capabilities: bool,
}

impl Prompt {
    pub(super) fn new(served_as: &str, canary: &Canary, lists_capabilities: bool) -> Self {
        Self { served_as: served_as.to_owned(), canary: canary.clone(), lists_capabilities }
    }

    /// With what the engine says that it is for, unless the kind is known already.
    async fn read_hint(&self, http: &Http, kind: Option<CanaryKind>) -> Canary {
        let mut canary = self.canary.clone();
        if self.lists_capabilities && kind.or(canary.kind).or(canary.hint).is_none() {
            let list = http.get("/v1/models").await.ok().and_then(|reply| reply.done().ok()?.json().ok()?);
            canary.hint = list.and_then(|list| capability(&list, &self.served_as));
        }
        canary
    }

    pub(super) async fn ask(&self, http: &Http, kind: Option<CanaryKind>) -> Result<Answer, EngineError> {
        let mut unserved = Vec::new();
        for kind in CanaryKind::candidates(&self.read_hint(http, kind).await, kind) {
            let asked = self.ask_as(http, kind).await;
            match asked {
                Err(EngineError::Refused { request_line, status, message })
                    if is_unserved(status, &message) =>
                {
                    unserved.push((request_line, status, message));
                }
                other => return other.map(|content| Answer { kind, content }),
            }
        }
        let others = unserved.len().saturating_sub(1);
        let mut unserved = unserved.into_iter();
        let Some((request_line, status, message)) = unserved.next() else {
            return Err(EngineError::Unexpected {
                request_line: format!("the canary of `{}`", self.served_as),
                reason: "it has no kind to ask by".to_owned(),
            });
        };
        if others == 0 {
            return Err(EngineError::Refused { request_line, status, message });
        }
        let paths: Vec<String> = unserved.map(|(line, status, _)| format!("{line}: {status}")).collect();
        let reason = format!(
            "it answered {status}: {message}; it serves no other canary either ({}); say `kind` under \
             [model.canary], or check served_as",
            paths.join(", ")
        );
        Err(EngineError::Unexpected { request_line, reason })
    }

    /// One kind, with the text so far as it comes.
    pub(super) async fn ask_in_parts(
        &self,
        http: &Http,
        kind: CanaryKind,
        on_text: OnText<'_>,
    ) -> Result<Answer, EngineError> {
        let canary = &self.canary;
        let question = kind.question(&self.served_as, &canary.prompt, canary.tokens);
        let Some((path, body)) = question.filter(|_| kind.is_generation()) else {
            return self.ask_as(http, kind).await.map(|content| Answer { kind, content });
        };
        let mut parts = Parts::of(kind);
        let on_part = &mut |part: &[u8]| {
            if parts.push(part) {
                on_text(parts.text());
            }
        };
        let asked = Some(with(body, "stream", json!(true)));
        let reply = http.send_for_parts(Method::POST, path, asked, on_part).await?.done()?;
        // Not every engine has streams.
        let body = match parts.whole() {
            Some(whole) => whole,
            None => reply.json()?.unwrap_or(Value::Null),
        };
        let content = kind.content(&body).map_err(|unreadable| unreadable.about(&reply))?;
        Ok(Answer { kind, content })
    }

    async fn ask_as(&self, http: &Http, kind: CanaryKind) -> Result<Content, EngineError> {
        let canary = &self.canary;
        if let Some((path, body)) = kind.question(&self.served_as, &canary.prompt, canary.tokens) {
            let reply = http.post(path, Some(body)).await?.done()?;
            let body = reply.json()?.unwrap_or(Value::Null);
            return kind.content(&body).map_err(|unreadable| unreadable.about(&reply));
        }
        match &canary.path {
            Some(path) => Ok(Content::Text(http.get(path).await?.done()?.text())),
            None => Ok(Content::Text(String::new())),
        }
    }
}

/// By the capabilities of a model in a list, of which one that generates has others.
fn capability(list: &Value, served_as: &str) -> Option<CanaryKind> {
    let entries = ["data", "models"].into_iter().filter_map(|key| list[key].as_array()).flatten();
    let own =
        entries.filter(|entry| [&entry["id"], &entry["name"]].into_iter().any(|name| *name == *served_as));
    let all: Vec<&str> = own
        .filter_map(|entry| entry["capabilities"].as_array())
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let has = |words: &[&str]| all.iter().any(|one| words.iter().any(|word| one.contains(word)));
    if has(&["complet", "chat", "generat"]) {
        return None;
    }
    match (has(&["embed"]), has(&["rerank"])) {
        (true, _) => Some(CanaryKind::Embedding),
        (false, true) => Some(CanaryKind::Rerank),
        _ => None,
    }
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

/// A text that ended with an error does not count.
fn generated(
    body: &Value,
    place: &str,
    text: impl Fn(&Value) -> Option<&str>,
) -> Result<Content, Unreadable> {
    let choice = &body["choices"][0];
    let Some(text) = text(choice) else {
        return Err(Unreadable::Foreign(format!("its answer has no {place}")));
    };
    match choice["finish_reason"].as_str() {
        None => Err(Unreadable::Foreign("its answer has no choices[0].finish_reason".to_owned())),
        Some(reason @ ("error" | "abort")) => {
            Err(Unreadable::Wrong(format!("its completion ended with `{reason}`")))
        }
        Some(_) if text.is_empty() => Err(Unreadable::Wrong("its completion is empty".to_owned())),
        Some(_) => Ok(Content::Text(text.to_owned())),
    }
}

fn embedding(body: &Value) -> Result<Content, Unreadable> {
    let embedding = &body["data"][0]["embedding"];
    if !embedding.is_array() {
        return Err(Unreadable::Foreign("its answer has no data[0].embedding".to_owned()));
    }
    let wrong = |reason: &str| Err(Unreadable::Wrong(reason.to_owned()));
    match numbers(embedding) {
        None => wrong("its embedding has something other than numbers in it"),
        Some(numbers) if numbers.iter().all(|number| *number == 0.0) => {
            wrong("its embedding has no number other than 0")
        }
        Some(numbers) => Ok(Content::Vector(numbers)),
    }
}

/// Results may come in any order; each has the index of its document.
fn scores(body: &Value) -> Result<Content, Unreadable> {
    let Some(results) = body["results"].as_array() else {
        return Err(Unreadable::Foreign("its answer has no results".to_owned()));
    };
    let score = |index: u64| {
        let result = results.iter().find(|result| result["index"] == json!(index))?;
        result["relevance_score"].as_f64().or_else(|| result["score"].as_f64())
    };
    match (score(0), score(1)) {
        (Some(same), Some(other)) => Ok(Content::Scores(vec![same, other])),
        _ => Err(Unreadable::Foreign("its answer has no score for each of two documents".to_owned())),
    }
}
