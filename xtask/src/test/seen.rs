//! The record that a quick run leaves for a later `--rest`: which tests it has run, and which of them scale.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

const ONCE: &str = "once";
const SCALES: &str = "scales";

/// The tests of a quick run, by id, and whether they scale with the effort.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen(HashMap<String, bool>);

impl Seen {
    pub(super) fn new<'a>(all: impl Iterator<Item = &'a String>, scaling: &[String]) -> Seen {
        Seen(all.map(|id| (id.clone(), scaling.contains(id))).collect())
    }

    /// Whether the quick run has run this test completely.
    pub(super) fn is_done(&self, id: &str) -> bool {
        self.0.get(id).is_some_and(|scales| !scales)
    }

    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let line = |(id, scales): (&String, &bool)| format!("{} {id}", if *scales { SCALES } else { ONCE });
        let mut lines: Vec<String> = self.0.iter().map(line).collect();
        lines.sort();
        fs::write(path, lines.join("\n"))
    }

    pub(super) fn read(path: &Path) -> io::Result<Seen> {
        let text = fs::read_to_string(path)?;
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        Ok(Seen(lines.map(|(how, id)| (id.to_owned(), how != ONCE)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tests_that_ran_and_do_not_scale_are_done() {
        let ids = ["core promises a::b on fake", "core plain c"].map(str::to_owned);
        let seen = Seen::new(ids.iter(), &ids[..1]);
        let folder = crate::toolchain::target_folder().unwrap();
        let path = folder.join(format!("xtask-seen-{}", std::process::id()));
        seen.write(&path).unwrap();
        let read = Seen::read(&path).unwrap();
        fs::remove_file(path).unwrap();
        assert_eq!(read, seen);
        assert!(read.is_done("core plain c"));
        assert!(!read.is_done("core promises a::b on fake") && !read.is_done("core plain new"));
    }
}
