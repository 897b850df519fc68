//! A process that is taken off its device: the child, and its parent's side.
//!
//! The parent writes a word a line, and the child answers each with a line that begins with `>`.

use std::any::Any;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use poorwill_core::{CopyPart, DeviceRange, Driver, HostBuffer, StreamId};
use rustix::process::{Pid, Signal, kill_process};

use crate::child::OwnedChild;
use crate::latch::{self, Latch};
use crate::pattern;

/// The child, and what it says. It is killed when this is dropped.
#[derive(Debug)]
pub struct HibernationTarget {
    child: OwnedChild,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl HibernationTarget {
    /// Starts the child, and waits until it can be locked.
    ///
    /// # Panics
    /// If it cannot be started.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        let mut child = OwnedChild::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut target = Self { child, input, output };
        assert_eq!(target.hear(), "ready");
        target
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Says a word, and returns the answer.
    ///
    /// # Panics
    /// If it has ended.
    pub fn ask(&mut self, word: &str) -> String {
        self.say(word);
        self.hear()
    }

    /// Says a word that may end it before it answers.
    ///
    /// # Panics
    /// If it has ended.
    pub fn say(&mut self, word: &str) {
        writeln!(self.input, "{word}").unwrap();
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// If the system refuses it.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Kills it, and waits until it is gone.
    ///
    /// # Panics
    /// If the system refuses it.
    pub fn kill(&mut self) {
        self.child.end();
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the target has ended");
            if let Some((_, answer)) = line.trim_end().rsplit_once("> ") {
                return answer.to_owned();
            }
        }
    }
}

/// Begins a device call, and keeps it under way as long as what it returns. `None` if the device is lost.
pub type Enter = Arc<dyn Fn() -> Option<Box<dyn Any>> + Send + Sync>;

/// What the child does until its input ends.
///
/// - `fill N`: maps N granules, and fills them with a pattern.
/// - `verify`: says `same` if all have their pattern, at their addresses.
/// - `begin`: begins a device call on a thread, which takes memory. `ended`: how many of these have ended.
/// - `look`: waits for the stream on a thread, which a lock does not hold up.
/// - `queue`: queues work that goes on until `finish`.
///
/// # Panics
/// If a call fails that must not.
pub fn serve(device: &Arc<dyn Driver>, enter: &Enter) {
    let (mut filled, ended, latch) = (Vec::new(), Arc::new(AtomicU64::new(0)), Arc::new(Latch::default()));
    let stream = device.stream_create().unwrap();
    say("ready");
    for line in io::stdin().lock().lines() {
        let line = line.unwrap();
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "fill" => {
                let _call = enter();
                let range = fill(&**device, rest.parse().unwrap(), filled.len() as u64);
                filled.push(range);
                say(&range.bytes.to_string());
            }
            "verify" => {
                let _call = enter();
                let is_same = (0..).zip(&filled).all(|(seed, range)| is_filled(&**device, *range, seed));
                say(if is_same { "same" } else { "changed" });
            }
            "begin" => {
                let (device, enter, ended) = (Arc::clone(device), Arc::clone(enter), Arc::clone(&ended));
                thread::spawn(move || {
                    let call = enter();
                    let taken = device.create(device.info().granule_bytes);
                    let _ = taken.and_then(|backing| device.release(backing));
                    drop(call);
                    ended.fetch_add(1, Ordering::AcqRel);
                });
                say("begun");
            }
            "look" => {
                let (device, ended) = (Arc::clone(device), Arc::clone(&ended));
                thread::spawn(move || {
                    device.stream_synchronize(stream).unwrap();
                    ended.fetch_add(1, Ordering::AcqRel);
                });
                say("begun");
            }
            "ended" => say(&ended.load(Ordering::Acquire).to_string()),
            "queue" => {
                let _call = enter();
                latch::hold(&**device, stream, &latch);
                say("queued");
            }
            "finish" => {
                latch.open();
                say("finished");
            }
            _ => panic!("there is no word `{word}`"),
        }
    }
    latch.open();
}

fn say(answer: &str) {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "> {answer}").unwrap();
    stdout.flush().unwrap();
}

fn fill(device: &dyn Driver, granules: u64, seed: u64) -> DeviceRange {
    let range = device.reserve(granules * device.info().granule_bytes).unwrap();
    let backing = device.create(range.bytes).unwrap();
    device.map(range, backing).unwrap();
    device.set_access(range).unwrap();
    device.release(backing).unwrap();
    let bytes = pattern::bytes(seed, usize::try_from(range.bytes).unwrap());
    let parts = [CopyPart { device: range, host_offset: 0 }];
    device.copy_to_device(StreamId::DEFAULT, Arc::new(bytes.into()), &parts).unwrap().wait().unwrap();
    range
}

fn is_filled(device: &dyn Driver, range: DeviceRange, seed: u64) -> bool {
    let len = usize::try_from(range.bytes).unwrap();
    let parts = [CopyPart { device: range, host_offset: 0 }];
    let read = device.copy_to_host(StreamId::DEFAULT, HostBuffer::from(vec![0xEE; len]), &parts).unwrap();
    *read.wait().unwrap() == *pattern::bytes(seed, len)
}
