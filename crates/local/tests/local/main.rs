//! The commands that need no service, as their users run them: what they print where, their exit codes, and what they
//! refuse.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod book;
mod budget;
mod churn;
mod demo;
mod doctor;
mod gpu;
mod hibernate;
mod hibernate_gpu;
mod load;
mod offload;
mod refusals;
mod report;
mod sleep;
mod streams;
mod support;
mod usage;
mod verify;
