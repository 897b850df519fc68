//! Many models take turns on the same GPUs.
//!
//! What is here so far is the [`policy`]: who is awake, who goes to sleep for whom, what is tried when an engine does
//! not do what it was asked for, and which requests wait, are let through, or are refused. It is a state machine
//! without effects; the service that drives it is yet to come.
#![forbid(unsafe_code)]

pub mod policy;
