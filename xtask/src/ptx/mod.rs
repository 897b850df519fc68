//! `cargo xtask ptx`: writes the kernels that are too long to write by hand, as PTX.
//!
//! The files are committed. A test compares them with this code, and the tests of `poorwill-driver` run them, line
//! by line, against what the processor computes.

mod codec;
mod digest;

use std::fmt::Write as _;
use std::fs;

use crate::steps::{Failure, say, workspace_root};

fn files() -> [(&'static str, String); 2] {
    [(digest::FILE, digest::text()), (codec::FILE, codec::text())]
}

pub(crate) fn run() -> Result<(), Failure> {
    for (file, text) in files() {
        let path = workspace_root().join(file);
        fs::write(&path, text).map_err(|cause| Failure::File { path, cause })?;
        say(&format!("xtask ptx: wrote {file}"));
    }
    Ok(())
}

/// Text that grows by lines.
#[derive(Default)]
struct Ptx(String);

impl Ptx {
    fn op(&mut self, text: &str) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.0, "    {text};");
    }

    /// Several instructions.
    fn ops(&mut self, lines: &str) {
        lines.lines().map(str::trim).filter(|line| !line.is_empty()).for_each(|line| self.op(line));
    }

    fn note(&mut self, text: &str) {
        let _ = writeln!(self.0, "\n    // {text}");
    }

    fn label(&mut self, name: &str) {
        let _ = writeln!(self.0, "\n{name}:");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_kernels_are_current() {
        for (file, text) in files() {
            let committed = fs::read_to_string(workspace_root().join(file)).unwrap();
            assert!(committed == text, "{file} is another one: run `cargo xtask ptx`");
        }
    }
}
