//! Requests of a canary, their answers, and whether an answer is right.
//!
//! Each kind asks for what the engine is for: text, a vector, or scores. An unset kind is found by asking: the first of
//! completion, chat, embedding and rerank that the engine serves.

use serde_json::{Value, json};

use super::EngineError;
use super::http::{Http, Reply};
use crate::config::{Canary, CanaryKind};

/// Least cosine of an embedding and the first one. Batches and kernels change far less; wrong weights far more.
const COSINE_MIN: f64 = 0.99;
/// Most difference of a score from the first one, if scores are around 1 or less; otherwise relative.
const SCORE_ERROR_MAX: f64 = 0.02;
/// Unrelated to any usual prompt, so that the scores of a rerank differ.
const OTHER_DOCUMENT: &str = "A river flows through a green valley.";
/// Most characters of a text in a message.
const EXCERPT_MAX: usize = 120;

/// An answer to a canary.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The kind of request that was answered.
    pub kind: CanaryKind,
    /// What it answered.
    pub content: Content,
}

/// The content of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Of a completion, a chat, or a page.
    Text(String),
    /// An embedding.
    Vector(Vec<f64>),
    /// Scores of a rerank, in the order of its documents.
    Scores(Vec<f64>),
}

impl Answer {
    /// Whether it is as right as the model's first one.
    ///
    /// # Errors
    /// How they differ.
    pub fn agrees_with(&self, first: &Self) -> Result<(), String> {
        match (&self.content, &first.content) {
            _ if matches!(self.kind, CanaryKind::Get | CanaryKind::None) => Ok(()),
            (Content::Text(text), Content::Text(first)) if text == first => Ok(()),
            (Content::Text(text), Content::Text(first)) => {
                Err(format!("it answered {:?}, and at first {:?}", start_of(text), start_of(first)))
            }
            (Content::Vector(numbers), Content::Vector(first)) => agree(numbers, first),
            (Content::Scores(scores), Content::Scores(first)) => scores_agree(scores, first),
            _ => Err("its answer is of another kind than its first one".to_owned()),
        }
    }

    /// Whether it contains this text.
    ///
    /// # Errors
    /// What it says instead.
    pub fn contains(&self, expected: &str) -> Result<(), String> {
        match &self.content {
            Content::Text(text) if text.contains(expected) => Ok(()),
            Content::Text(text) => Err(format!(
                "it answered {:?}, which does not contain {:?}",
                start_of(text),
                start_of(expected)
            )),
            _ => Err(format!("its answer is no text, and cannot contain {:?}", start_of(expected))),
        }
    }

    /// For the state file.
    pub(crate) fn to_json(&self) -> Value {
        match &self.content {
            Content::Text(text) => json!(text),
            Content::Vector(numbers) | Content::Scores(numbers) => json!(numbers),
        }
    }

    pub(crate) fn of_json(kind: CanaryKind, value: &Value) -> Option<Self> {
        let content = match kind {
            CanaryKind::Embedding => Content::Vector(numbers(value)?),
            CanaryKind::Rerank => Content::Scores(numbers(value)?),
            _ => Content::Text(value.as_str()?.to_owned()),
        };
        Some(Self { kind, content })
    }
}

impl CanaryKind {
    /// The kinds to try in turn: only one if it is configured or known.
    pub(crate) fn candidates(canary: &Canary, known: Option<Self>) -> Vec<Self> {
        if let Some(kind) = canary.kind.or(known) {
            return vec![kind];
        }
        let mut kinds = vec![Self::Completion, Self::Chat];
        if canary.expect.is_none() {
            kinds.extend([Self::Embedding, Self::Rerank]);
        }
        kinds
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

/// Whether an error status and message say that such requests are not served.
pub(crate) fn is_unserved(status: u16, message: &str) -> bool {
    match status {
        404 | 405 | 501 => true,
        400 => message.to_ascii_lowercase().contains("not support"),
        _ => false,
    }
}

/// A model's canary.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    served_as: String,
    canary: Canary,
}

impl Prompt {
    pub(super) fn new(served_as: &str, canary: &Canary) -> Self {
        Self { served_as: served_as.to_owned(), canary: canary.clone() }
    }

    pub(super) async fn ask(&self, http: &Http, kind: Option<CanaryKind>) -> Result<Answer, EngineError> {
        let mut unserved = Vec::new();
        for kind in CanaryKind::candidates(&self.canary, kind) {
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

/// `None` if one is not a number, as NaN is not in JSON.
fn numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

fn agree(numbers: &[f64], first: &[f64]) -> Result<(), String> {
    if numbers.len() != first.len() {
        return Err(format!("its embedding has {} numbers, and at first {}", numbers.len(), first.len()));
    }
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a * b).sum::<f64>();
    let cosine = dot(numbers, first) / (dot(numbers, numbers).sqrt() * dot(first, first).sqrt());
    // NaN is wrong as well.
    if cosine >= COSINE_MIN {
        return Ok(());
    }
    Err(format!(
        "its embedding has a cosine of {cosine:.3} with its first one, and {COSINE_MIN} is the least"
    ))
}

fn scores_agree(scores: &[f64], first: &[f64]) -> Result<(), String> {
    let is_near = |(one, other): (&f64, &f64)| (one - other).abs() <= SCORE_ERROR_MAX * other.abs().max(1.0);
    if scores.len() == first.len() && scores.iter().zip(first).all(is_near) {
        return Ok(());
    }
    Err(format!("its scores are {scores:?}, and at first {first:?}"))
}

fn start_of(text: &str) -> String {
    text.chars().take(EXCERPT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(numbers: &[f64]) -> Answer {
        Answer { kind: CanaryKind::Embedding, content: Content::Vector(numbers.to_vec()) }
    }

    #[test]
    fn vectors_agree_by_their_direction() {
        let first = vector(&[1.0, 2.0, -3.0]);
        for near in [[1.0, 2.0, -3.0], [2.0, 4.0, -6.0], [1.01, 2.0, -2.98]] {
            assert_eq!(vector(&near).agrees_with(&first), Ok(()), "{near:?}");
        }
        let wrong: [(&[f64], &str); 4] = [
            (&[1.0, 2.0], "2 numbers, and at first 3"),
            (&[0.0, 0.0, 0.0], "cosine"),
            (&[f64::NAN, 2.0, -3.0], "cosine"),
            (&[3.0, -1.0, 2.0], "cosine of -0.357"),
        ];
        for (numbers, reason) in wrong {
            let error = vector(numbers).agrees_with(&first).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn scores_agree_within_a_tolerance() {
        let scores =
            |scores: [f64; 2]| Answer { kind: CanaryKind::Rerank, content: Content::Scores(scores.to_vec()) };
        for (one, first, is_right) in [
            ([0.98, 0.01], [0.97, 0.012], true),
            ([9.1, -11.0], [9.0, -10.9], true),
            ([0.01, 0.98], [0.98, 0.01], false),
            ([0.9, 0.01], [0.98, 0.01], false),
            ([f64::NAN, 0.01], [0.98, 0.01], false),
        ] {
            assert_eq!(scores(one).agrees_with(&scores(first)).is_ok(), is_right, "{one:?} {first:?}");
        }
    }

    #[test]
    fn answers_survive_the_state_file() {
        for answer in [
            vector(&[0.25, -1.0]),
            Answer { kind: CanaryKind::Rerank, content: Content::Scores(vec![1.0, 0.5]) },
            Answer { kind: CanaryKind::Chat, content: Content::Text("7".to_owned()) },
        ] {
            let text = answer.to_json().to_string();
            let value = serde_json::from_str(&text).unwrap();
            assert_eq!(Answer::of_json(answer.kind, &value), Some(answer));
        }
    }
}
