//! The library in real processes: a C program over a CUDA runtime of its own and the simulated driver, and programs that
//! know nothing of GPUs.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use poorwill::broker::{Broker, BrokerOptions, BrokerStop};
use poorwill_fake_libcuda as fake;
use poorwill_testkit::effort::Effort;
use tempfile::TempDir;

const IN_REGION: [(&str, &str); 2] = [("TMS_INIT_ENABLE", "1"), ("TMS_INIT_ENABLE_CPU_BACKUP", "yes")];

/// As tools that repair wheels name a runtime.
const HASHED_RUNTIME: &str = "libcudart-d0da41ae.so.11.0";
const OTHER_RUNTIME: &str = "libcudart-7ffa1b3c.so.12.4.127";

/// The compiled programs, with their libraries beside them.
struct Place(TempDir);

impl Place {
    fn shared() -> &'static Self {
        static PLACE: OnceLock<Place> = OnceLock::new();
        PLACE.get_or_init(|| {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let place = Self(folder);
            let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
            symlink(fake::path(), place.path("libcuda.so.1")).unwrap();
            let source = |name: &str| sources.join(name);
            let shared = ["-shared", "-fPIC"];
            for runtime in ["libcudart.so", HASHED_RUNTIME, OTHER_RUNTIME] {
                let soname = format!("-Wl,-soname,{runtime}");
                compile(&shared, &[source("cudart.c")], &place.path(runtime), &[&soname, "-ldl"]);
            }
            let folder = format!("-L{}", place.0.path().display());
            let plugin = [source("plugin.c")];
            for (name, runtime) in [("plugin.so", HASHED_RUNTIME), ("other.so", OTHER_RUNTIME)] {
                compile(&shared, &plugin, &place.path(name), &[&folder, &format!("-l:{runtime}")]);
            }
            let whole = [source("plugin.c"), source("cudart.c")];
            compile(&shared, &whole, &place.path("whole.so"), &["-ldl"]);
            compile(&shared, &[source("hook.c")], &place.path("hook.so"), &["-ldl"]);
            let link = [&folder, "-lcudart", "-ldl", "-lpthread"];
            compile(&["-rdynamic"], &[source("program.c")], &place.path("program"), &link);
            compile(&["-rdynamic"], &[source("host.c")], &place.path("host"), &["-ldl"]);
            let with_runtime = ["-rdynamic", "-DWITH_RUNTIME"];
            compile(&with_runtime, &[source("host.c")], &place.path("host_with_runtime"), &link);
            place
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program with the library preloaded.
    fn preloaded(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("TMS_") {
                command.env_remove(variable);
            }
        }
        command
            .env_remove("POORWILL_COMPRESS")
            .env("LD_PRELOAD", library())
            .env("LD_LIBRARY_PATH", self.0.path())
            .env("POORWILL_FAKE_CUDA_DEVICES", "512MiB/2MiB,256MiB/2MiB");
        command
    }

    /// Runs a host of plugins, each with the library that has its runtime.
    fn host(&self, program: &str, plugins: &[(&str, &str)]) {
        let mut command = self.preloaded(self.path(program));
        for (plugin, runtime) in plugins {
            command.args([self.path(plugin), self.path(runtime)]);
        }
        succeeded(program, &command.output().unwrap());
    }

    fn scene(&self, name: &str, environment: &[(&str, &str)]) -> String {
        let output =
            self.preloaded(self.path("program")).arg(name).envs(environment.iter().copied()).output();
        succeeded(name, &output.unwrap())
    }
}

fn compile(before: &[&str], sources: &[PathBuf], into: &Path, after: &[&str]) {
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(before)
        .args(sources)
        .arg("-o")
        .arg(into);
    let output = cc.args(after).output().unwrap_or_else(|error| {
        panic!("cc: {error}; install a C compiler, for instance with `apt-get install gcc libc6-dev`")
    });
    succeeded("cc", &output);
}

fn succeeded(name: &str, output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {}\n{text}", output.status);
    text
}

/// What cargo built with this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folders = program.ancestors().skip(1).take(2);
    let mut found = folders.map(|folder| folder.join("libpoorwill_preload.so")).filter(|path| path.is_file());
    found.next().expect("cargo builds the library beside its tests")
}

#[test]
fn paused_memory_comes_back_with_its_bytes_at_its_addresses() {
    Place::shared().scene("cycle", &IN_REGION);
}

#[test]
fn backups_may_be_codes() {
    Place::shared().scene("cycle", &[&IN_REGION[..], &[("POORWILL_COMPRESS", "always")]].concat());
}

#[test]
fn what_is_paused_is_lent_at_a_broker_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("broker.sock");
    let shared = folder.path().join("gpus");
    std::fs::create_dir(&shared).unwrap();
    let [socket_name, shared] = [&socket, &shared].map(|path| path.to_str().unwrap());
    let settings =
        [("POORWILL_LEND", "1"), ("POORWILL_BROKER", socket_name), ("POORWILL_FAKE_CUDA_SHARED", shared)];
    let settings = [&IN_REGION[..], &settings].concat();
    let printed = Place::shared().scene("not_lending", &settings);
    assert_eq!(printed.matches("released what it was to lend").count(), 1, "{printed}");
    assert!(printed.contains(socket_name), "{printed}");
    let broker = Broker::bind(&socket, BrokerOptions::default()).unwrap();
    let stop = BrokerStop::new().unwrap();
    std::thread::scope(|scope| {
        let served = scope.spawn(|| broker.run(&stop));
        let printed = Place::shared().scene("lending", &settings);
        assert_eq!(printed, "");
        stop.stop();
        served.join().unwrap().unwrap();
    });
}

#[test]
fn each_kind_of_memory_is_kept_or_dropped_as_it_says() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Place::shared().scene("kinds", &[("TEST_FOLDER", folder.path().to_str().unwrap())]);
}

#[test]
fn tags_pause_by_themselves_and_memory_of_a_paused_tag_is_active() {
    let printed = Place::shared().scene("nested", &[]);
    assert!(printed.contains("poorwill: memory of `a` had been paused before"), "{printed}");
}

#[test]
fn a_note_is_printed_once_for_each_tag_of_the_user() {
    let printed = Place::shared().scene("notes", &[]);
    let of_a: Vec<&str> = printed.lines().filter(|line| line.contains("`a`")).collect();
    let expected = ["paused", "active"]
        .map(|state| format!("poorwill: memory of `a` had been {state} before, and stays so"));
    assert_eq!(of_a, expected);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!((lines.len(), lines.last()), (101, Some(&"poorwill: no further notes are printed")));
}

#[test]
fn pointers_to_backups_take_no_memory_for_each_call() {
    Place::shared().scene("views", &[]);
}

#[test]
fn threads_have_regions_of_their_own() {
    Place::shared().scene("threads", &[]);
}

#[test]
fn unused_memory_is_not_backed_up() {
    Place::shared().scene("unused", &[]);
}

#[test]
fn a_full_device_and_a_margin_are_out_of_memory() {
    Place::shared().scene("limits", &[]);
}

#[test]
fn a_resume_waits_for_memory_that_others_release() {
    Place::shared().scene("waits", &[("POORWILL_WAKE_TIMEOUT", "3600")]);
}

#[test]
fn a_forked_child_gets_errors() {
    Place::shared().scene("forks", &[]);
}

#[test]
fn a_child_of_the_first_allocation_gets_errors() {
    Place::shared().scene("forks_early", &[]);
}

#[test]
fn a_child_after_a_failed_first_allocation_lacks_nothing() {
    Place::shared().scene("forks_without_memory", &[("POORWILL_COMPRESS", "maybe")]);
}

#[test]
fn whichever_call_of_the_driver_fails_all_bytes_stay() {
    // The program in C reads the effort itself. Printed here, it has `--rest` run this again.
    let _ = Effort::of_this_run();
    Place::shared().scene("failures", &[("POORWILL_WAKE_TIMEOUT", "0")]);
}

#[test]
fn a_resume_that_fails_has_resumed_nothing() {
    // Where the last call of a resume is among all calls differs a little.
    let mut failures = (40..90).cycle().take(200).map(|number| format!("cuCtxGetCurrent:{number}"));
    let is_after_the_wake = failures.any(|failure| {
        let printed = Place::shared().scene("resume_fails", &[("POORWILL_FAKE_CUDA_FAIL", &failure)]);
        printed.contains("host memory of backups stays in use") && printed.contains("\nresumed\n")
    });
    assert!(is_after_the_wake);
}

#[test]
fn a_wrong_setting_is_an_error_and_printed_once() {
    let printed = Place::shared().scene("environment", &[("TMS_INIT_ENABLE", "maybe")]);
    assert_eq!(printed.matches("TMS_INIT_ENABLE is `maybe`").count(), 1, "{printed}");
}

#[test]
fn a_runtime_of_any_name_in_any_scope_is_found() {
    Place::shared().host("host", &[("plugin.so", HASHED_RUNTIME)]);
}

#[test]
fn calls_reach_the_global_runtime_or_the_callers_own() {
    let plugins = [("plugin.so", HASHED_RUNTIME), ("other.so", OTHER_RUNTIME), ("whole.so", "whole.so")];
    Place::shared().host("host", &plugins);
    Place::shared().host("host_with_runtime", &plugins);
}

#[test]
fn a_library_before_ours_gets_what_comes_behind_ours() {
    let place = Place::shared();
    let mut command = place.preloaded(place.path("host"));
    command.env("LD_PRELOAD", format!("{}:{}", place.path("hook.so").display(), library().display()));
    let output = command.args([place.path("plugin.so"), place.path(HASHED_RUNTIME)]).output();
    succeeded("host", &output.unwrap());
}

#[test]
fn programs_without_a_gpu_notice_nothing() {
    for program in [&["true"][..], &["sh", "-c", "cat /dev/null | sort"], &["env"]] {
        let mut command = Place::shared().preloaded(program[0]);
        let output = command.args(&program[1..]).envs(IN_REGION).output().unwrap();
        assert_eq!(succeeded(program[0], &output), "", "{program:?} printed something");
    }
}
