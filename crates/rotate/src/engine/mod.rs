//! Engines by their own HTTP APIs.
//!
//! An adapter sends requests and reports the answers. A sleep that was answered with 200 proves nothing: the policy
//! compares it with a measurement. Calls have no timeout of their own; dropping the future gives up.

mod answer;
mod calls;
pub(crate) mod canary;
mod contract;
mod healthy;
mod http;
mod inspect;
mod parts;
mod sglang;
mod vllm;

use std::sync::Arc;

pub use self::answer::{Answer, Content};
use self::calls::Calls;
use self::canary::Prompt;
pub(crate) use self::contract::is_unserved;
pub use self::contract::{Engine, EngineError, EngineFuture, OnText};
use self::healthy::Healthy;
use self::http::Http;
pub use self::inspect::{Inspection, inspect};
use self::sglang::Sglang;
use self::vllm::Vllm;
use crate::config::{EngineKind, Model};

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
    let is_other = model.engine == EngineKind::Http;
    let prompt = Prompt::new(&model.served_as, &model.canary, is_other);
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
