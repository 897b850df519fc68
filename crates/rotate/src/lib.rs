//! Rotation: more models than fit share the same GPUs, and take turns.
//!
//! The [`policy`] is a state machine without effects. It decides which models are awake, which requests wait, pass or
//! are refused, and what to try when an engine fails. Its rules come from the [`config`].
//!
//! The [`service`] carries out its decisions. It talks to each [`engine`] over HTTP, [`supervise`]s the processes that
//! it started, and [`measure`]s the memory that they hold.
#![forbid(unsafe_code)]

mod backend;
pub mod client;
pub mod config;
pub mod control;
pub mod engine;
pub mod fleet;
pub mod hibernation;
pub mod lending;
pub mod measure;
pub mod run;
pub mod service;
pub mod supervise;
pub mod traces;
pub mod validate;

pub use poorwill_rotation_policy as policy;
