//! A fleet: many machines that rotate models, and one controller that places them.
//!
//! Each node publishes [`records`] of itself and of its models, below the [`keys`] of its fleet. An elected controller
//! reads all of them, asks the [`policy`] for a plan, and writes placements. Nodes follow their placements, and routers
//! send requests there.
//!
//! This crate has the parts without effects. It opens no connection and reads no clock.
#![forbid(unsafe_code)]

pub mod keys;
pub mod name;
pub mod policy;
pub mod records;
