//! A fleet: many machines that rotate models, and one controller that places them.
//!
//! Each node publishes [`records`] of itself and of its models, below the [`keys`] of its fleet. An elected controller
//! reads all of them, asks the [`policy`] for a plan, and writes placements. Nodes follow their placements, and routers
//! send requests there.
//!
//! Records and policy have no effects: they open no connection and read no clock. [`etcd`] holds the records, or
//! a [`store`] in a router. A [`mirror`] follows them, and a [`session`] keeps what a process has written as long as it lives.
#![forbid(unsafe_code)]

pub mod clock;
pub mod controller;
pub mod etcd;
pub mod keys;
pub mod mirror;
pub mod name;
pub mod policy;
pub mod records;
pub mod session;
pub mod store;
