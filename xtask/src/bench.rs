//! `cargo xtask bench NAME`: one benchmark, built in release, with arguments of its own.
//!
//! A benchmark measures something of ours beside its limit or a peer in one run. Timings are looked at by
//! people and kept in `docs/benchmarks/`; no test depends on one.

use std::ffi::{OsStr, OsString};

use crate::steps::{Failure, Step};

/// A benchmark of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bench {
    pub(crate) name: &'static str,
    package: &'static str,
}

/// All of them; each is a bench target of its package, under the same name.
pub(crate) const BENCHES: [Bench; 1] = [Bench { name: "wake", package: "poorwill-driver" }];

impl Bench {
    pub(crate) fn named(name: &OsStr) -> Option<Self> {
        BENCHES.into_iter().find(|bench| name == bench.name)
    }

    pub(crate) fn run(self, args: &[OsString]) -> Result<(), Failure> {
        let words = ["bench", "--quiet", "--locked", "--package", self.package, "--bench", self.name, "--"];
        let command = words.into_iter().map(OsString::from).chain(args.iter().cloned());
        Step::cargo(command).run().map(drop)
    }
}
