//! The promises of the policy, in virtual time: step by step, under random faults, and under traffic.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod corners;
mod cuts;
mod fixture;
mod hibernation;
mod hot;
mod looks;
mod needs;
mod scenarios;
mod simulated;
mod simulation;
mod traffic;
mod trials;
