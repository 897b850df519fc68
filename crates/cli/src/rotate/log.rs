//! Shows an engine's output, and follows it.
//!
//! The service sends it as a terminal gets it: a carriage return takes back the line in progress. Where standard output
//! is no terminal, a line is written once it is complete.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use poorwill_local::failure::{self, Failure};
use poorwill_rotate::client::{Client, ClientError};

use super::opening::{read_control, runtime};

/// Takes back a line on a terminal.
const TAKE_BACK: &[u8] = b"\r\x1b[K";

/// The last lines, oldest first.
pub(super) async fn last(client: &Client, model: &str, lines: u16) -> Result<Vec<String>, ClientError> {
    let mut all = Vec::new();
    let take = |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        true
    };
    client.log(model, lines.into(), false, take).await?;
    Ok(String::from_utf8_lossy(&all).lines().map(str::to_owned).collect())
}

/// Writes the last lines and those that come, until the service ends or standard output closes.
pub(super) fn follow(path: &Path, model: &str, lines: u16) -> ExitCode {
    match follow_to(&mut io::stdout().lock(), io::stdout().is_terminal(), path, model, lines) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure::report_error(&failure),
    }
}

fn follow_to(
    out: &mut impl Write,
    is_terminal: bool,
    path: &Path,
    model: &str,
    lines: u16,
) -> Result<(), Failure> {
    let control = read_control(path)?;
    let mut shown = Shown { is_terminal, open: Vec::new() };
    let mut broke = None;
    runtime()?.block_on(Client::of_control(&control).log(model, lines.into(), true, |bytes| {
        let written = out.write_all(&shown.of(bytes)).and_then(|()| out.flush());
        broke = written.err();
        broke.is_none()
    }))?;
    match broke {
        Some(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("cannot print the log: {error}")))
        }
        _ => Ok(()),
    }
}

/// What is written of the service's bytes.
struct Shown {
    is_terminal: bool,
    /// The line in progress.
    open: Vec<u8>,
}

impl Shown {
    fn of(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut text = Vec::new();
        for byte in bytes {
            match (byte, self.is_terminal) {
                (b'\r', true) => text.extend_from_slice(TAKE_BACK),
                (byte, true) => text.push(*byte),
                (b'\r', false) => self.open.clear(),
                (b'\n', false) => {
                    text.append(&mut self.open);
                    text.push(b'\n');
                }
                (byte, false) => self.open.push(*byte),
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gets_complete_lines_and_a_terminal_the_one_in_progress() {
        let bytes = b"one\n10 %\r20 %\r\r30 %\ntwo\n\rthree";
        for every in 1..=bytes.len() {
            let of = |is_terminal| {
                let mut shown = Shown { is_terminal, open: Vec::new() };
                bytes.chunks(every).flat_map(|part| shown.of(part)).collect::<Vec<u8>>()
            };
            assert_eq!(of(false), b"one\n30 %\ntwo\n", "{every}");
            let terminal = String::from_utf8(of(true)).unwrap();
            assert_eq!(terminal.matches("\r\x1b[K").count(), 4, "{terminal:?}");
            assert!(terminal.ends_with("two\n\r\x1b[Kthree"), "{terminal:?}");
        }
    }
}
