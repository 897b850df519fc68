//! Many models take turns on the same GPUs.
//!
//! The [`policy`] decides: who is awake, who goes to sleep for whom, what is tried when an engine does not do what it was
//! asked for, and which requests wait, are let through, or are refused. It is a state machine without effects, and gets
//! its rules from the [`config`]. The [`service`] drives it: with [`engine`]s that are asked by HTTP, a [`supervise`]d
//! process for each that is started here, and a [`measure`]ment of what they really hold.
#![forbid(unsafe_code)]

pub mod client;
pub mod config;
pub mod control;
pub mod engine;
pub mod front;
mod http;
pub mod measure;
pub mod policy;
pub mod run;
pub mod serve;
pub mod service;
pub mod supervise;
pub mod validate;
