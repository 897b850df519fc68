//! Engines by their own HTTP interface: one small trait, and an adapter for each kind.
//!
//! An adapter asks and reports, and decides nothing: that a sleep was answered with 200 proves nothing, and is held
//! against a measurement elsewhere. None of its calls has a limit of its own; who calls gives up by dropping the future.

mod completions;
mod http;
mod sglang;
mod vllm;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use self::completions::Prompt;
use self::http::Http;
use self::sglang::Sglang;
use self::vllm::Vllm;
use crate::config::{Engine as Kind, Model};
use crate::policy::Found;

/// What an engine is asked, and what it answers.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send + 'a>>;

/// An engine that may be asked for something.
pub trait Engine: fmt::Debug + Send + Sync {
    /// Whether it is there, and awake by its own word. One to which nobody connects is [`Found::Gone`]; one that
    /// answers nothing that can be understood is an error.
    fn look(&self) -> Answer<'_, Found>;

    /// Has it sleep as deep as its model says, and waits until it says that it has.
    fn sleep(&self) -> Answer<'_, ()>;

    /// Has it wake, weights that were dropped loaded again, and waits until it says that it has.
    fn wake(&self) -> Answer<'_, ()>;

    /// Its own word, whether it is awake.
    fn is_awake(&self) -> Answer<'_, bool>;

    /// The text that it goes on with behind the canary's prompt, without chance in it.
    fn generate(&self) -> Answer<'_, String>;
}

/// Why an engine did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// It was not reached, or the connection broke.
    #[error("{asked}: {reason}")]
    Unreachable {
        /// Method, and where.
        asked: String,
        /// Why.
        reason: String,
    },
    /// It answered that it will not, or could not.
    #[error("{asked}: it answered {status}: {words}")]
    Refused {
        /// Method, and where.
        asked: String,
        /// The status.
        status: u16,
        /// The beginning of what it said.
        words: String,
    },
    /// Its answer is not what such an engine answers.
    #[error("{asked}: {reason}")]
    NotUnderstood {
        /// Method, and where.
        asked: String,
        /// What is odd about it.
        reason: String,
    },
}

/// The adapter for a model's engine. Nothing is asked yet.
///
/// # Errors
/// [`EngineError::NotUnderstood`] if the model's `url` is no address of an engine, or its level none that there is.
pub fn engine_of(model: &Model) -> Result<Arc<dyn Engine>, EngineError> {
    let level = model.level;
    let wrong = |reason: String| EngineError::NotUnderstood {
        asked: format!("the engine of model `{}`", model.name),
        reason,
    };
    if !(1..=2).contains(&level) {
        let reason = format!("its level is {level}; 1 keeps the weights in host memory, 2 drops them");
        return Err(wrong(reason));
    }
    let http = Http::new(&model.url).map_err(wrong)?;
    let prompt = Prompt::new(&model.served_as, &model.canary);
    Ok(match model.engine {
        Kind::Vllm => Arc::new(Vllm::new(http, level, prompt)),
        Kind::Sglang => Arc::new(Sglang::new(http, level, model.rules.can_sleep, prompt)),
    })
}
