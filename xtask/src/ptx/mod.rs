//! `cargo xtask ptx`: compiles the GPU kernels in CUDA C to PTX, by NVRTC.
//!
//! The PTX is committed, so that no build needs NVRTC. It is installed once below cargo's target folder, and needs
//! no GPU. The first line of each file is a stamp of its sources, of the compiler and of the text that follows. A test
//! compares it, so a change of a source is not forgotten, and PTX is not changed by hand. `test --full` compiles again.
//! The tests of `poorwill-driver` run the PTX, line by line, against what the processor computes.

use std::fs;
use std::path::Path;

use crate::python::environment::{Environment, Tools};
use crate::steps::{Failure, say, workspace_root};

const COMPILE: &str = "xtask/src/ptx/compile.py";
pub(crate) const TOOLS: Tools = Tools {
    folder: "ptx-venv",
    requirements: "xtask/src/ptx/requirements.txt",
    modules: &["pip", "nvidia.cuda_nvcc", "nvidia.cuda_nvrtc"],
};

/// A file with kernels, and what it is compiled from: CUDA C, then what that includes.
struct Compiled {
    ptx: &'static str,
    sources: [&'static str; 2],
}

const XXH3: &str = "crates/driver/src/cuda/digest/xxh3.cuh";
const FILES: [Compiled; 2] = [
    Compiled {
        ptx: "crates/driver/src/cuda/digest/kernel.ptx",
        sources: ["crates/driver/src/cuda/digest/kernel.cu", XXH3],
    },
    Compiled {
        ptx: "crates/driver/src/cuda/codec/kernel.ptx",
        sources: ["crates/driver/src/cuda/codec/kernel.cu", XXH3],
    },
];

/// `cargo xtask ptx`.
pub(crate) fn run() -> Result<(), Failure> {
    match Environment::ready(TOOLS) {
        Ok(environment) => {
            for file in &FILES {
                let text = file.compiled(&environment)?;
                let path = workspace_root().join(file.ptx);
                fs::write(&path, text).map_err(|cause| Failure::File { path, cause })?;
                say(&format!("xtask ptx: wrote {}", file.ptx));
            }
            Ok(())
        }
        Err(unready) => Err(Failure::Missing { what: unready.skip("no kernel was compiled")? }),
    }
}

/// Compiles again, and compares. Returns why it did not.
pub(crate) fn check() -> Result<Option<String>, Failure> {
    let environment = match Environment::ready(TOOLS) {
        Ok(environment) => environment,
        Err(unready) => return unready.skip("no kernel was compiled again").map(Some),
    };
    for file in &FILES {
        if file.compiled(&environment)? != read(file.ptx)? {
            let problem = "its sources compile to other text: run `cargo xtask ptx`".to_owned();
            return Err(Failure::Content { path: workspace_root().join(file.ptx), problem });
        }
    }
    Ok(None)
}

impl Compiled {
    /// The text of the file.
    fn compiled(&self, environment: &Environment) -> Result<String, Failure> {
        let code = environment.python([COMPILE].into_iter().chain(self.sources)).output()? + "\n";
        Ok(self.stamp(&code)? + &code)
    }

    /// The first line of the file.
    fn stamp(&self, code: &str) -> Result<String, Failure> {
        let [source, included] = self.sources;
        let mut all = Vec::new();
        for path in [COMPILE, TOOLS.requirements, source, included] {
            all.extend(read(path)?.into_bytes());
        }
        let name = Path::new(source).file_name().unwrap_or_default().display();
        let [from, text] = [&all[..], code.as_bytes()].map(fnv);
        Ok(format!(
            "// Written by `cargo xtask ptx` from {name}, which explains it: {from:016x}, {text:016x}\n"
        ))
    }
}

fn read(path: &str) -> Result<String, Failure> {
    let path = workspace_root().join(path);
    fs::read_to_string(&path).map_err(|cause| Failure::File { path, cause })
}

/// FNV-1a: against accidents, and the same everywhere.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_kernels_are_current() {
        for file in &FILES {
            let committed = read(file.ptx).unwrap();
            let (stamp, code) = committed.split_once('\n').unwrap();
            let expected = file.stamp(code).unwrap();
            assert_eq!(stamp, expected.trim_end(), "{} is another one: run `cargo xtask ptx`", file.ptx);
        }
    }

    #[test]
    fn the_stamp_is_fnv() {
        assert_eq!(
            ["", "a", "foobar"].map(|text| fnv(text.as_bytes())),
            [0xCBF2_9CE4_8422_2325, 0xAF63_DC4C_8601_EC8C, 0x8594_4171_F739_67E8]
        );
    }

    #[test]
    fn the_oldest_driver_that_is_supported_understands_them() {
        // 440.33 came with CUDA 10.2, whose PTX is 6.5.
        assert!(read("README.md").unwrap().contains("with driver 440.33 or later"));
        for file in &FILES {
            let head = ".version 6.5\n.target sm_70\n.address_size 64\n";
            assert!(read(file.ptx).unwrap().contains(head), "{}", file.ptx);
        }
    }
}
