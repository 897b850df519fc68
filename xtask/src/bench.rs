//! `cargo xtask bench NAME`: one benchmark, built in release, with its own arguments.
//!
//! A benchmark measures our code beside its limit or a peer in one run. People read the timings, and
//! `docs/benchmarks/` keeps them; no test depends on one.

use std::ffi::{OsStr, OsString};

use crate::steps::{Failure, Step};

/// A benchmark of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bench {
    pub(crate) name: &'static str,
    package: &'static str,
    kind: BenchKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BenchKind {
    /// A bench target of the package, under the benchmark's name.
    Target,
    /// The only program of a package that compiles a peer.
    Program,
}

pub(crate) const BENCHES: [Bench; 2] = [
    Bench { name: "alloc", package: "poorwill-bench-alloc", kind: BenchKind::Program },
    Bench { name: "wake", package: "poorwill-bench", kind: BenchKind::Target },
];

/// Packages that are compiled only when named.
pub(crate) fn peer_packages() -> impl Iterator<Item = &'static str> {
    BENCHES.into_iter().filter(|bench| bench.kind == BenchKind::Program).map(|bench| bench.package)
}

impl Bench {
    pub(crate) fn named(name: &OsStr) -> Option<Self> {
        BENCHES.into_iter().find(|bench| name == bench.name)
    }

    pub(crate) fn run(self, args: &[OsString]) -> Result<(), Failure> {
        let words: &[&str] = match self.kind {
            BenchKind::Target => {
                &["bench", "--quiet", "--locked", "--package", self.package, "--bench", self.name, "--"]
            }
            BenchKind::Program => {
                &["run", "--quiet", "--release", "--locked", "--package", self.package, "--"]
            }
        };
        let command = words.iter().map(OsString::from).chain(args.iter().cloned());
        Step::cargo(command).run().map(drop)
    }
}
