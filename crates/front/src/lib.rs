//! The listeners before language models, for whatever service stands behind them.
//!
//! The [`proxy`] takes clients' requests and asks a [`backend`] where they go and when. Their counts and times are
//! [`requests`]. [`operators`] is the frame of the other listener: access, bodies, errors and pages. [`settings`] has the
//! limits and keys of both, and [`file`](mod@file) reads it from a configuration.
#![forbid(unsafe_code)]

pub mod affinity;
pub mod backend;
pub mod file;
pub mod operators;
pub mod proxy;
pub mod requests;
pub mod settings;
