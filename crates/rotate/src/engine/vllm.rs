//! vLLM, by its development endpoints (`VLLM_SERVER_DEV_MODE=1`).
//!
//! Level 1 keeps the weights in host memory. Level 2 drops them, and a wake takes three calls: memory of the weights,
//! the weights, memory of the KV cache.
//!
//! `mode=wait` waits for requests that bypassed the rotation; newer versions would otherwise end them. `mode=keep` keeps
//! those that run. Some versions
//! report the new state in their answer; older ones answer with an empty body.

use serde_json::{Value, json};

use super::answer::Answer;
use super::canary::Prompt;
use super::contract::{Engine, EngineError, EngineFuture, OnText};
use super::healthy::is_healthy;
use super::http::{Http, Reply};
use crate::config::CanaryKind;
use poorwill_rotation_policy::EngineState;

/// Of a sleep in which an engine cannot keep its requests.
const NOT_IMPLEMENTED: u16 = 501;

const DEV_MODE: &str = "it has no such endpoint; start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, and --enable-sleep-mode; or say sleeps = false, and it is stopped instead";

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

    /// For endpoints of the development mode only.
    async fn post(&self, path: &str, body: Option<Value>) -> Result<Reply, EngineError> {
        let reply = self.http.post(path, body).await?;
        if reply.is_unknown() { Err(reply.unsupported(DEV_MODE)) } else { reply.done() }
    }

    async fn is_sleeping(&self) -> Result<bool, EngineError> {
        let reply = self.http.get("/is_sleeping").await?;
        if reply.is_unknown() {
            return Err(reply.unsupported(DEV_MODE));
        }
        let reply = reply.done()?;
        let body = reply.json()?.unwrap_or(Value::Null);
        body["is_sleeping"]
            .as_bool()
            .ok_or_else(|| reply.unexpected_with_excerpt("its answer has no is_sleeping"))
    }
}

/// Checks the new state, if the answer reports one.
fn check_status(reply: &Reply, wanted: &str) -> Result<(), EngineError> {
    let body = reply.json()?.unwrap_or(Value::Null);
    match &body["status"] {
        Value::Null => Ok(()),
        Value::String(status) if status == wanted => Ok(()),
        _ => Err(reply.unexpected_with_excerpt(&format!("it should be {wanted}, but reports another state"))),
    }
}

impl Engine for Vllm {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        Box::pin(async {
            if !is_healthy(&self.http, "/health").await? {
                return Ok(EngineState::Gone);
            }
            Ok(if self.is_sleeping().await? { EngineState::Asleep } else { EngineState::Awake })
        })
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            let reply = self.post(&format!("/sleep?level={}&mode=wait", self.level), None).await?;
            check_status(&reply, "sleeping")
        })
    }

    fn sleep_keeping(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            let reply = self.http.post(&format!("/sleep?level={}&mode=keep", self.level), None).await?;
            if reply.status == NOT_IMPLEMENTED {
                return Err(reply.unsupported_as_said());
            }
            check_status(&reply.done()?, "sleeping")
        })
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            if self.level < 2 {
                return check_status(&self.post("/wake_up", None).await?, "awake");
            }
            self.post("/wake_up?tags=weights", None).await?;
            self.post("/collective_rpc", Some(json!({"method": "reload_weights"}))).await?;
            check_status(&self.post("/wake_up?tags=kv_cache", None).await?, "awake")
        })
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(async { self.is_sleeping().await.map(|is_sleeping| !is_sleeping) })
    }

    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        Box::pin(self.prompt.ask(&self.http, kind))
    }

    fn generate_in_parts<'a>(&'a self, kind: CanaryKind, on_text: OnText<'a>) -> EngineFuture<'a, Answer> {
        Box::pin(self.prompt.ask_in_parts(&self.http, kind, on_text))
    }
}
