//! The configuration: what is accepted, how mistakes are explained, and its page in the reference.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod book;
mod checked;
mod config_reference;
mod macros;
#[path = "../reference/page.rs"]
mod reference;
mod schema;
mod tls;
