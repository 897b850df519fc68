//! The broker as a process: how it begins and ends, and what it answers.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use poorwill_broker::{Client, Hello, LentChunk};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, prlimit};
use serde_json::json;

use crate::json::expect;
use crate::support::{Folder, Ran, assert_clean, command, run};

const DEVICE: &str = "GPU-5a5a5a5a";

/// A broker that serves, ended with the test.
struct Served {
    child: Child,
    stdout: BufReader<ChildStdout>,
    socket: PathBuf,
}

impl Served {
    fn start(folder: &Folder, more: &[&str]) -> Self {
        let socket = folder.join("broker.sock");
        let words = ["broker", "--socket", socket.to_str().unwrap()];
        Self::of(command(folder.path(), words.iter().chain(more)), socket)
    }

    fn of(mut command: Command, socket: PathBuf) -> Self {
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, format!("serving at {}\n", socket.display()));
        Self { child, stdout, socket }
    }

    fn client(&self) -> Client {
        let hello = Hello { device: DEVICE.into(), name: "an engine".into() };
        Client::connect(&self.socket, &hello, TEST_TIMEOUT).unwrap()
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The exit code and the signal, and what it printed.
    fn end(mut self) -> (Option<i32>, Option<i32>, String) {
        let mut printed = String::new();
        self.stdout.read_to_string(&mut printed).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
        let status = self.child.wait().unwrap();
        (status.code(), status.signal(), printed)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // One that has ended is waited for in vain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn chunks(bytes: &[u64]) -> Vec<LentChunk> {
    let chunk = |(id, bytes)| {
        let descriptor = OwnedFd::from(File::open("/").unwrap());
        LentChunk { id, bytes, is_dropped: false, descriptor }
    };
    (1..).zip(bytes.iter().copied()).map(chunk).collect()
}

/// The command with these words, for the broker at a path.
fn asked(folder: &Folder, socket: &Path, words: &[&str]) -> Ran {
    run(folder, &[&["broker", "--socket", socket.to_str().unwrap()], words].concat())
}

#[test]
fn signals_end_it_and_take_its_socket_away() {
    for (signal, ends) in [(Signal::TERM, true), (Signal::INT, true), (Signal::HUP, false)] {
        let folder = Folder::new();
        let broker = Served::start(&folder, &[]);
        let client = broker.client();
        kill_process(broker.pid(), signal).unwrap();
        if !ends {
            client.status().unwrap();
            kill_process(broker.pid(), Signal::TERM).unwrap();
        }
        let socket = broker.socket.clone();
        assert_eq!(broker.end(), (Some(0), None, String::new()), "{signal:?}");
        assert!(!socket.exists(), "{signal:?}");
    }
}

#[test]
fn it_ends_by_itself_when_it_is_idle() {
    let folder = Folder::new();
    let broker = Served::start(&folder, &["--idle", "1ms"]);
    assert_eq!(broker.end(), (Some(0), None, "ended: there was no connection for 1ms\n".into()));
}

#[test]
fn a_second_one_leaves_the_place_to_the_first() {
    let folder = Folder::new();
    let broker = Served::start(&folder, &[]);
    let printed = asked(&folder, &broker.socket, &[]).succeeded();
    assert!(printed.contains("serves") && printed.contains(broker.socket.to_str().unwrap()), "{printed}");
    broker.client().status().unwrap();
}

#[test]
fn it_says_what_it_has_and_frees_what_is_asked() {
    let folder = Folder::new();
    let broker = Served::start(&folder, &[]);
    let empty = asked(&folder, &broker.socket, &["--status"]).succeeded();
    let pid = broker.child.id();
    assert!(empty.starts_with(&format!("nothing is lent\nprocess {pid} has had 0 B lent")), "{empty}");
    let client = broker.client();
    client.lend(chunks(&[3 << 20, 1 << 20, 8 << 20])).unwrap();
    let text = asked(&folder, &broker.socket, &["--status"]).succeeded();
    assert_clean(&text);
    let pid = std::process::id().to_string();
    for word in [DEVICE, "an engine", "12 MiB", &pid, "has had 12 MiB lent, 0 B taken by others"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let status = asked(&folder, &broker.socket, &["--status", "--json"]).json();
    expect("poorwill broker --status", &status);
    assert_eq!(status["lenders"][0]["lent_bytes"], 12 << 20, "{status}");
    let device = ["--device", DEVICE];
    let other = asked(&folder, &broker.socket, &["--give-up", "--device", "GPU-other"]).succeeded();
    assert_eq!(other, "freed 0 B on GPU-other\n");
    let some = asked(&folder, &broker.socket, &[&["--give-up=1MiB", "--json"], &device[..]].concat()).json();
    expect("poorwill broker --give-up", &some);
    assert_eq!(some["asked_bytes"], 1 << 20);
    let freed_bytes = some["freed_bytes"].as_u64().unwrap();
    assert!(freed_bytes >= 1 << 20, "{some}");
    let rest =
        asked(&folder, &broker.socket, &[&["--give-up", "all", "--json"], &device[..]].concat()).json();
    let left_bytes = (12 << 20) - freed_bytes;
    let none = json!({"device": DEVICE, "asked_bytes": null, "freed_bytes": left_bytes, "given_up_bytes": 0, "kept_bytes": 0});
    assert_eq!(rest, none);
    assert_eq!(client.take_back(None).unwrap().len(), 0);
    let more = asked(&folder, &broker.socket, &[&["--give-up=8GiB"], &device[..]].concat()).succeeded();
    assert_eq!(more, format!("freed 0 B of the 8 GiB asked for on {DEVICE}\n"));
}

#[test]
fn owners_are_asked_for_what_they_have_to_back_up() {
    let folder = Folder::new();
    let broker = Served::start(&folder, &[]);
    let client = broker.client();
    client.lend(chunks(&[8 << 20])).unwrap();
    client.on_give_up(|bytes| bytes).unwrap();
    client.announce(4 << 20).unwrap();
    let asked = |more: &str| {
        asked(&folder, &broker.socket, &["--give-up", "--device", DEVICE, "--wait-max", more]).succeeded()
    };
    assert_eq!(asked("0s"), format!("freed 8 MiB on {DEVICE}\n"));
    let given_up = asked("10m");
    assert_eq!(given_up, format!("freed 4 MiB on {DEVICE}, 4 MiB of it backed up by its owners\n"));
}

#[test]
fn the_environment_names_its_socket() {
    let folder = Folder::new();
    let broker = Served::start(&folder, &[]);
    let ran = |socket: &OsStr| {
        let mut command = command(folder.path(), ["broker", "--status", "--json"]);
        let output = command.env("POORWILL_BROKER", socket).env("XDG_RUNTIME_DIR", folder.path()).output();
        Ran::from(output.unwrap())
    };
    assert!(ran(broker.socket.as_os_str()).json()["lenders"].is_array());
    let usual = folder.join("poorwill");
    ran(OsStr::new("")).failed(&["no broker is at", usual.to_str().unwrap()]);
}

#[test]
fn it_takes_as_many_descriptors_as_the_system_allows() {
    let folder = Folder::new();
    let socket = folder.join("broker.sock");
    let mut program = command(folder.path(), ["broker", "--socket"]);
    program.arg(&socket);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args());
    shell.stdout(Stdio::piped()).stderr(Stdio::piped());
    let broker = Served::of(shell, socket);
    let limit = getrlimit(Resource::Nofile);
    let all = Rlimit { current: limit.maximum, ..limit };
    assert_eq!(prlimit(Some(broker.pid()), Resource::Nofile, all).unwrap(), all);
}

#[test]
fn without_a_broker_it_says_so() {
    let folder = Folder::new();
    let socket = folder.join("none.sock");
    asked(&folder, &socket, &["--status"]).failed(&["no broker is at", "none.sock", "start one"]);
    let freed = asked(&folder, &socket, &["--give-up", "--device", DEVICE]).succeeded();
    assert_eq!(freed, format!("freed 0 B on {DEVICE}\n"), "nothing is lent then");
    let nowhere = folder.join("a/b/broker.sock");
    asked(&folder, &nowhere, &[]).failed(&["a/b", "cannot be made"]);
    folder.write("file", "");
    asked(&folder, &folder.join("file"), &[]).failed(&["file", "no socket"]);
}

#[test]
fn wrong_usage_is_refused() {
    let folder = Folder::new();
    for (words, said) in [
        (&["--give-up"][..], "--device"),
        (&["--device", DEVICE], "--give-up"),
        (&["--give-up=0", "--device", DEVICE], "8GiB, or all"),
        (&["--give-up=much", "--device", DEVICE], "8GiB, or all"),
        (&["--give-up=-1", "--device", DEVICE], "8GiB, or all"),
        (&["--status", "--give-up", "--device", DEVICE], "--status"),
        (&["--status", "--idle", "2s"], "--idle"),
        (&["--idle", "0s"], "60s or 2m"),
        (&["--idle", "60"], "60s or 2m"),
        (&["--json"], "--status"),
        (&["--wait-max", "1s"], "--give-up"),
        (&["serve"], "serve"),
    ] {
        let ran = run(&folder, &[&["broker"], words].concat());
        assert!(ran.code == 2 && ran.stdout.is_empty() && ran.stderr.contains(said), "{words:?}: {ran:?}");
    }
}
