//! Running the command, and files to run it with.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use poorwill_bench::synthetic::SyntheticMoe;
use serde_json::Value;

/// The command with these arguments in a folder, without a terminal and without the caller's settings.
pub(crate) fn command(folder: &Path, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_poorwill"));
    command.args(args).current_dir(folder);
    for name in ["CLICOLOR_FORCE", "COLUMNS", "RUST_BACKTRACE"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command to its end.
pub(crate) fn run(folder: &Folder, args: &[&str]) -> Ran {
    Ran::from(command(folder.path(), args).output().unwrap())
}

/// How the command ended. Whatever it did, it said so in UTF-8 and did not panic.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
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
    pub(crate) fn succeeded(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""), "{self:?}");
        self.stdout
    }

    /// The one JSON object that standard output must be.
    pub(crate) fn json(&self) -> Value {
        assert!(self.stdout.ends_with('\n') && self.stdout.lines().count() == 1, "{self:?}");
        let value: Value = serde_json::from_str(&self.stdout).unwrap();
        assert!(value.is_object(), "{self:?}");
        value
    }

    /// The message of a command that failed, in one line, with each of `words` in it.
    pub(crate) fn failed(&self, words: &[&str]) -> &str {
        assert_eq!(self.code, 1, "{self:?}");
        let line = self.stderr.strip_prefix("error: ").and_then(|rest| rest.strip_suffix('\n'));
        let all = line.unwrap_or_else(|| panic!("{self:?}"));
        let (message, excerpt) = all.split_once('\n').unwrap_or((all, ""));
        assert!(excerpt.lines().all(|line| line.contains(" |")), "{all}");
        assert!(!message.contains('\n') && message.len() < 2000, "{message}");
        assert_clean(message);
        for word in words {
            assert!(all.contains(word), "`{word}` is not in: {all}");
        }
        message
    }
}

/// A terminal would show this and do nothing else.
pub(crate) fn assert_clean(text: &str) {
    let harmless = |c: char| c == '\n' || !(c.is_control() || "\u{202e}\u{200b}\u{2028}".contains(c));
    assert!(text.chars().all(harmless), "{text:?}");
}

/// A temporary folder.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// With a mixture of experts of about 7 MB in `model/`: three shards and their index.
    pub(crate) fn with_model() -> Self {
        let folder = Self::new();
        let model = SyntheticMoe {
            layers: 2,
            experts: 12,
            hidden: 256,
            moe_intermediate: 256,
            vocab: 1000,
            shards: 3,
            seed: 1,
        };
        model.write(&folder.join("model"), |_| {}).unwrap();
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn write(&self, name: impl AsRef<Path>, contents: impl AsRef<[u8]>) {
        fs::write(self.join(name), contents).unwrap();
    }

    /// One byte tensor of `bytes` bytes, whose name JSON reads from `name`.
    pub(crate) fn write_tensor(&self, file_name: impl AsRef<Path>, name: &str, bytes: usize) {
        let entry = entry(name, &format!("[{bytes}]"), 0, bytes);
        self.write(file_name, file(&format!("{{{entry}}}"), &vec![7; bytes]));
    }
}

/// A safetensors file of this header and payload.
pub(crate) fn file(header: &str, payload: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), payload].concat()
}

/// An entry of a header for a tensor of bytes.
pub(crate) fn entry(name: &str, shape: &str, begin: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}
