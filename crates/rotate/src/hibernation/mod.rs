//! Hibernation of engines: their processes are taken off their GPUs while they sleep, and put back before they wake.
//!
//! A process cannot do that to itself, so a helper does: `poorwill hibernate --serve`, a child of the service.
//!
//! Promises:
//!
//! - All processes of an engine that use a GPU go together, or none does.
//! - An engine that may hibernate is marked on disk before its first process leaves. The next service finds the mark.
//! - A helper that ends is started again, with growing pauses. What it left is found out by asking the new one.
//! - The helper ends with the service, however that ends.
//! - An engine that came back on a driver that hangs at its end is noted on disk, for the next service.

mod driver;
mod helper;
mod mark;
mod protocol;
mod sets;

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::config::Hibernate;

pub use self::helper::{HelperProcess, check, journal_in};
pub use self::sets::Sets;

/// The future of a [`Hibernator`]'s call.
pub type HibernationFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// An engine's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineProcesses {
    /// Its model.
    pub model: String,
    /// All of them, also those that use no GPU.
    pub pids: Vec<u32>,
}

/// Why an engine does not hibernate, or does not come back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HibernateError {
    /// It cannot, and nothing has changed.
    #[error("{0}")]
    Impossible(String),
    /// Not now, and not the engine's fault: the helper cannot be asked. Nothing has changed, unless it ended while it was
    /// asked to hibernate.
    #[error("{0}")]
    Later(String),
    /// Its GPUs have too little memory for its way back. Nothing has changed.
    #[error("{0}")]
    NeedsMore(String),
    /// It failed. What the engine does now has to be asked.
    #[error("{0}")]
    Failed(String),
}

/// Takes engines off their GPUs, and puts them back. Tests replace it.
pub trait Hibernator: fmt::Debug + Send + Sync {
    /// Whether an engine hibernates. One of which a part does is put back first.
    ///
    /// # Errors
    /// Why that is unknown, or the engine is lost.
    fn is_hibernating<'a>(
        &'a self,
        of: &'a EngineProcesses,
    ) -> HibernationFuture<'a, Result<bool, HibernateError>>;

    /// Takes a sleeping engine off its GPUs.
    ///
    /// # Errors
    /// See [`HibernateError`].
    fn hibernate<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>>;

    /// Puts it back. An engine that does not hibernate stays as it is.
    ///
    /// # Errors
    /// Why it failed.
    fn resume<'a>(&'a self, of: &'a EngineProcesses) -> HibernationFuture<'a, Result<(), HibernateError>>;

    /// Whether a model's engine may hibernate, as far as known without asking.
    fn may_hibernate(&self, model: &str) -> bool;

    /// Whether its processes have to be off their GPUs when they end. They came back from hibernation or are away, and the
    /// driver is known to hang otherwise.
    fn must_end_away(&self, of: &EngineProcesses) -> bool;

    /// Its processes are gone.
    fn forget(&self, model: &str);

    /// Host memory that a model's hibernating engine takes.
    fn host_bytes(&self, model: &str) -> u64;

    /// From now on by this configuration.
    fn configure(&self, config: &Hibernate);

    /// Completes when the helper was started again after its end.
    fn restarted(&self) -> HibernationFuture<'_, ()>;

    /// Ends the helper, after what is under way.
    fn end(&self) -> HibernationFuture<'_, ()>;
}
