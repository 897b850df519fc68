//! An engine that is stopped and started instead of put to sleep, whatever its kind.
//!
//! Only its health is asked, so no endpoint for sleep, and no setting for it, has to be there.

use std::sync::Arc;

use super::answer::Answer;
use super::canary::Prompt;
use super::contract::{Engine, EngineError, EngineFuture};
use super::http::Http;
use crate::config::CanaryKind;
use poorwill_rotation_policy::EngineState;

#[derive(Debug)]
pub(super) struct Healthy {
    http: Http,
    health: String,
    /// For an engine that an earlier configuration put to sleep.
    sleeper: Option<Arc<dyn Engine>>,
    prompt: Prompt,
}

impl Healthy {
    pub(super) fn new(http: Http, health: String, sleeper: Option<Arc<dyn Engine>>, prompt: Prompt) -> Self {
        Self { http, health, sleeper, prompt }
    }

    fn sleeper(&self) -> Result<&Arc<dyn Engine>, EngineError> {
        self.sleeper.as_ref().ok_or_else(|| EngineError::Unsupported {
            request_line: "the sleep of an engine of the kind `http`".to_owned(),
            reason: "its configuration has no call for it; say sleep, wake and asleep under [model.http]"
                .to_owned(),
        })
    }
}

/// False if no connection is possible.
pub(super) async fn is_healthy(http: &Http, path: &str) -> Result<bool, EngineError> {
    let reply = match http.get(path).await {
        Err(failure) if failure.is_unreachable => return Ok(false),
        other => other?,
    };
    if reply.is_unknown() {
        return Err(reply.unexpected(
            "it answered 404; if it has no such path, say another as health under [model.http], with engine = \"http\"",
        ));
    }
    reply.done().map(|_| true)
}

impl Engine for Healthy {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        Box::pin(async {
            let is_healthy = is_healthy(&self.http, &self.health).await?;
            Ok(if is_healthy { EngineState::Awake } else { EngineState::Gone })
        })
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async { self.sleeper()?.sleep().await })
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        Box::pin(async { self.sleeper()?.wake().await })
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(async { self.http.get(&self.health).await?.done().map(|_| true) })
    }

    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        Box::pin(self.prompt.ask(&self.http, kind))
    }
}
