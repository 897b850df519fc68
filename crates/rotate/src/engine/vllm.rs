//! vLLM, by the endpoints that it has when it is started with `VLLM_SERVER_DEV_MODE=1`.
//!
//! It keeps the weights in host memory at level 1. At level 2 it drops them, and a wake is three calls: the weights'
//! memory, the weights, the cache's memory. Requests were drained before a sleep, and one that came past us is waited
//! for (`mode=wait`); without that, newer versions end it. Where a version says in its answer what it is now, that has
//! to be what it was asked to be; older ones answer with nothing, and nobody but [`is_awake`](Engine::is_awake) asks.

use serde_json::{Value, json};

use super::completions::Prompt;
use super::http::{Http, Reply};
use super::{Answer, Engine, EngineError};
use crate::policy::Found;

const DEV_MODE: &str = "it has no such endpoint; start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, and --enable-sleep-mode";

/// How a vLLM is asked.
#[derive(Debug)]
pub(super) struct Vllm {
    http: Http,
    level: u8,
    prompt: Prompt,
}

impl Vllm {
    pub(super) fn new(http: Http, level: u8, prompt: Prompt) -> Self {
        Self { http, level, prompt }
    }

    /// Asks for something that only exists in development mode.
    async fn post(&self, path: &str, body: Option<Value>) -> Result<Reply, EngineError> {
        let reply = self.http.post(path, body).await?;
        if reply.is_unknown() { Err(reply.odd(DEV_MODE)) } else { reply.done() }
    }

    async fn is_sleeping(&self) -> Result<bool, EngineError> {
        let reply = self.http.get("/is_sleeping").await?;
        if reply.is_unknown() {
            return Err(reply.odd(DEV_MODE));
        }
        let reply = reply.done()?;
        let said = reply.json()?.unwrap_or(Value::Null);
        said["is_sleeping"].as_bool().ok_or_else(|| reply.odd_words("its answer has no is_sleeping"))
    }
}

/// That a move got to where it was to, if it says where that is.
fn check_status(reply: &Reply, wanted: &str) -> Result<(), EngineError> {
    let said = reply.json()?.unwrap_or(Value::Null);
    match &said["status"] {
        Value::Null => Ok(()),
        Value::String(status) if status == wanted => Ok(()),
        _ => Err(reply.odd_words(&format!("it was to be {wanted}, and says otherwise"))),
    }
}

impl Engine for Vllm {
    fn look(&self) -> Answer<'_, Found> {
        Box::pin(async {
            match self.http.get("/health").await {
                Err(failure) if failure.is_nobody_there => return Ok(Found::Gone),
                other => other?.done()?,
            };
            Ok(if self.is_sleeping().await? { Found::Asleep } else { Found::Awake })
        })
    }

    fn sleep(&self) -> Answer<'_, ()> {
        Box::pin(async {
            let reply = self.post(&format!("/sleep?level={}&mode=wait", self.level), None).await?;
            check_status(&reply, "sleeping")
        })
    }

    fn wake(&self) -> Answer<'_, ()> {
        Box::pin(async {
            if self.level < 2 {
                return check_status(&self.post("/wake_up", None).await?, "awake");
            }
            self.post("/wake_up?tags=weights", None).await?;
            self.post("/collective_rpc", Some(json!({"method": "reload_weights"}))).await?;
            check_status(&self.post("/wake_up?tags=kv_cache", None).await?, "awake")
        })
    }

    fn is_awake(&self) -> Answer<'_, bool> {
        Box::pin(async { Ok(!self.is_sleeping().await?) })
    }

    fn generate(&self) -> Answer<'_, String> {
        Box::pin(self.prompt.generate(&self.http))
    }
}
