//! The commands that work on this machine and need no service: `demo`, `verify`, `hibernate`, `doctor` and `bench`.
//!
//! The program `poorwill-demo` has these alone, so that the first command of a newcomer compiles little. The program
//! `poorwill` has them beside its services. It takes from here how a command line is read ([`command_line`]), how a
//! command ends ([`failure`]) and how it prints ([`text`]).
//!
//! Exit codes: 0 done and verified, 1 failed, 2 wrong usage. With `--json`, standard output is one JSON
//! object, also after a failure. Messages, progress and usage errors go to standard error.
#![forbid(unsafe_code)]

pub mod arguments;
mod bench;
mod command;
pub mod command_line;
mod demo;
mod doctor;
pub mod failure;
pub mod files;
mod hibernate;
pub mod progress;
pub mod text;
mod verify;

pub use self::bench::{BenchArgs, Benchmark, ChurnArgs, LoadArgs, OffloadArgs, SleepArgs};
pub use self::command::{Command, SERVICES};
pub use self::demo::DemoArgs;
pub use self::doctor::DoctorArgs;
pub use self::hibernate::HibernateArgs;
pub use self::verify::VerifyArgs;
