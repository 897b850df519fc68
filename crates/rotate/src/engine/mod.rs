//! Engines by their own HTTP APIs.
//!
//! An adapter sends requests and reports the answers. A sleep that was answered with 200 proves nothing: the policy
//! compares it with a measurement. Calls have no timeout of their own; dropping the future gives up.

mod calls;
pub(crate) mod canary;
mod healthy;
mod http;
mod inspect;
mod sglang;
mod vllm;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use self::calls::Calls;
use self::canary::Prompt;
pub use self::canary::{Answer, Content};
use self::healthy::Healthy;
use self::http::Http;
pub use self::inspect::{Inspection, inspect};
use self::sglang::Sglang;
use self::vllm::Vllm;
use crate::config::{CanaryKind, EngineKind, Model};
use poorwill_rotation_policy::EngineState;

/// The future of an engine call.
pub type EngineFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send + 'a>>;

/// An engine.
pub trait Engine: fmt::Debug + Send + Sync {
    /// The reported state; [`EngineState::Gone`] if no connection is possible. An unknown answer is an error.
    fn probe(&self) -> EngineFuture<'_, EngineState>;

    /// Sleeps at the model's level, until the engine reports completion.
    fn sleep(&self) -> EngineFuture<'_, ()>;

    /// Wakes and reloads dropped weights, until the engine reports completion.
    fn wake(&self) -> EngineFuture<'_, ()>;

    /// Whether the engine reports that it is awake.
    fn is_awake(&self) -> EngineFuture<'_, bool>;

    /// Answers the canary deterministically. Only `kind` is asked; without one, the first that the engine serves.
    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer>;
}

/// Why an engine call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The connection failed or broke.
    #[error("{request_line}: {reason}")]
    Unreachable {
        /// Method and URL.
        request_line: String,
        /// The cause.
        reason: String,
    },
    /// The engine answered with an error status.
    #[error("{request_line}: it answered {status}: {message}")]
    Refused {
        /// Method and URL.
        request_line: String,
        /// The HTTP status.
        status: u16,
        /// The beginning of its message.
        message: String,
    },
    /// The answer is not one of such an engine.
    #[error("{request_line}: {reason}")]
    Unexpected {
        /// Method and URL.
        request_line: String,
        /// What is unexpected.
        reason: String,
    },
    /// The engine runs, but lacks what the rotation needs. Waiting does not help.
    #[error("{request_line}: {reason}")]
    Unsupported {
        /// Method and URL.
        request_line: String,
        /// What it lacks, and how to start it.
        reason: String,
    },
}

impl EngineError {
    /// Whether the engine does not serve such requests.
    pub(crate) fn is_unserved(&self) -> bool {
        matches!(self, Self::Refused { status, message, .. } if canary::is_unserved(*status, message))
    }
}

/// The adapter for a model's engine. Sends nothing yet.
///
/// # Errors
/// [`EngineError::Unexpected`] if the `url` or the sleep level is invalid.
pub fn engine_of(model: &Model) -> Result<Arc<dyn Engine>, EngineError> {
    let level = model.level;
    let invalid = |reason: String| EngineError::Unexpected {
        request_line: format!("the engine of model `{}`", model.name),
        reason,
    };
    if !(1..=2).contains(&level) {
        let reason = format!("its level is {level}; 1 keeps the weights in host memory, 2 drops them");
        return Err(invalid(reason));
    }
    let http = Http::new(&model.url).map_err(invalid)?;
    let prompt = Prompt::new(&model.served_as, &model.canary);
    let health = model.http.health.clone();
    let (of_sleeper, its_prompt) = (http.clone(), prompt.clone());
    let sleeper: Option<Arc<dyn Engine>> = match (model.engine, &model.http.sleep) {
        (EngineKind::Vllm, _) => Some(Arc::new(Vllm::new(of_sleeper, level, its_prompt))),
        (EngineKind::Sglang, _) => Some(Arc::new(Sglang::new(of_sleeper, level, its_prompt))),
        (EngineKind::Http, Some(calls)) => {
            Some(Arc::new(Calls::new(of_sleeper, health.clone(), calls.clone(), its_prompt)))
        }
        (EngineKind::Http, None) => None,
    };
    Ok(match sleeper {
        Some(engine) if model.rules.can_sleep => engine,
        sleeper => Arc::new(Healthy::new(http, health, sleeper, prompt)),
    })
}
