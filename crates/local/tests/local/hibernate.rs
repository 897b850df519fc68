//! `poorwill hibernate`, over processes on the host device: by single commands, and as a helper.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;

use poorwill::hibernation::ProcessState::{Checkpointed, Failed, Running};
use poorwill::hibernation::{CheckpointStep, ProcessState};
use poorwill_testkit::child::OwnedChild;
use poorwill_testkit::engine::{HostEngine, run_as_child};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use serde_json::{Value, json};

use crate::support::{Folder, Ran, assert_clean, command};

use CheckpointStep::{Checkpoint, Lock, Restore, Unlock};

const MIB: u64 = 1 << 20;

/// Engines, a journal, and the commands that work on them.
struct Place(Folder);

impl Place {
    fn new() -> Self {
        Self(Folder::new())
    }

    fn engines(&self) -> [HostEngine; 2] {
        [(); 2].map(|()| HostEngine::start(&self.0.join("engines"), MIB))
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command =
            command(self.0.path(), ["hibernate", "--processes", "engines", "--journal", "journal"]);
        command.args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        Ran::from(self.command(args).output().unwrap())
    }

    fn on(&self, args: &[&str], pids: &[u32]) -> Ran {
        let pids: Vec<String> = pids.iter().map(|pid| format!("--pid={pid}")).collect();
        self.run(&[args, &pids.iter().map(String::as_str).collect::<Vec<_>>()].concat())
    }

    fn helper(&self) -> Helper {
        Helper::start(&mut self.command(&["--serve"]))
    }

    fn journal(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.0.join("journal")).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn pids(engines: &[HostEngine; 2]) -> [u32; 2] {
    engines.each_ref().map(HostEngine::pid)
}

fn states(engines: &[HostEngine; 2]) -> [ProcessState; 2] {
    engines.each_ref().map(HostEngine::state)
}

/// `poorwill hibernate --serve`.
struct Helper {
    child: OwnedChild,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Helper {
    fn start(command: &mut Command) -> Self {
        let mut child = OwnedChild::start(command.stdin(Stdio::piped()));
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { stdin: child.stdin.take(), child, lines }
    }

    fn ready(&mut self) -> Value {
        self.answer()["ready"].clone()
    }

    fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(line.as_bytes()).unwrap();
        stdin.write_all(b"\n").unwrap();
    }

    fn ask(&mut self, request: &Value) {
        self.send(&request.to_string());
    }

    fn answer(&mut self) -> Value {
        serde_json::from_str(&self.lines.recv_timeout(TEST_TIMEOUT).expect("a line")).unwrap()
    }

    /// The last answers, after the end of its input.
    fn end(mut self) -> Vec<Value> {
        drop(self.stdin.take());
        self.rest()
    }

    fn rest(&mut self) -> Vec<Value> {
        let mut answers = Vec::new();
        loop {
            match self.lines.recv_timeout(TEST_TIMEOUT) {
                Ok(line) => answers.push(serde_json::from_str(&line).unwrap()),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("the helper does not end, after {answers:?}"),
            }
        }
        assert!(self.child.wait().unwrap().success());
        answers
    }
}

fn terminate(pid: u32) {
    let killed = Command::new("sh").args(["-c", &format!("kill -TERM {pid}")]).status().unwrap();
    assert!(killed.success());
}

#[test]
fn a_set_hibernates_and_resumes() {
    if run_as_child() {
        return;
    }
    let (place, folder) = (Place::new(), "engines");
    let engines = place.engines();
    let pids = pids(&engines);
    let inspected = place.on(&["--inspect", "--json"], &pids).json();
    assert_eq!(inspected["host_bytes"], 2 * MIB);
    assert_eq!(inspected["processes"][1]["held"][0]["used_bytes"], MIB);
    let text = place.on(&["--inspect"], &pids).succeeded();
    assert!(text.contains("2\u{a0}MiB of host memory"), "{text}");

    let report = place.on(&["--json", "--host-max=2MiB", "--wait-max=1m"], &pids).json();
    assert_eq!((&report["host_bytes"], &report["processes"][0]["pid"]), (&(2 * MIB).into(), &pids[0].into()));
    assert_eq!(report["processes"][1]["released_bytes"], MIB);
    assert_eq!(states(&engines), [Checkpointed; 2]);
    let text = place.on(&["--state"], &pids).succeeded();
    assert!(text.contains(&format!("process {} is checkpointed\n", pids[0])), "{text}");
    let recovered = place.run(&["--recover", "--json"]).json();
    assert_eq!(recovered["recovered"][0]["what"], "hibernating");
    let report = place.on(&["--resume", "--json"], &pids).json();
    assert!(report["processes"][0]["restore_ms"].is_f64() && report["total_ms"].is_f64(), "{report}");
    assert_eq!((states(&engines), place.journal()), ([Running; 2], vec![]));
    assert_eq!(place.run(&["--recover"]).succeeded(), "Nothing was left behind.\n");

    // By the environment, as for engines that others start.
    let mut by_variable = command(place.0.path(), ["hibernate", "--journal", "journal", "--state", "--json"]);
    by_variable.arg(format!("--pid={}", pids[0])).env("POORWILL_HOST_PROCESSES", folder);
    assert_eq!(Ran::from(by_variable.output().unwrap()).json()["processes"][0]["state"], "running");
    for text in [place.on(&[], &pids).succeeded(), place.on(&["--resume"], &pids).succeeded()] {
        assert_clean(&text);
        assert!(text.contains(&pids[1].to_string()) && text.contains("\u{a0}ms"), "{text}");
    }
}

#[test]
fn bad_input_gets_a_sentence_and_changes_nothing() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let mut engines = place.engines();
    let pid = engines[0].pid();
    engines[1].kill();
    let gone = engines[1].pid();
    let own = std::process::id();
    for (args, pids, kind, words) in [
        (&[][..], &[pid, gone][..], "no_such_process", "it has ended"),
        (&[], &[pid, pid], "bad_request", "named twice"),
        // This test's own process has not registered.
        (&[], &[own], "no_device", "uses no device"),
        (&["--resume"], &[pid], "wrong_state", "nothing to resume"),
        (&["--state"], &[gone], "no_such_process", "no such process"),
        (&["--inspect"], &[own], "no_device", "uses no device"),
        (
            &["--host-max=1"],
            &[pid],
            "out_of_host_memory",
            "takes 1 MiB of host memory, and the request allows 1 B",
        ),
    ] {
        let message = place.on(args, pids).failed(&[words]).to_owned();
        let ran = place.on(&[args, &["--json"]].concat(), pids);
        assert_eq!(ran.failed(&[]), message);
        let json = ran.json();
        assert_eq!(
            (&json["error"], &json["kind"], &json["left"]),
            (&message.into(), &kind.into(), &json!([]))
        );
        assert_eq!(engines[0].state(), Running);
    }
    let mut elsewhere = place.command(&["--recover"]);
    elsewhere.arg("--journal=/proc/poorwill");
    assert_eq!(Ran::from(elsewhere.output().unwrap()).code, 2, "it is named twice");
    let elsewhere =
        command(place.0.path(), ["hibernate", "--processes=engines", "--journal=/proc/x", "--recover"]);
    Ran::from({ elsewhere }.output().unwrap()).failed(&["/proc/x", "choose another folder"]);
}

#[test]
fn a_recovery_names_entries_that_it_does_not_understand() {
    let place = Place::new();
    let journal = place.0.join("journal");
    assert_eq!(place.run(&["--recover", "--json"]).json(), json!({ "recovered": [], "set_aside": [] }));
    for (name, args) in [("a", &["--recover"][..]), ("b", &["--recover", "--json"])] {
        std::fs::write(journal.join(name).with_extension("set"), "garbage").unwrap();
        let aside = std::fs::canonicalize(&journal).unwrap().join(name).with_extension("unreadable");
        let ran = place.run(args);
        assert!(
            ran.stderr.starts_with("warning: ") && ran.stderr.contains(aside.to_str().unwrap()),
            "{ran:?}"
        );
        if name == "a" {
            assert!(ran.stdout.contains(aside.to_str().unwrap()), "{ran:?}");
            assert!(!ran.stdout.contains("Nothing was left behind"), "{ran:?}");
        } else {
            assert_eq!(ran.json(), json!({ "recovered": [], "set_aside": [aside] }));
        }
    }
    assert_eq!(place.run(&["--recover"]).succeeded(), "Nothing was left behind.\n");
}

#[test]
fn a_helper_warns_of_entries_that_come_later() {
    let place = Place::new();
    let path = place.0.join("stderr");
    let stderr = std::fs::File::create(&path).unwrap();
    let mut helper = Helper::start(place.command(&["--serve"]).stderr(stderr));
    helper.ready();
    std::fs::write(place.0.join("journal/later.set"), "garbage").unwrap();
    for id in 0..2 {
        helper.ask(&json!({ "id": id, "op": "recover" }));
        let answer = helper.answer();
        assert!(answer["ok"]["set_aside"][0].as_str().unwrap().ends_with("/later.unreadable"), "{answer}");
    }
    assert_eq!(helper.end(), Vec::<Value>::new());
    let warnings = std::fs::read_to_string(path).unwrap();
    assert_eq!(warnings.matches("later.unreadable").count(), 1, "{warnings}");
}

#[test]
fn wrong_usage() {
    let folder = Folder::new();
    for (args, words) in [
        (&["--json"][..], "--pid"),
        (&["--pid"], "--pid"),
        (&["--pid", "0"], "0"),
        (&["--pid", "-3"], "-3"),
        (&["--pid", "4294967296"], "4294967296"),
        (&["--pid", "init"], "init"),
        (&["--pid", "1", "--resume", "--state"], "--resume"),
        (&["--pid", "1", "--resume", "--wait-max", "1s"], "--wait-max"),
        (&["--pid", "1", "--wait-max", "soon"], "5s or 500ms"),
        (&["--pid", "1", "--host-max", "much"], "much"),
        (&["--pid", "1", "--recover"], "--recover"),
        (&["--pid", "1", "--state", "--without-space-check"], "--without-space-check"),
        (&["--serve", "--pid", "1"], "--serve"),
        (&["--serve", "--json"], "--serve"),
        (&["--resume"], "--pid"),
    ] {
        let ran = Ran::from(command(folder.path(), ["hibernate"].iter().chain(args)).output().unwrap());
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(words), "{args:?}: {ran:?}");
    }
}

#[test]
fn one_failure_brings_both_back() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    let pids = pids(&engines);
    engines[1].fail(Checkpoint, false);
    let ran = place.on(&["--json"], &pids);
    ran.failed(&[&format!("checkpoint of process {}", pids[1]), "too little memory"]);
    assert_eq!((&ran.json()["pid"], &ran.json()["left"]), (&pids[1].into(), &json!([])));
    assert_eq!(states(&engines), [Running; 2]);

    engines[1].fail(Checkpoint, true);
    let ran = place.on(&["--json"], &pids);
    ran.failed(&["restart it"]);
    assert_eq!(ran.json()["left"], json!([{ "pid": pids[1], "state": "failed" }]));
    assert_eq!((states(&engines), place.journal()), ([Running, Failed], vec![]));
}

#[test]
fn whatever_phase_a_command_is_killed_in_the_next_one_recovers() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    let pids = pids(&engines);
    let [first, second] = pids.map(|pid| format!("--pid={pid}"));
    for (step, is_released_late) in [
        (Lock, false),
        (Checkpoint, false),
        (Checkpoint, true),
        (Restore, false),
        (Restore, true),
        (Unlock, false),
    ] {
        for held in &engines {
            let args: &[&str] = if matches!(step, Restore | Unlock) {
                place.on(&[], &pids).succeeded();
                &["--resume", &first, &second]
            } else {
                &[&first, &second, "--wait-max=1m"]
            };
            held.hold(step);
            let mut command = OwnedChild::start(&mut place.command(args));
            held.await_held(step);
            command.end();
            // What the process has begun it ends itself, sooner or later than it is looked at.
            let recovered = thread::scope(|scope| {
                let release = || held.release(step);
                if is_released_late {
                    let recovering = scope.spawn(|| place.run(&["--recover", "--json"]).json());
                    release();
                    recovering.join().unwrap()
                } else {
                    release();
                    place.run(&["--recover", "--json"]).json()
                }
            });
            let states = states(&engines);
            assert!([[Running; 2], [Checkpointed; 2]].contains(&states), "{step}: {states:?}, {recovered}");
            if states == [Checkpointed; 2] {
                assert_eq!(recovered["recovered"].as_array().unwrap().len(), 2, "{step}: {recovered}");
                place.on(&["--resume"], &pids).succeeded();
            }
            assert_eq!(place.run(&["--recover"]).succeeded(), "Nothing was left behind.\n");
            assert_eq!(place.journal().iter().filter(|name| name.ends_with(".set")).count(), 0, "{step}");
        }
    }
}

#[test]
fn a_command_that_is_to_end_finishes_first() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    engines[0].hold(Checkpoint);
    let command = OwnedChild::start(&mut place.command(&[&format!("--pid={}", engines[0].pid())]));
    engines[0].await_held(Checkpoint);
    terminate(command.id());
    engines[0].release(Checkpoint);
    Ran::from(command.output()).succeeded();
    assert_eq!(engines[0].state(), Checkpointed);
}

#[test]
fn a_helper_answers_requests_at_the_same_time() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    let pids = pids(&engines);
    let mut helper = place.helper();
    assert_eq!(helper.ready(), json!({ "driver": null, "version": env!("CARGO_PKG_VERSION") }));
    engines[0].hold(Checkpoint);
    helper.ask(&json!({ "id": 1, "op": "hibernate", "pids": [pids[0]], "wait_max_ms": 60000, "host_bytes_max": MIB }));
    engines[0].await_held(Checkpoint);
    // It waits for the one before, and the others do not.
    helper.ask(&json!({ "id": "two", "op": "resume", "pids": [pids[0]] }));
    helper.ask(&json!({ "id": 3, "op": "hibernate", "pids": [pids[1]], "host_bytes_max": null }));
    let third = helper.answer();
    assert_eq!((&third["id"], &third["ok"]["processes"][0]["pid"]), (&3.into(), &pids[1].into()), "{third}");
    helper.ask(&json!({ "id": 4, "op": "state", "pids": [pids[1]] }));
    let states = helper.answer();
    let expected = json!([{ "pid": pids[1], "state": "checkpointed" }]);
    assert_eq!((&states["id"], &states["ok"]["processes"]), (&4.into(), &expected));
    engines[0].release(Checkpoint);
    let first = helper.answer();
    assert_eq!((&first["id"], &first["ok"]["host_bytes"]), (&1.into(), &MIB.into()), "{first}");
    let second = helper.answer();
    assert!(second["id"] == "two" && second["ok"]["total_ms"].is_f64(), "{second}");

    helper.ask(&json!({ "id": 5, "op": "inspect", "pids": [pids[0]] }));
    let inspected = helper.answer();
    let process = &inspected["ok"]["processes"][0];
    assert_eq!((&process["state"], &process["host_bytes"]), (&"running".into(), &MIB.into()), "{inspected}");
    helper.ask(&json!({ "id": 6, "op": "hibernate", "pids": [pids[1]] }));
    let refused = helper.answer();
    assert_eq!(
        (&refused["error"]["kind"], &refused["error"]["pid"]),
        (&"wrong_state".into(), &pids[1].into())
    );
    assert!(refused["error"]["message"].as_str().unwrap().contains("resume it first"), "{refused}");
    assert_eq!(helper.end(), Vec::<Value>::new());
}

#[test]
fn a_helper_says_what_is_no_request() {
    let place = Place::new();
    let mut helper = place.helper();
    helper.ready();
    for (line, id, word) in [
        ("{", json!(null), "EOF"),
        ("hibernate 7", json!(null), "write it like"),
        ("[1,2]", json!(null), "write it like"),
        (r#"{"id":7}"#, json!(7), "`op`"),
        (r#"{"id":8,"op":"erase","pids":[1]}"#, json!(8), "erase"),
        (r#"{"id":9,"op":"state"}"#, json!(9), "`pids`"),
        (r#"{"id":10,"op":"state","pids":[-1]}"#, json!(10), "-1"),
        (r#"{"id":16,"op":"recover","pids":[7]}"#, json!(16), "leave `pids` away"),
        (r#"{"id":11,"op":"state","pids":"7"}"#, json!(11), "write it like"),
        (r#"{"id":12,"op":"hibernate","pids":[1],"wait_ms":1}"#, json!(12), "`wait_ms`"),
        (r#"{"op":"state","pids":[1]}"#, json!(null), "`id`"),
        (r#"{"id":13,"op":"hibernate","pids":[]}"#, json!(13), "name one at least"),
        (&"x".repeat(3 << 20), json!(null), "write it like"),
    ] {
        helper.send(line);
        helper.send(" ");
        let answer = helper.answer();
        assert_eq!((&answer["id"], &answer["error"]["kind"]), (&id, &"bad_request".into()), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(word), "{word}: {message}");
    }
    helper.ask(&json!({ "id": 14, "op": "hibernate", "pids": [u32::MAX] }));
    assert_eq!(helper.answer()["error"]["kind"], "no_such_process");
    // The last line has no end.
    helper.stdin.as_mut().unwrap().write_all(br#"{"id":15,"op":"#).unwrap();
    let last = helper.end();
    assert!(matches!(&last[..], [answer] if answer["error"]["kind"] == "bad_request"), "{last:?}");
}

#[test]
fn a_helper_finishes_what_it_has_begun() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    for is_signal in [false, true] {
        let mut helper = place.helper();
        helper.ready();
        engines[0].hold(Checkpoint);
        helper.ask(&json!({ "id": 1, "op": "hibernate", "pids": pids(&engines), "wait_max_ms": 60000 }));
        engines[0].await_held(Checkpoint);
        if is_signal {
            terminate(helper.child.id());
        } else {
            drop(helper.stdin.take());
        }
        engines[0].release(Checkpoint);
        let last = helper.rest();
        assert!(matches!(&last[..], [answer] if answer["id"] == 1 && answer["ok"].is_object()), "{last:?}");
        assert_eq!(states(&engines), [Checkpointed; 2]);
        place.on(&["--resume"], &pids(&engines)).succeeded();
    }
}

#[test]
fn the_next_helper_recovers_what_a_killed_one_has_left() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = place.engines();
    let mut helper = place.helper();
    helper.ready();
    engines[0].hold(Lock);
    helper.ask(&json!({ "id": 1, "op": "hibernate", "pids": pids(&engines), "wait_max_ms": 60000 }));
    engines[0].await_held(Lock);
    poorwill_testkit::watchdog::eventually("the other is locked", || {
        engines[1].state() == ProcessState::Locked
    });
    helper.child.end();
    engines[0].release(Lock);
    let mut next = place.helper();
    next.ready();
    // It waits for the recovery. Either line may come first.
    next.ask(&json!({ "id": 0, "op": "state", "pids": [engines[1].pid()] }));
    let mut lines = [next.answer(), next.answer()];
    lines.sort_by_key(|line| line["recovered"].is_null());
    let [ready, standings] = lines;
    let found = ready["recovered"].as_array().unwrap();
    assert_eq!(standings["ok"]["processes"][0]["state"], "running", "{standings}");
    assert!(
        found.iter().any(|found| found["pid"] == engines[1].pid() && found["state"] == "running"),
        "{ready}"
    );
    assert!(found[0]["what"].as_str().unwrap().contains("runs again"), "{ready}");
    poorwill_testkit::watchdog::eventually("both run", || states(&engines) == [Running; 2]);
    next.ask(&json!({ "id": 1, "op": "hibernate", "pids": pids(&engines) }));
    assert!(next.answer()["ok"].is_object());
    next.ask(&json!({ "id": 2, "op": "recover" }));
    let recovered = next.answer();
    assert_eq!(recovered["ok"]["recovered"][1]["what"], "hibernating", "{recovered}");
    assert_eq!(next.end(), Vec::<Value>::new());
}

#[test]
fn a_helper_that_cannot_work_says_so_and_ends() {
    let folder = Folder::new();
    let args = ["hibernate", "--serve", "--processes", "engines", "--journal", "/proc/poorwill"];
    let ran = Ran::from(command(folder.path(), args).output().unwrap());
    assert_eq!((ran.code, ran.stderr.as_str()), (1, ""));
    let reason = ran.json();
    assert!(reason["unusable"].as_str().unwrap().contains("/proc/poorwill"), "{reason}");
    assert_eq!(reason["kind"], "journal");
}
