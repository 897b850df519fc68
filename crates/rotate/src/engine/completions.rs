//! A deterministic completion by OpenAI's API, which vLLM and SGLang both have.

use serde_json::{Value, json};

use super::EngineError;
use super::http::Http;
use crate::config::Canary;

#[derive(Debug)]
pub(super) struct Prompt {
    served_as: String,
    prompt: String,
    tokens: u32,
}

impl Prompt {
    pub(super) fn new(served_as: &str, canary: &Canary) -> Self {
        Self { served_as: served_as.to_owned(), prompt: canary.prompt.clone(), tokens: canary.tokens }
    }

    /// A completion that ended with an error does not count.
    pub(super) async fn generate(&self, http: &Http) -> Result<String, EngineError> {
        let body = json!({
            "model": self.served_as,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "seed": 0,
            "stream": false,
        });
        let reply = http.post("/v1/completions", Some(body)).await?.done()?;
        let answer = reply.json()?.unwrap_or(Value::Null);
        let choice = &answer["choices"][0];
        let Some(text) = choice["text"].as_str() else {
            return Err(reply.unexpected_with_excerpt("its answer has no choices[0].text"));
        };
        match choice["finish_reason"].as_str() {
            None => Err(reply.unexpected_with_excerpt("its answer has no choices[0].finish_reason")),
            Some(reason @ ("error" | "abort")) => {
                Err(reply.unexpected(&format!("its completion ended with `{reason}`")))
            }
            Some(_) if text.is_empty() => Err(reply.unexpected("its completion is empty")),
            Some(_) => Ok(text.to_owned()),
        }
    }
}
