//! An engine that sleeps and wakes by requests of the configuration.
//!
//! What such an engine has to promise: its health answers 2xx awake and asleep. A sleep or a wake is done when it is
//! answered with 2xx. Its state is what it reports, also if another program changed it. As for every engine, the policy
//! measures whether memory was released, and a canary finds wrong weights.

use serde_json::Value;

use super::answer::Answer;
use super::canary::Prompt;
use super::contract::is_unserved;
use super::contract::{Engine, EngineError, EngineFuture};
use super::healthy::is_healthy;
use super::http::{Http, Reply};
use crate::config::{Call, CanaryKind, SleepCalls};
use poorwill_rotation_policy::EngineState;

#[derive(Debug)]
pub(super) struct Calls {
    http: Http,
    health: String,
    calls: SleepCalls,
    prompt: Prompt,
}

impl Calls {
    pub(super) fn new(http: Http, health: String, calls: SleepCalls, prompt: Prompt) -> Self {
        Self { http, health, calls, prompt }
    }

    /// An unknown path is final: the configuration is wrong.
    async fn call(&self, key: &str, call: &Call) -> Result<Reply, EngineError> {
        let reply = self.http.send(call.method.clone(), &call.path, call.body.clone()).await?;
        if is_unserved(reply.status, "") {
            let status = reply.status;
            return Err(reply.unsupported(&format!(
                "it answered {status}, so it has no such path or method; mend {key} under [model.http]"
            )));
        }
        reply.done()
    }

    async fn is_asleep(&self) -> Result<bool, EngineError> {
        let asleep = &self.calls.asleep;
        let reply = self.call("asleep", &asleep.call).await?;
        let body = reply.json()?.unwrap_or(Value::Null);
        match body.pointer(&asleep.at) {
            Some(found) if are_alike(found, &asleep.is) => Ok(*found == asleep.is),
            _ => Err(reply.unexpected_with_excerpt(&format!(
                "its answer has nothing at {:?} that compares with {}; mend asleep under [model.http]",
                asleep.at, asleep.is
            ))),
        }
    }
}

/// Whether both are of one JSON type.
fn are_alike(one: &Value, other: &Value) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

impl Engine for Calls {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        Box::pin(async {
            if !is_healthy(&self.http, &self.health).await? {
                return Ok(EngineState::Gone);
            }
            Ok(if self.is_asleep().await? { EngineState::Asleep } else { EngineState::Awake })
        })
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async { self.call("sleep", &self.calls.sleep).await.map(drop) })
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        Box::pin(async { self.call("wake", &self.calls.wake).await.map(drop) })
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(async { self.is_asleep().await.map(|is_asleep| !is_asleep) })
    }

    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        Box::pin(self.prompt.ask(&self.http, kind))
    }
}
