//! The program `poorwill` as its users run it: its services, its pages, and that it has all other commands.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

mod book;
mod broker;
mod fleet;
mod json;
mod kubernetes;
mod mock_engine;
mod reference;
mod replay;
mod rotate;
mod shells;
mod support;
