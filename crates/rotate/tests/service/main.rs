//! The service and what it stands on: engines, processes, memory, hibernation, and both of its listeners.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

#[path = "../../../front/tests/operator_client/mod.rs"]
mod client;
mod control;
mod control_calls;
mod engines;
#[path = "../../../front/tests/front/setup.rs"]
#[allow(dead_code)] // Only the traces' tests use it here.
mod front;
mod hibernation;
mod hibernator;
mod hung_meter;
mod lending;
mod lent;
mod measure;
mod meters;
mod mock;
mod names;
mod operator;
#[path = "../reference/page.rs"]
mod reference;
mod supervise;
mod traces;
mod turns;
