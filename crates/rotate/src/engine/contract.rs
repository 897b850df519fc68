//! What every adapter does, and how it fails.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use poorwill_rotation_policy::EngineState;

use super::answer::Answer;
use crate::config::CanaryKind;

/// The future of an engine call.
pub type EngineFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, EngineError>> + Send + 'a>>;

/// Gets the text of an answer so far.
pub type OnText<'a> = &'a (dyn Fn(&str) + Send + Sync);

/// An engine.
pub trait Engine: fmt::Debug + Send + Sync {
    /// The reported state; [`EngineState::Gone`] if no connection is possible. An unknown answer is an error.
    fn probe(&self) -> EngineFuture<'_, EngineState>;

    /// Sleeps at the model's level, until the engine reports completion. One that [moves](EngineState::Moving) is known to
    /// be awake, by its memory.
    fn sleep(&self) -> EngineFuture<'_, ()>;

    /// The same with its running requests, which go on after its next wake. Others end before a sleep.
    fn sleep_keeping(&self) -> EngineFuture<'_, ()> {
        let reason = "an engine of its kind keeps no requests in a sleep".to_owned();
        let request_line = "sleep".to_owned();
        Box::pin(std::future::ready(Err(EngineError::Unsupported { request_line, reason })))
    }

    /// Wakes and reloads dropped weights, until the engine reports completion. One that moves is known to be asleep, by its
    /// memory.
    fn wake(&self) -> EngineFuture<'_, ()>;

    /// Stores in an engine that moves that it sleeps, as its memory has shown, so that a later service knows it. Others
    /// report that by themselves.
    fn store_asleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Whether the engine reports that it is awake. One that moves is known to be, by its memory.
    fn is_awake(&self) -> EngineFuture<'_, bool>;

    /// Answers the canary deterministically. Only `kind` is asked; without one, the first that the engine serves.
    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer>;

    /// The same of one kind. `on_text` gets the text so far, where the engine sends it as it comes.
    fn generate_in_parts<'a>(&'a self, kind: CanaryKind, _on_text: OnText<'a>) -> EngineFuture<'a, Answer> {
        self.generate(Some(kind))
    }
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
        matches!(self, Self::Refused { status, message, .. } if is_unserved(*status, message))
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
