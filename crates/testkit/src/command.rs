//! A program as its users run it: what it prints where and how it ends, and files to run it with.
#![allow(clippy::must_use_candidate)] // Most calls are assertions.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A program with these arguments in a folder, without a terminal and without the caller's settings.
pub fn command(program: &str, folder: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(folder);
    for name in ["CLICOLOR_FORCE", "COLUMNS", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How the command ended. Whatever it did, it said so in UTF-8 and did not panic.
#[derive(Debug)]
pub struct Ran {
    /// The exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let ran = Self {
            code: output.status.code().unwrap_or_else(|| panic!("killed: {output:?}")),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        assert!(!ran.stderr.contains("panicked") && ran.code != 101, "{ran:?}");
        ran
    }
}

impl Ran {
    /// Standard output of a command that succeeded without a word on standard error.
    pub fn succeeded(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{self:?}");
        self.stdout
    }

    /// The one JSON object that standard output must be.
    pub fn json(&self) -> Value {
        assert!(self.stdout.ends_with('\n') && self.stdout.lines().count() == 1, "{self:?}");
        let value: Value = serde_json::from_str(&self.stdout).unwrap();
        assert!(value.is_object(), "{self:?}");
        value
    }

    /// The message of a command that failed, in one line, with each of `words` in it.
    pub fn failed(&self, words: &[&str]) -> &str {
        assert_eq!(self.code, 1, "{self:?}");
        let line = self.stderr.strip_prefix("error: ").and_then(|rest| rest.strip_suffix('\n'));
        let all = line.unwrap_or_else(|| panic!("{self:?}"));
        let (message, excerpt) = all.split_once('\n').unwrap_or((all, ""));
        // Each further mistake of a file has a line of its own.
        let is_expected = |line: &str| line.contains(" |") || line.starts_with("error: ");
        assert!(excerpt.lines().all(is_expected), "{all}");
        assert!(!message.contains('\n') && message.len() < 2000, "{message}");
        assert_clean(message);
        for word in words {
            assert!(all.contains(word), "`{word}` is not in: {all}");
        }
        message
    }
}

/// A terminal would show this and do nothing else.
pub fn assert_clean(text: &str) {
    let harmless = |c: char| c == '\n' || !(c.is_control() || "\u{202e}\u{200b}\u{2028}".contains(c));
    assert!(text.chars().all(harmless), "{text:?}");
}

/// A temporary folder.
#[derive(Debug)]
pub struct Folder(tempfile::TempDir);

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}

impl Folder {
    /// An empty one.
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
        fs::write(self.join(name), contents).unwrap();
    }

    /// One byte tensor of `bytes` bytes, whose name JSON reads from `name`.
    pub fn write_tensor(&self, file_name: impl AsRef<Path>, name: &str, bytes: usize) {
        let entry = entry(name, &format!("[{bytes}]"), 0, bytes);
        self.write(file_name, file(&format!("{{{entry}}}"), &vec![7; bytes]));
    }
}

/// A safetensors file of this header and payload.
pub fn file(header: &str, payload: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), payload].concat()
}

/// An entry of a header for a tensor of bytes.
pub fn entry(name: &str, shape: &str, begin: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}
