//! `poorwill hibernate` over processes that use the fake libcuda, which plays NVIDIA's driver across them.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use poorwill::{AllocRequest, Arena, Config, Tag};
use poorwill_testkit::child::{self, OwnedChild};
use poorwill_testkit::watchdog::eventually;
use serde_json::{Value, json};

use crate::support::{Folder, Ran, command};

const ROLE: &str = "engine";
const HELD_BYTES: u64 = 4 << 20;

/// Libraries, registered processes and a journal.
struct Place(Folder);

/// A process with memory on the fake GPU. It ends with its test.
struct Engine(OwnedChild);

impl Engine {
    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Place {
    fn new() -> Self {
        let folder = Folder::new();
        symlink(poorwill_fake_libcuda::path(), folder.join("libcuda.so.1")).unwrap();
        symlink(poorwill_fake_nvml::path(), folder.join("libnvidia-ml.so.1")).unwrap();
        Self(folder)
    }

    fn with_library<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        let gpus = [0, 1].map(|gpu| format!("GPU-{}:total=16GiB", poorwill_fake_libcuda::uuid_text(gpu)));
        command.env("LD_LIBRARY_PATH", self.0.path()).env("POORWILL_FAKE_NVML_DEVICES", gpus.join(","));
        command.env("POORWILL_FAKE_CUDA_PROCESSES", self.0.join("processes"))
    }

    /// Its steps fail or wait as the script says.
    fn engine(&self, script: &str) -> Engine {
        let mut command = child::command(ROLE, &[("POORWILL_FAKE_CUDA_CHECKPOINT", script)]);
        self.with_library(&mut command).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = OwnedChild::start(&mut command);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.ends_with("ready")), "an engine does not start");
        Engine(child)
    }

    fn command(&self, args: &[&str], engines: &[&Engine]) -> Command {
        let mut command = command(self.0.path(), ["hibernate", "--journal", "journal"]);
        command.args(args).args(engines.iter().map(|engine| format!("--pid={}", engine.pid())));
        self.with_library(&mut command);
        command
    }

    fn run(&self, args: &[&str], engines: &[&Engine]) -> Ran {
        Ran::from(self.command(args, engines).output().unwrap())
    }

    fn states(&self, engines: &[&Engine]) -> Vec<String> {
        let states = self.run(&["--state", "--json"], engines).json();
        let processes = states["processes"].as_array().unwrap().clone();
        processes.iter().map(|process| process["state"].as_str().unwrap().to_owned()).collect()
    }
}

/// Whether this process is an engine: then it has been one until its test ended.
fn run_as_child() -> bool {
    if child::role().as_deref() != Some(ROLE) {
        return false;
    }
    let arena = Arena::open(Config::on("cuda:1".parse().unwrap())).unwrap();
    let block = arena.alloc(&AllocRequest::new(HELD_BYTES, Tag::weights())).unwrap();
    arena.write_all(block.id, 0, b"the weights").unwrap();
    println!("ready");
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    true
}

#[test]
fn a_set_leaves_its_gpu_and_comes_back() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let [first, second] = [place.engine(""), place.engine("")];
    let set = [&first, &second];
    let report = place.run(&["--json"], &set).json();
    assert_eq!(report["processes"].as_array().unwrap().len(), 2, "{report}");
    assert_eq!(place.states(&set), ["checkpointed"; 2]);
    place.run(&[], &set).failed(&["resume it first"]);
    place.run(&["--resume"], &set[..1]).failed(&["in one call"]);
    place.run(&["--resume"], &set).succeeded();
    assert_eq!(place.states(&set), ["running"; 2]);
}

#[test]
fn what_cannot_be_checked_goes_on_only_on_request() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engine = place.engine("");
    let assert_only_on_request = |args: &[&str], kind: &str, words: &[&str], states: [&str; 2]| {
        let ran = place.run(&[args, &["--json"]].concat(), &[&engine]);
        ran.failed(&[words, &["nothing was changed", "--without-space-check"]].concat());
        assert_eq!((&ran.json()["kind"], &ran.json()["left"]), (&kind.into(), &json!([])));
        assert_eq!(place.states(&[&engine]), states[..1]);
        place.run(&[args, &["--without-space-check"]].concat(), &[&engine]).succeeded();
        assert_eq!(place.states(&[&engine]), states[1..]);
    };
    let [off, back] = [["running", "checkpointed"], ["checkpointed", "running"]];
    place.run(&[], &[&engine]).succeeded();
    // As if it had been hibernated with another journal, or by NVIDIA's tool.
    std::fs::remove_dir_all(place.0.join("journal")).unwrap();
    let words = ["nothing says what it held", "the journal with which it hibernated"];
    assert_only_on_request(&["--resume"], "unknown_space", &words, back);
    std::fs::remove_file(place.0.join("libnvidia-ml.so.1")).unwrap();
    assert_only_on_request(&[], "no_figures", &["libnvidia-ml.so.1"], off);
    assert_only_on_request(&["--resume"], "unknown_space", &[], back);
}

#[test]
fn a_helper_that_started_without_figures_finds_them_later() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let engine = place.engine("");
    let library = place.0.join("libnvidia-ml.so.1");
    std::fs::remove_file(&library).unwrap();
    let mut command = place.command(&["--serve"], &[]);
    let mut helper = OwnedChild::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut stdin = helper.stdin.take().unwrap();
    let mut lines = BufReader::new(helper.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.next().unwrap().contains("ready"));
    let mut asked = || -> Value {
        writeln!(stdin, "{}", json!({ "id": 1, "op": "hibernate", "pids": [engine.pid()] })).unwrap();
        serde_json::from_str(&lines.next().unwrap()).unwrap()
    };
    assert_eq!(asked()["error"]["kind"], "no_figures");
    symlink(poorwill_fake_nvml::path(), library).unwrap();
    let answer = asked();
    assert!(answer.get("ok").is_some(), "{answer}");
}

#[test]
fn who_resumes_while_another_does_goes_by_what_is_free_after_it() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let hold = place.0.join("hold");
    let engines = [place.engine(&format!("restore:hold:{}", hold.display())), place.engine("")];
    let inspected = place.run(&["--inspect", "--json"], &[&engines[0]]).json();
    let held = inspected["host_bytes"].as_u64().unwrap();
    for engine in &engines {
        place.run(&[], &[engine]).succeeded();
    }
    // With a margin of 64 MiB, there is space for one of them, and all but a byte of the other.
    let total = (64 << 20) + 2 * held - 1;
    let gpus = [0, 1].map(|gpu| format!("GPU-{}:total={total}", poorwill_fake_libcuda::uuid_text(gpu)));
    let resume = |engine: &Engine| {
        let mut command = place.command(&["--resume"], &[engine]);
        OwnedChild::start(
            command
                .env("POORWILL_FAKE_NVML_DEVICES", gpus.join(","))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )
    };
    let first = resume(&engines[0]);
    eventually("the first restores", || Path::new(&format!("{}.reached", hold.display())).exists());
    let second = resume(&engines[1]);
    let waits = format!(" {} ", second.id());
    let is_waiting = |locks: String| locks.lines().any(|lock| lock.contains("->") && lock.contains(&waits));
    eventually("the second waits", || is_waiting(std::fs::read_to_string("/proc/locks").unwrap()));
    place.0.write("hold", "");
    Ran::from(first.output()).succeeded();
    Ran::from(second.output()).failed(&["make room first"]);
    let [first, second] = engines;
    assert_eq!(place.states(&[&first, &second]), ["running", "checkpointed"]);
    drop(first);
    Ran::from(resume(&second).output()).succeeded();
    assert_eq!(place.states(&[&second]), ["running"]);
}

#[test]
fn one_failure_brings_both_back_and_obstacles_are_found_before() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let good = place.engine("");
    for (script, word) in [("checkpoint:999", "checkpoint of process"), ("lock:999", "lock of process")] {
        let bad = place.engine(script);
        place.run(&[], &[&good, &bad]).failed(&[word, &bad.pid().to_string()]);
        assert_eq!(place.states(&[&good, &bad]), ["running"; 2]);
    }
    let hindered = place.engine("communicator");
    let ran = place.run(&["--json"], &[&good, &hindered]);
    ran.failed(&["a communicator between ranks", "nothing was changed"]);
    assert_eq!(ran.json()["kind"], "obstacles");
    assert_eq!(place.states(&[&good, &hindered]), ["running"; 2]);
}

#[test]
fn ranks_with_suspended_communicators_leave_on_their_callers_word() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let ranks = [place.engine("suspended"), place.engine("suspended")];
    let [first, second] = ranks.each_ref();
    place.run(&[], &[first, second]).failed(&["not known to be suspended", "nothing was changed"]);
    place.run(&["--suspended-communicators", "1"], &[first, second]).succeeded();
    assert_eq!(place.states(&[first, second]), ["checkpointed"; 2]);
    place.run(&["--resume"], &[first, second]).succeeded();
    assert_eq!(place.states(&[first, second]), ["running"; 2]);
}

#[test]
fn a_restore_that_fails_loses_one_and_the_other_runs() {
    if run_as_child() {
        return;
    }
    let place = Place::new();
    let [good, bad] = [place.engine(""), place.engine("restore:2")];
    place.run(&[], &[&good, &bad]).succeeded();
    let ran = place.run(&["--resume", "--json"], &[&good, &bad]);
    ran.failed(&[&format!("restore of process {}", bad.pid()), "restart it"]);
    assert_eq!(ran.json()["left"], json!([{ "pid": bad.pid(), "state": "failed" }]));
    assert_eq!(place.states(&[&good]), ["running"]);
    assert_eq!(place.run(&["--recover"], &[]).succeeded(), "Nothing was left behind.\n");
}

#[test]
fn after_a_kill_in_each_step_the_set_is_whole() {
    if run_as_child() {
        return;
    }
    for step in ["lock", "checkpoint", "restore", "unlock"] {
        let place = Place::new();
        let hold = place.0.join("hold");
        let [good, held] = [place.engine(""), place.engine(&format!("{step}:hold:{}", hold.display()))];
        let set = [&good, &held];
        let args: &[&str] = if ["restore", "unlock"].contains(&step) {
            place.run(&[], &set).succeeded();
            &["--resume"]
        } else {
            &[]
        };
        let mut command = OwnedChild::start(&mut place.command(args, &set));
        eventually("the step has begun", || Path::new(&format!("{}.reached", hold.display())).exists());
        command.end();
        place.0.write("hold", "");
        let recovered: Value = place.run(&["--recover", "--json"], &[]).json();
        // A lock that is not awaited is undone by the process itself.
        eventually(&format!("{step}: the set is whole, {recovered}"), || {
            let states = place.states(&set);
            states == ["running"; 2] || states == ["checkpointed"; 2]
        });
        if place.states(&set) == ["checkpointed"; 2] {
            place.run(&["--resume"], &set).succeeded();
        }
        assert_eq!(place.states(&set), ["running"; 2], "{step}");
    }
}

#[test]
fn a_process_sleeps_leaves_its_gpu_and_wakes_with_the_same_bytes() {
    let place = Place::new();
    place.0.write_tensor("x.safetensors", "w", 3_000_000);
    let args = ["verify", "x.safetensors", "--hibernate", "--cycles=2", "--kv-cache=1MiB", "--json"];
    for device in ["cuda:1", "host:64MiB"] {
        let mut verify = command(place.0.path(), args);
        place.with_library(&mut verify).args(["--device", device]);
        let ran = Ran::from(verify.output().unwrap());
        let report = ran.json();
        ran.succeeded();
        let cycles = report["cycles"].as_array().unwrap();
        assert!(report["verified"] == true && cycles.len() == 2, "{report}");
        for cycle in cycles {
            let hibernation = &cycle["hibernation"];
            assert!(hibernation["hibernate_s"].as_f64() > Some(0.0), "{report}");
            assert_eq!(
                (&hibernation["left_bytes"], &cycle["asleep"]["device_bytes"]),
                (&0.into(), &0.into())
            );
        }
    }
    let mut shown = command(place.0.path(), &args[..4]);
    let shown = Ran::from(place.with_library(&mut shown).output().unwrap()).succeeded();
    assert!(shown.contains("hibernate 1") && shown.contains("the process left"), "{shown}");

    // The library without a folder refuses every process.
    let mut alone = command(place.0.path(), args);
    alone.env("LD_LIBRARY_PATH", place.0.path()).args(["--device", "cuda:1"]);
    Ran::from(alone.output().unwrap()).failed(&["inspection of process", "CUDA_ERROR_NOT_SUPPORTED"]);
}

#[test]
fn a_process_whose_helper_is_killed_gets_its_gpu_back_and_ends() {
    let place = Place::new();
    place.0.write_tensor("x.safetensors", "w", 3_000_000);
    let hold = place.0.join("hold");
    let args = ["verify", "x.safetensors", "--hibernate", "--device=cuda:1", "--json"];
    let mut verify = command(place.0.path(), args);
    verify.env("POORWILL_FAKE_CUDA_CHECKPOINT", format!("checkpoint:hold:{}", hold.display()));
    let verify = OwnedChild::start(place.with_library(&mut verify));
    eventually("the step has begun", || Path::new(&format!("{}.reached", hold.display())).exists());
    let pid = verify.id();
    let helper = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let killed = Command::new("sh").args(["-c", &format!("kill -KILL {helper}")]).status().unwrap();
    assert!(killed.success());
    place.0.write("hold", "");
    Ran::from(verify.output()).failed(&["the helper for hibernation has ended"]);
}

#[test]
fn a_driver_that_is_too_old_is_named_by_every_command() {
    let place = Place::new();
    std::fs::remove_file(place.0.join("libcuda.so.1")).unwrap();
    let old = poorwill_fake_libcuda::without_checkpoints(place.0.path()).unwrap();
    symlink(old, place.0.join("libcuda.so.1")).unwrap();
    let words = "570";
    place.run(&["--state", "--pid=1"], &[]).failed(&["cannot be taken off their GPUs", words]);
    let helper = place.run(&["--serve"], &[]);
    assert_eq!((helper.code, helper.stderr.as_str()), (1, ""));
    assert!(helper.json()["unusable"].as_str().unwrap().contains(words), "{helper:?}");
    assert_eq!(helper.json()["kind"], "unsupported");
    let mut doctor = command(place.0.path(), ["doctor", "--json"]);
    let report = Ran::from(place.with_library(&mut doctor).output().unwrap()).json();
    assert!(report["hibernation"]["reasons"][0].as_str().unwrap().contains(words), "{report}");
    place.0.write_tensor("x.safetensors", "w", 100);
    let mut verify = command(place.0.path(), ["verify", "x.safetensors", "--hibernate", "--device=cuda:1"]);
    Ran::from(place.with_library(&mut verify).output().unwrap()).failed(&[words]);
}

/// Its GPUs may come up later, unlike the calls of one that is too old.
#[test]
fn a_driver_without_gpus_is_no_driver_that_is_too_old() {
    let place = Place::new();
    let mut serve = command(place.0.path(), ["hibernate", "--serve", "--journal", "journal"]);
    serve.env("POORWILL_FAKE_CUDA_FAIL", "cuInit:1:1:100");
    let line = Ran::from(place.with_library(&mut serve).output().unwrap()).json();
    assert_eq!(line["kind"], "no_device", "{line}");
    assert!(line["unusable"].as_str().unwrap().contains("shows this process no GPU"), "{line}");
}
