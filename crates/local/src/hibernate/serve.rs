//! The helper: requests from standard input, answers to standard output, one JSON object a line.
//!
//! Requests run at the same time, and answers come in any order. At the end of its input, and after SIGTERM, it
//! finishes what it has begun. What another helper has left is recovered beside: requests on such processes wait.
//!
//! ```text
//! out  {"ready":{"version":"0.1.0","driver":"580.159.04"}}   the driver's where NVML knows it
//! out  {"recovered":[{"pid":7,"state":"running","what":"it was locked, and runs again"}]}
//! in   {"id":1,"op":"hibernate","pids":[7,8],"wait_max_ms":5000,"host_bytes_max":null}
//! in   {"id":2,"op":"state","pids":[9]}           op: hibernate, resume, inspect, state, or recover without pids
//! out  {"id":2,"error":{"kind":"no_such_process","message":"…","pid":9,"left":[]}}
//! out  {"id":1,"ok":{"processes":[{"pid":7,"released_bytes":1,"lock_ms":0.8,"checkpoint_ms":870.0},…],…}}
//! ```
//!
//! Where it cannot work, its one line is `{"unusable":"why","kind":"…"}`, and its exit code 1. Of kind `unsupported`, another
//! try is in vain until the machine changes.

use std::io::{self, BufRead, Read, Write};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::outcomes::{Inspections, States};
use super::requests;
use super::show::state_name;
use super::signals::HeldSignals;
use crate::failure::{self, Failure};
use poorwill::hibernation::{HibernateError, Hibernator, HibernatorOptions, LeftSets, Recovered};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Longer than any request.
const LINE_BYTES_MAX: u64 = 1 << 20;

const WAIT_MAX_MS: u64 = 5000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Operation {
    Hibernate,
    Resume,
    Inspect,
    State,
    Recover,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    id: Value,
    op: Operation,
    /// Of all operations but `recover`.
    pids: Option<Vec<u32>>,
    wait_max_ms: Option<u64>,
    host_bytes_max: Option<u64>,
    /// Of `hibernate` and `resume`.
    #[serde(default)]
    without_space_check: bool,
    /// Of `hibernate`.
    #[serde(default)]
    suspended_communicators: usize,
}

/// What the helper waits for.
enum Event {
    Line(Vec<u8>),
    /// There will be no more of them, no place for answers, or SIGTERM.
    End,
}

pub(super) fn run(options: &HibernatorOptions) -> ExitCode {
    match serve(options) {
        Ok(code) => code,
        Err(failure) => failure::report_error(&failure),
    }
}

fn serve(options: &HibernatorOptions) -> Result<ExitCode, Failure> {
    let mut signals = HeldSignals::new()?;
    let opened = Hibernator::open(options).and_then(|hibernator| Ok((hibernator.left_sets()?, hibernator)));
    let (left, hibernator) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            write_line(&json!({ "unusable": poorwill::chain(&error), "kind": error.code() }))?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let driver = hibernator.driver_version();
    write_line(&json!({ "ready": { "version": env!("CARGO_PKG_VERSION"), "driver": driver } }))?;
    requests::warn_of_unreadable(&hibernator);
    let (events, received) = channel();
    let terminated = events.clone();
    signals.on_terminate(move || {
        let _ = terminated.send(Event::End);
    })?;
    read_lines(events.clone())?;
    let mut helper = Helper { hibernator: Arc::new(hibernator), events, begun: Vec::new() };
    helper.recover(left);
    helper.answer(&received);
    helper.finish();
    Ok(ExitCode::SUCCESS)
}

/// A line of its own.
fn line_of(recovered: &[Recovered]) -> Value {
    let recovered: Vec<Value> = recovered
        .iter()
        .map(|process| {
            let what = process.what.to_string();
            json!({ "pid": process.pid, "state": state_name(process.state), "what": what, "error": process.error })
        })
        .collect();
    json!({ "recovered": recovered })
}

/// On a thread that may be left behind: it waits for input that may never come.
fn read_lines(events: Sender<Event>) -> Result<(), Failure> {
    let read = move || {
        let mut stdin = io::stdin().lock();
        while let Ok(Some(line)) = next_line(&mut stdin) {
            if events.send(Event::Line(line)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::End);
    };
    let thread = thread::Builder::new().name("poorwill-requests".into()).spawn(read);
    thread.map(drop).map_err(|error| Failure::new(format!("cannot start a thread: {error}")))
}

/// A line without its end; of one that is too long, a part that is no request.
fn next_line(input: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    if input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.ends_with(b"\n") {
        line.pop();
    } else if line.len() as u64 == LINE_BYTES_MAX {
        input.skip_until(b'\n')?;
        line.truncate(1);
    }
    Ok(Some(line))
}

struct Helper {
    hibernator: Arc<Hibernator>,
    events: Sender<Event>,
    begun: Vec<JoinHandle<()>>,
}

impl Helper {
    fn answer(&mut self, received: &Receiver<Event>) {
        while let Ok(Event::Line(line)) = received.recv() {
            if !line.trim_ascii().is_empty() {
                self.begin(line);
            }
        }
    }

    fn recover(&mut self, left: LeftSets) {
        if left.is_empty() {
            return;
        }
        let left = Mutex::new(left);
        self.run("poorwill-recovery", move |hibernator| {
            let left = mem::take(&mut *left.lock().unwrap_or_else(PoisonError::into_inner));
            let recovered = hibernator.recover_sets(left);
            requests::warn_of_unreadable(hibernator);
            match recovered {
                Ok(recovered) if recovered.is_empty() => Ok(()),
                Ok(recovered) => write_line(&line_of(&recovered)),
                Err(error) => {
                    failure::warn(&format!("what was left cannot be recovered: {}", poorwill::chain(&error)));
                    Ok(())
                }
            }
        });
    }

    fn begin(&mut self, line: Vec<u8>) {
        self.run("poorwill-request", move |hibernator| {
            let answer = answer(hibernator, &line);
            requests::warn_of_unreadable(hibernator);
            write_line(&answer)
        });
    }

    /// On a thread of its own.
    fn run(&mut self, name: &str, work: impl Fn(&Hibernator) -> Result<(), Failure> + Send + Sync + 'static) {
        self.begun.retain(|request| !request.is_finished());
        let (hibernator, events) = (Arc::clone(&self.hibernator), self.events.clone());
        let work = Arc::new(work);
        let same = Arc::clone(&work);
        let on_thread = move || {
            if same(&hibernator).is_err() {
                let _ = events.send(Event::End);
            }
        };
        match thread::Builder::new().name(name.into()).spawn(on_thread) {
            Ok(begun) => self.begun.push(begun),
            // Without another thread, one after another.
            Err(_) => drop(work(&self.hibernator)),
        }
    }

    fn finish(self) {
        for request in self.begun {
            // Its panics are caught.
            let _ = request.join();
        }
    }
}

fn answer(hibernator: &Hibernator, line: &[u8]) -> Value {
    match serde_json::from_slice::<Asked>(line) {
        Ok(asked) => {
            let done = catch_unwind(AssertUnwindSafe(|| perform(hibernator, &asked)));
            match done.unwrap_or_else(|_| Err(error("failed", "the helper's own code failed: report it"))) {
                Ok(done) => json!({ "id": asked.id, "ok": done }),
                Err(error) => json!({ "id": asked.id, "error": error }),
            }
        }
        Err(reason) => {
            let id = serde_json::from_slice::<Value>(line).ok().and_then(|line| line.get("id").cloned());
            let message = format!(
                "this is no request: {reason}; write it like {{\"id\":1,\"op\":\"state\",\"pids\":[4711]}}, with op \
                 hibernate, resume, inspect, state or recover"
            );
            json!({ "id": id, "error": error("bad_request", &message) })
        }
    }
}

fn perform(hibernator: &Hibernator, asked: &Asked) -> Result<Value, Value> {
    let pids = match (&asked.pids, asked.op) {
        (Some(pids), _) => &pids[..],
        (None, Operation::Recover) => &[],
        (None, _) => {
            return Err(error("bad_request", "this request names no process: add `pids`, like [4711]"));
        }
    };
    match asked.op {
        Operation::Recover if pids.is_empty() => in_json(requests::recover(hibernator)),
        Operation::Recover => {
            Err(error("bad_request", "`recover` is about all that was left: leave `pids` away"))
        }
        Operation::Hibernate => {
            let wait_max = Duration::from_millis(asked.wait_max_ms.unwrap_or(WAIT_MAX_MS));
            let request = requests::request(wait_max, asked.host_bytes_max, asked.without_space_check)
                .with_suspended_communicators(asked.suspended_communicators);
            in_json(hibernator.hibernate(pids, &request))
        }
        Operation::Resume => in_json(requests::resume(hibernator, pids, asked.without_space_check)),
        // Only what no other request is about to change.
        Operation::Inspect => {
            in_json(hibernator.await_calls(pids).and_then(|()| Inspections::of(hibernator, pids)))
        }
        Operation::State => in_json(hibernator.await_calls(pids).and_then(|()| States::of(hibernator, pids))),
    }
}

fn in_json(result: Result<impl Serialize, HibernateError>) -> Result<Value, Value> {
    let value = |value: Result<Value, serde_json::Error>| {
        value.map_err(|reason| error("failed", &format!("the answer cannot be written: {reason}")))
    };
    match result {
        Ok(done) => value(serde_json::to_value(done)),
        Err(failed) => Err(value(serde_json::to_value(failed)).unwrap_or_else(|error| error)),
    }
}

fn error(kind: &str, message: &str) -> Value {
    json!({ "message": message, "kind": kind, "pid": null, "left": [] })
}

fn write_line(value: &Value) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{value}").and_then(|()| stdout.flush());
    written.map_err(|error| Failure::new(format!("cannot write an answer: {error}")))
}
