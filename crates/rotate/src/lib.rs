//! Many models take turns on the same GPUs.
//!
//! What is here so far is the [`policy`]: who is awake, who goes to sleep for whom, what is tried when an engine does
//! not do what it was asked for, and which requests wait, are let through, or are refused; and the [`config`] that it
//! gets its rules from. The policy is a state machine without effects; the service that drives it is yet to come.
#![forbid(unsafe_code)]

pub mod config;
pub mod engine;
pub mod front;
pub mod measure;
pub mod policy;
pub mod service;
