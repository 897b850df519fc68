//! This process, taken off its device and put back by a helper that it starts.

use std::io::{self, BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use poorwill_bench::verify::Hibernation;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::requests::HOST_PROCESSES;
use crate::failure::Failure;

/// `hibernate --serve` of this program. It ends with this value.
pub(crate) struct OwnHelper {
    talk: Mutex<Talk>,
    child: Child,
    /// With its journal, and for the host device with this process's registration.
    folder: TempDir,
    is_host: bool,
}

struct Talk {
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl OwnHelper {
    /// Starts it, for the host device or for NVIDIA's GPUs.
    pub(crate) fn start(is_host: bool) -> Result<Self, Failure> {
        let failed =
            |error: io::Error| Failure::new(format!("cannot start a helper for hibernation: {error}"));
        let folder = tempfile::tempdir().map_err(failed)?;
        let mut command = command(folder.path(), is_host).map_err(failed)?;
        let mut child =
            command.arg("--serve").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new("cannot start a helper for hibernation: it has no pipes"));
        };
        let mut talk = Talk { stdin, lines: BufReader::new(stdout).lines() };
        let ready = talk.answer().map_err(Failure::new)?;
        match ready["unusable"].as_str() {
            Some(reason) => Err(Failure::new(reason)),
            None => Ok(Self { talk: Mutex::new(talk), child, folder, is_host }),
        }
    }

    /// Where the host device's processes are registered.
    pub(crate) fn processes(&self) -> PathBuf {
        self.folder.path().join("processes")
    }

    /// Off the device, and back.
    pub(crate) fn cycle(&self) -> Result<Hibernation, String> {
        let mut talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
        let before = talk.ask("inspect")?;
        let steps = talk.off_and_back();
        let (hibernated, meanwhile, resumed) = steps.inspect_err(|_| self.rescue())?;
        let seconds = |report: &Value| report["total_ms"].as_f64().unwrap_or_default() / 1e3;
        Ok(Hibernation {
            held_bytes: before["host_bytes"].as_u64(),
            left_bytes: meanwhile["host_bytes"].as_u64(),
            host_bytes: hibernated["host_bytes"].as_u64(),
            hibernate_s: seconds(&hibernated),
            resume_s: seconds(&resumed),
        })
    }

    /// Without its helper this process might wait for its device for ever.
    fn rescue(&self) {
        let pid = format!("--pid={}", std::process::id());
        for args in [&["--recover"][..], &["--resume", &pid]] {
            let command = command(self.folder.path(), self.is_host);
            // The helper's error says what is wrong.
            let _ = command.and_then(|mut command| {
                command.args(args).stdout(Stdio::null()).stderr(Stdio::null()).status()
            });
        }
    }
}

/// This program with its journal in `folder`.
fn command(folder: &Path, is_host: bool) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["hibernate", "--journal"]).arg(folder.join("journal")).env_remove(HOST_PROCESSES);
    if is_host {
        command.arg("--processes").arg(folder.join("processes"));
    }
    Ok(command)
}

impl Drop for OwnHelper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Talk {
    /// The answers to each step.
    fn off_and_back(&mut self) -> Result<(Value, Value, Value), String> {
        let hibernated = self.ask("hibernate")?;
        let meanwhile = self.ask("inspect");
        // Whatever is known of it, it has to come back.
        let resumed = self.ask("resume")?;
        Ok((hibernated, meanwhile?, resumed))
    }

    fn ask(&mut self, operation: &str) -> Result<Value, String> {
        let request = json!({ "id": operation, "op": operation, "pids": [std::process::id()] });
        let sent = writeln!(self.stdin, "{request}").and_then(|()| self.stdin.flush());
        sent.map_err(|error| format!("the helper for hibernation does not listen: {error}"))?;
        let mut answer = self.answer()?;
        match answer["error"]["message"].as_str() {
            Some(message) => Err(message.to_owned()),
            None => Ok(answer["ok"].take()),
        }
    }

    fn answer(&mut self) -> Result<Value, String> {
        let line = self.lines.next().ok_or("the helper for hibernation has ended")?;
        let line = line.map_err(|error| format!("the helper for hibernation cannot be read: {error}"))?;
        serde_json::from_str(&line)
            .map_err(|error| format!("the helper for hibernation wrote `{line}`: {error}"))
    }
}
