//! Sets of real processes on the host device.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use poorwill::hibernation::{CheckpointStep, Checkpointer};
use poorwill::hibernation::{
    HibernateError, HibernateRequest, Hibernator, HibernatorOptions, ProcessState, Processes, Recovery,
};
use poorwill::{AllocRequest, Arena, Device, PoolConfig, Tag};
use poorwill_driver::host::HostCheckpointer;
use poorwill_testkit::child::{self, OwnedChild};
use poorwill_testkit::engine::{HostEngine, run_as_child};
use poorwill_testkit::watchdog::eventually;

use ProcessState::{Checkpointed, Failed, Locked, Running};

const MIB: u64 = 1 << 20;

struct Place {
    engines: tempfile::TempDir,
    journal: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { engines: tempfile::tempdir().unwrap(), journal: tempfile::tempdir().unwrap() }
    }

    fn engine(&self) -> HostEngine {
        HostEngine::start(self.engines.path(), MIB)
    }

    fn hibernator(&self) -> Hibernator {
        let options = HibernatorOptions::of(Processes::Host(self.engines.path().into()));
        Hibernator::open(&options.remembering_in(self.journal.path())).unwrap()
    }

    /// What another program would ask with.
    fn other_caller(&self) -> HostCheckpointer {
        HostCheckpointer::open(self.engines.path())
    }

    fn assert_forgotten(&self) {
        assert_eq!(files(self.journal.path()), Vec::<String>::new());
    }
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn request() -> HibernateRequest {
    HibernateRequest::within(Duration::from_secs(60))
}

#[test]
fn a_set_hibernates_and_another_hibernator_resumes_it() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engines = [place.engine(), place.engine()];
    let pids = [engines[1].pid(), engines[0].pid()];
    let report = place.hibernator().hibernate(&pids, &request()).unwrap();
    assert_eq!(report.host_bytes, Some(2 * MIB));
    let released: Vec<_> =
        report.processes.iter().map(|process| (process.pid, process.released_bytes)).collect();
    assert_eq!(released, pids.map(|pid| (pid, Some(MIB))));
    assert!(
        report
            .processes
            .iter()
            .all(|process| process.checkpoint_ms > 0.0 && report.total_ms >= process.lock_ms)
    );
    assert_eq!(engines.each_ref().map(HostEngine::state), [Checkpointed; 2]);

    let later = place.hibernator();
    let recovered = later.recover().unwrap();
    let found: Vec<_> = recovered.iter().map(|process| (process.state, process.what)).collect();
    assert_eq!(found, [(Some(Checkpointed), Recovery::Hibernating); 2]);
    let back = later.resume(&pids).unwrap();
    assert_eq!(back.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), pids);
    assert_eq!(engines.each_ref().map(HostEngine::state), [Running; 2]);
    assert_eq!(later.inspect(pids[0]).unwrap().host_bytes(), Some(MIB));
    place.assert_forgotten();
}

#[test]
fn bad_input_is_one_sentence_and_changes_nothing() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (engine, hibernator) = (place.engine(), place.hibernator());
    let mut ended = place.engine();
    ended.kill();
    let without_device = OwnedChild::start(Command::new("sleep").arg("1000").stdin(Stdio::null()));
    let pid = engine.pid();
    for (pids, code, failed, words) in [
        (&[][..], "bad_request", None, "name one at least"),
        (&[pid, pid], "bad_request", Some(pid), "named twice"),
        (&[pid, 0], "no_such_process", Some(0), "no such process"),
        (&[pid, u32::MAX], "no_such_process", Some(u32::MAX), "no such process"),
        (&[pid, ended.pid()], "no_such_process", Some(ended.pid()), "it has ended"),
        (&[pid, std::process::id()], "own_process", Some(std::process::id()), "ask from another process"),
        (&[pid, without_device.id()], "no_device", Some(without_device.id()), "uses no device"),
    ] {
        // The first process runs, so it cannot be resumed.
        let last = if code == "bad_request" { pids } else { &pids[1..] };
        let errors =
            [hibernator.hibernate(pids, &request()).unwrap_err(), hibernator.resume(last).unwrap_err()];
        for error in &errors {
            assert_eq!((error.code(), error.pid(), error.left()), (code, failed, &[][..]), "{error}");
            assert!(error.to_string().contains(words), "{words}: {error}");
            let json = serde_json::to_value(error).unwrap();
            assert_eq!((&json["kind"], &json["pid"]), (&code.into(), &serde_json::json!(failed)));
        }
        assert_eq!(engine.state(), Running);
        place.assert_forgotten();
    }

    let error = hibernator.resume(&[pid]).unwrap_err();
    assert!(error.code() == "wrong_state" && error.to_string().contains("nothing to resume"), "{error}");
    engine.hinder("device 0 and device 1");
    let error = hibernator.hibernate(&[pid], &request()).unwrap_err();
    assert!(error.code() == "obstacles" && error.to_string().contains("device 0 and device 1"), "{error}");
    assert_eq!(engine.state(), Running);
}

#[test]
fn what_another_program_has_done_is_left_to_it() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (engine, hibernator, other) = (place.engine(), place.hibernator(), place.other_caller());
    other.lock(engine.pid(), Duration::ZERO).unwrap();
    let error = hibernator.hibernate(&[engine.pid()], &request()).unwrap_err();
    assert_eq!((error.code(), engine.state()), ("wrong_state", Locked), "{error}");
    other.checkpoint(engine.pid()).unwrap();
    let error = hibernator.hibernate(&[engine.pid()], &request()).unwrap_err();
    assert_eq!((error.code(), engine.state()), ("wrong_state", Checkpointed), "{error}");
    assert!(error.to_string().contains("resume it first"), "{error}");
    assert_eq!(hibernator.recover().unwrap(), []);
    hibernator.resume(&[engine.pid()]).unwrap();
    assert_eq!(engine.state(), Running);
}

#[test]
fn one_failure_brings_both_back() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (engines, hibernator) = ([place.engine(), place.engine()], place.hibernator());
    let pids = engines.each_ref().map(HostEngine::pid);
    for step in [CheckpointStep::Lock, CheckpointStep::Checkpoint] {
        engines[1].fail(step, false);
        let error = hibernator.hibernate(&pids, &request()).unwrap_err();
        assert_eq!((error.pid(), error.left()), (Some(pids[1]), &[][..]), "{error}");
        assert!(error.to_string().starts_with(&step.to_string()), "{error}");
        assert_eq!(engines.each_ref().map(HostEngine::state), [Running; 2]);
        place.assert_forgotten();
        engines[1].mend(step);
    }
    hibernator.hibernate(&pids, &request()).unwrap();
    engines[0].fail(CheckpointStep::Restore, false);
    let error = hibernator.resume(&pids).unwrap_err();
    assert_eq!((error.code(), error.left().len()), ("out_of_device_memory", 2), "{error}");
    assert_eq!(engines.each_ref().map(HostEngine::state), [Checkpointed; 2]);
    engines[0].mend(CheckpointStep::Restore);
    hibernator.resume(&pids).unwrap();

    engines[0].fail(CheckpointStep::Checkpoint, true);
    let error = hibernator.hibernate(&pids, &request()).unwrap_err();
    assert_eq!(
        error.left().iter().map(|left| (left.pid, left.state)).collect::<Vec<_>>(),
        [(pids[0], Some(Failed))]
    );
    assert_eq!(engines.each_ref().map(HostEngine::state), [Failed, Running]);
    assert!(error.to_string().contains("restart it"), "{error}");
    let error = hibernator.hibernate(&pids, &request()).unwrap_err();
    assert_eq!(error.code(), "failed");
    place.assert_forgotten();
}

#[test]
fn a_set_is_resumed_as_a_whole() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (mut engines, hibernator) = ([place.engine(), place.engine()], place.hibernator());
    let pids = engines.each_ref().map(HostEngine::pid);
    hibernator.hibernate(&pids, &request()).unwrap();
    let error = place.hibernator().resume(&pids[..1]).unwrap_err();
    assert!(
        matches!(&error, HibernateError::Parted { pid, missing } if *pid == pids[0] && *missing == pids[1..])
    );
    assert!(error.to_string().contains("in one call"), "{error}");
    assert_eq!(engines.each_ref().map(HostEngine::state), [Checkpointed; 2]);
    // What has ended belongs to it no more.
    engines[1].kill();
    hibernator.resume(&pids[..1]).unwrap();
    assert_eq!(engines[0].state(), Running);
    place.assert_forgotten();
}

#[test]
fn host_memory_is_compared_before_anything_is_locked() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (engine, large) = (place.engine(), HostEngine::start(place.engines.path(), 1 << 60));
    let hibernator = place.hibernator();
    let error = hibernator.hibernate(&[engine.pid()], &request().limited_to(MIB - 1)).unwrap_err();
    assert!(
        error.code() == "out_of_host_memory" && error.to_string().contains("1 MiB of host memory"),
        "{error}"
    );
    let error = hibernator.hibernate(&[large.pid()], &request()).unwrap_err();
    assert!(error.code() == "out_of_host_memory" && error.to_string().contains("has left"), "{error}");
    assert_eq!([engine.state(), large.state()], [Running; 2]);
    hibernator.hibernate(&[engine.pid()], &request().limited_to(MIB)).unwrap();
    assert_eq!(engine.state(), Checkpointed);
}

#[test]
fn calls_on_one_process_wait_for_each_other_and_others_do_not() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (engine, another) = (place.engine(), place.engine());
    let (first, second) = (place.hibernator(), place.hibernator());
    engine.hold(CheckpointStep::Checkpoint);
    thread::scope(|scope| {
        let hibernated = scope.spawn(|| first.hibernate(&[engine.pid()], &request()).unwrap());
        engine.await_held(CheckpointStep::Checkpoint);
        let (resumed, is_resumed) = mpsc::channel();
        let second = &second;
        let pid = engine.pid();
        let begins = Arc::new(Barrier::new(2));
        let begun = Arc::clone(&begins);
        scope.spawn(move || {
            begun.wait();
            resumed.send(second.resume(&[pid])).unwrap();
        });
        begins.wait();
        // Neither a recovery nor another set waits for it.
        assert_eq!(second.recover().unwrap(), []);
        second.hibernate(&[another.pid()], &request()).unwrap();
        assert!(is_resumed.try_recv().is_err(), "it waits");
        engine.release(CheckpointStep::Checkpoint);
        hibernated.join().unwrap();
        is_resumed.recv().unwrap().unwrap();
    });
    assert_eq!([engine.state(), another.state()], [Running, Checkpointed]);
}

/// Lets a held step go on, also where a test fails.
struct Released<'e>(&'e HostEngine, CheckpointStep);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

#[test]
fn a_set_that_is_slow_to_recover_keeps_no_other_waiting() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let sets = [(); 2].map(|()| [place.engine(), place.engine()]);
    let [first, second] = [place.hibernator(), place.hibernator()];
    for [slow, other] in [[0, 1], [1, 0]] {
        // Their helper was killed when it had restored the half of each.
        for set in &sets {
            first.hibernate(&set.each_ref().map(HostEngine::pid), &request()).unwrap();
            place.other_caller().restore(set[1].pid()).unwrap();
        }
        for name in files(place.journal.path()) {
            let path = place.journal.path().join(name);
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, text.replace(r#""hibernated""#, r#""resuming""#)).unwrap();
        }
        // The one step that a caller awaits for as long as it takes.
        let (slow, other) = (&sets[slow][0], &sets[other]);
        slow.hold(CheckpointStep::Restore);
        thread::scope(|scope| {
            let released = Released(slow, CheckpointStep::Restore);
            let recovered = scope.spawn(|| first.recover().unwrap());
            slow.await_held(CheckpointStep::Restore);
            let are_running = || other.iter().all(|engine| engine.state() == Running);
            eventually("the other runs", are_running);
            second.await_calls(&other.each_ref().map(HostEngine::pid)).unwrap();
            drop(released);
            assert_eq!(recovered.join().unwrap().len(), 4);
        });
        assert!(sets.iter().flatten().all(|engine| engine.state() == Running));
        place.assert_forgotten();
    }
}

#[test]
fn a_process_that_ends_meanwhile_is_an_error_and_the_rest_runs() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let (mut engine, other) = (place.engine(), place.engine());
    let (hibernator, pids) = (place.hibernator(), [engine.pid(), other.pid()]);
    engine.hold(CheckpointStep::Checkpoint);
    let error = thread::scope(|scope| {
        let hibernated = scope.spawn(|| hibernator.hibernate(&pids, &request()).unwrap_err());
        engine.await_held(CheckpointStep::Checkpoint);
        engine.kill();
        hibernated.join().unwrap()
    });
    assert_eq!((error.code(), error.pid()), ("no_such_process", Some(pids[0])), "{error}");
    eventually("the other runs", || other.state() == Running);
    place.assert_forgotten();
}

/// Registered with its host device. It reads its memory for each line that it gets.
fn run_as_reader() -> bool {
    let Ok(folder) = std::env::var("POORWILL_TEST_READER") else { return false };
    let device = Device::open(&"host:64MiB".parse().unwrap()).unwrap();
    device.register_process(Path::new(&folder)).unwrap();
    let error = device.register_process(Path::new(&folder)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let arena = Arena::open_on(&device, None, PoolConfig::default()).unwrap();
    let block = arena.alloc(&AllocRequest::new(4 * MIB, Tag::weights())).unwrap();
    arena.write_all(block.id, MIB, b"the weights").unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let read = arena.read_vec(block.id, MIB, 11).unwrap();
        println!("{} {}", line.unwrap(), String::from_utf8(read).unwrap());
    }
    true
}

#[test]
fn a_host_device_keeps_its_bytes_and_its_calls_wait() {
    if run_as_reader() {
        return;
    }
    let (place, role) = (Place::new(), "reader");
    let mut command = child::command(role, &[]);
    command.env("POORWILL_TEST_READER", place.engines.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut reader = OwnedChild::start(&mut command);
    let mut stdin = reader.stdin.take().unwrap();
    let mut lines = BufReader::new(reader.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "ready"));
    let (hibernator, pids) = (place.hibernator(), [reader.id()]);
    let report = hibernator.hibernate(&pids, &request()).unwrap();
    assert_eq!((report.host_bytes, report.processes[0].released_bytes), (Some(4 * MIB), Some(4 * MIB)));
    assert_eq!(hibernator.inspect(pids[0]).unwrap().host_bytes(), Some(0));
    writeln!(stdin, "first").unwrap();
    let (read, is_read) = mpsc::channel();
    let reading = thread::spawn(move || {
        lines.by_ref().take(2).for_each(|line| read.send(line).unwrap());
        lines.for_each(drop);
    });
    assert_eq!(hibernator.state(pids[0]).unwrap(), Checkpointed);
    assert!(is_read.try_recv().is_err(), "it waits");
    hibernator.resume(&pids).unwrap();
    writeln!(stdin, "second").unwrap();
    assert_eq!(
        [is_read.recv().unwrap(), is_read.recv().unwrap()],
        ["first the weights", "second the weights"]
    );
    drop(stdin);
    assert!(reader.wait().unwrap().success());
    reading.join().unwrap();
}

#[test]
fn without_a_driver_there_is_a_sentence() {
    let place = Place::new();
    let options = HibernatorOptions::default().remembering_in(place.journal.path());
    let error = Hibernator::open(&options.through(Some("/nowhere/libcuda.so.1".into()))).unwrap_err();
    assert!(matches!(&error, HibernateError::Unusable(_)), "{error}");
    assert_eq!((error.code(), error.pid()), ("unsupported", None));
    assert!(poorwill::chain(&error).contains("/nowhere/libcuda.so.1"), "{error:?}");
}
