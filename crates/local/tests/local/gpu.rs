//! The commands on GPUs: those of the fake libcuda, which the command finds in place of NVIDIA's.
//!
//! `cuda:0` has granules of 2 MiB and much room, `cuda:1` granules of a page.

use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::churn::assert_churn_report;
use crate::doctor::assert_device;
use crate::offload::assert_offload_report;
use crate::sleep::assert_bench_report;
use crate::support::{Folder, Ran, assert_clean, command, folder_with_model};

/// The fake library's setting of which calls fail.
const FAIL: &str = "POORWILL_FAKE_CUDA_FAIL";

/// Prefixes of the variables about GPUs. Those of the caller are removed.
const SETTINGS: [&str; 4] = ["CUDA_", "NVIDIA_", "POORWILL_FAKE_CUDA_", "POORWILL_FAKE_NVML_DEVICES"];

/// The GPUs that the command sees, and its environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gpus {
    variables: Vec<(&'static str, String)>,
}

impl Gpus {
    /// The same, with a variable set.
    pub(crate) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// Runs the command with the fake library under the name of NVIDIA's.
    pub(crate) fn run(&self, folder: &Folder, args: &[&str]) -> Ran {
        let libraries = Folder::new();
        symlink(poorwill_fake_libcuda::path(), libraries.join("libcuda.so.1")).unwrap();
        let mut command = command(folder.path(), args);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if SETTINGS.iter().any(|setting| text.starts_with(setting)) {
                command.env_remove(&name);
            }
        }
        command.env("LD_LIBRARY_PATH", libraries.path()).env("TMPDIR", folder.path());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        Ran::from(command.output().unwrap())
    }
}

/// Runs the command on the default GPUs, with calls of the library failing.
fn run_failing(folder: &Folder, fail: &str, args: &[&str]) -> Ran {
    Gpus::default().with(FAIL, fail).run(folder, args)
}

fn run(folder: &Folder, args: &[&str]) -> Ran {
    run_failing(folder, "", args)
}

/// What a command reports that succeeds.
fn report(folder: &Folder, args: &[&str]) -> Value {
    let ran = run(folder, &[args, &["--json"]].concat());
    let report = ran.json();
    ran.succeeded();
    report
}

/// A command that fails, as people and as programs run it. Both get the same message.
fn refused(folder: &Folder, fail: &str, args: &[&str], words: &[&str]) {
    let ran = run_failing(folder, fail, args);
    let message = ran.failed(words);
    assert_eq!(ran.stdout, "");
    let ran = run_failing(folder, fail, &[args, &["--json"]].concat());
    assert_eq!(ran.failed(words), message);
    assert_eq!(ran.json(), json!({ "error": message }));
}

fn ids(doctor: &Value) -> Vec<&str> {
    doctor["devices"].as_array().unwrap().iter().map(|device| device["id"].as_str().unwrap()).collect()
}

/// The warnings of `doctor` with `word` in them.
fn warnings<'a>(doctor: &'a Value, word: &str) -> Vec<&'a str> {
    let warnings = doctor["warnings"].as_array().unwrap().iter().map(|warning| warning.as_str().unwrap());
    warnings.filter(|warning| warning.contains(word)).collect()
}

/// On a busy machine, two GPUs may take longer than the default.
const UNHURRIED_DOCTOR: [&str; 3] = ["doctor", "--timeout", "10m"];

#[test]
fn doctor_lists_the_gpus_before_the_host_device() {
    let folder = Folder::new();
    let doctor = report(&folder, &UNHURRIED_DOCTOR);
    assert_eq!(ids(&doctor), ["cuda:0", "cuda:1", "host"]);
    let [first, second] = [0, 1].map(|nth| &doctor["devices"][nth]);
    for gpu in [first, second] {
        assert_device(gpu);
        assert_eq!((&gpu["winner"], &gpu["headroom_bytes"]), (&"cuda_total".into(), &gpu["budget_bytes"]));
        // Compute capability 8.0.
        assert_eq!(gpu["shared_memory_per_block_bytes"], 163 << 10);
        assert!(gpu["links"][0]["together_bytes_per_s"].is_f64(), "{gpu}");
        assert!(gpu["links"][0]["memory_bytes_per_s"].is_f64(), "{gpu}");
        assert!(
            gpu["link"]["to_device_bytes_per_s"].is_f64() && gpu["engine"]["gpu_memory_utilization"] == 1.0
        );
    }
    assert_eq!(
        (&first["name"], &first["budget_bytes"]),
        (&"Poorwill fake GPU 0".into(), &(256_u64 << 30).into())
    );
    assert_eq!(
        (&first["granule_bytes"], &second["budget_bytes"]),
        (&(2 << 20).into(), &(16_u64 << 30).into())
    );
    assert_eq!(warnings(&doctor, "cannot be used"), [""; 0]);
    assert_eq!(doctor["hibernation"]["reasons"], json!([]));

    let text = run(&folder, &UNHURRIED_DOCTOR).succeeded();
    assert_clean(&text);
    let line_of = |id: &str| text.lines().position(|line| line.starts_with(&format!("│ {id} ")));
    let lines = ["cuda:0", "cuda:1", "host"].map(|id| line_of(id).unwrap_or_else(|| panic!("{id}: {text}")));
    assert!(lines.is_sorted() && text.contains("Poorwill fake GPU 1"), "{text}");
}

#[test]
fn doctor_warns_of_a_gpu_that_does_not_answer() {
    let folder = Folder::new();
    let run = |args: &[&str]| run_failing(&folder, "cuDeviceGetName:1:1:999", args);
    let ran = run(&[&UNHURRIED_DOCTOR, &["--json"][..]].concat());
    let doctor = ran.json();
    ran.succeeded();
    assert_eq!(ids(&doctor), ["cuda:1", "host"]);
    let warnings = warnings(&doctor, "cuda:");
    assert!(matches!(&warnings[..], [warning] if warning.starts_with("cuda:0 ")), "{warnings:?}");
    assert!(warnings[0].contains("cannot be used") && warnings[0].contains("CUDA_ERROR_UNKNOWN"));
    assert!(run(&UNHURRIED_DOCTOR).succeeded().contains("cuda:0 cannot be used"));
}

#[test]
fn checkpoints_are_verified() {
    let folder = folder_with_model();
    for (device, level) in [("cuda:0", "1"), ("cuda:1", "1"), ("cuda:1", "2")] {
        let args =
            ["verify", "model", "--device", device, "--level", level, "--kv-cache", "3MiB", "--cycles", "2"];
        let verify = report(&folder, &args);
        assert_eq!((&verify["device"], &verify["verified"]), (&device.into(), &true.into()));
        let cycles = verify["cycles"].as_array().unwrap();
        assert_eq!(cycles.len(), 2);
        assert!(cycles.iter().all(|cycle| cycle["asleep"]["device_bytes"] == 0), "{verify}");
        // Where comparing costs as much as copying, every sleep copies.
        let again = &cycles[1]["sleep"];
        assert!(again["fast_digests"] == false || again["copied_bytes"] == 0, "{verify}");
    }
    let text = run(&folder, &["verify", "model", "--device", "cuda:1", "--cycles", "1"]).succeeded();
    assert!(text.contains("cuda:1") && text.contains("Verified after "), "{text}");
    // A granule of one page is too small for the kernel.
    assert!(text.contains("no fast digests"), "{text}");
}

#[test]
#[ignore = "long: four benchmarks over the fake CUDA library"]
fn sleeping_is_measured_and_verified() {
    for device in ["cuda:0", "cuda:1"] {
        let args = ["bench", "sleep", "--device", device, "--size", "32MiB", "--cycles", "2"];
        let bench = report(&Folder::new(), &[&args[..], &["--changed", "25%"]].concat());
        assert_eq!((&bench["device"], &bench["clean_cycles"]), (&device.into(), &2.into()));
        assert_bench_report(&bench);
        assert_eq!(bench["changed_fraction"], 0.25);
        assert_eq!(bench["limits"]["pinned"], true);
        let pageable = report(&Folder::new(), &[&args[..], &["--pageable"]].concat());
        assert_bench_report(&pageable);
        assert_eq!(pageable["limits"]["pinned"], false);
        assert_eq!(pageable["memory"]["after"]["host"]["pinned_bytes"], 0);
    }
}

#[test]
fn weights_in_host_memory_are_measured_and_verified() {
    // The first has a kernel for copies, and computes digests by one; granules of a page are too small for the latter.
    for device in ["cuda:0", "cuda:1"] {
        let args = ["bench", "offload", "--device", device, "--size", "8MiB", "--layers", "4"];
        let bench = report(&Folder::new(), &args);
        assert_offload_report(&bench);
        assert_eq!((&bench["device"], &bench["pinned"]), (&device.into(), &true.into()));
        assert!(bench["uva_how"].as_str().unwrap().contains("a kernel of the device reads"), "{bench}");
        assert!(bench["uva_s"].is_f64() && bench["uva_gib_per_s"].is_f64());
        let pageable = report(&Folder::new(), &[&args[..], &["--pageable"]].concat());
        assert_offload_report(&pageable);
        assert!(pageable["uva_s"].is_null() && pageable["uva_how"].as_str().unwrap().contains("pageable"));
    }
    refused(
        &Folder::new(),
        "",
        &["bench", "offload", "--device", "cuda:1", "--layers", "1"],
        &["24 GiB", "16 GiB"],
    );
}

#[test]
fn a_gpu_sleeps_with_24_gib_by_default() {
    // This one has 16 GiB.
    refused(&Folder::new(), "", &["bench", "sleep", "--device", "cuda:1"], &["cannot load 24 GiB", "16 GiB"]);
}

#[test]
fn large_loads_run_within_a_limit() {
    let folder = Folder::new();
    let args = ["bench", "churn", "--load", "dense", "--device", "cuda:0", "--limit", "64GiB"];
    let churn = report(&folder, &args);
    assert_churn_report(&churn);
    assert!(churn["failed"].is_null(), "{churn}");
    let low = run(&folder, &[&args[..7], &["1GiB"]].concat());
    low.failed(&["raise the limit"]);
}

#[test]
#[ignore = "long: the demo once more, over the fake CUDA library"]
fn the_demo_runs_on_a_gpu() {
    let demo = report(&Folder::new(), &["demo", "--device", "cuda:0"]);
    assert_eq!((&demo["verified"], &demo["verify"]["device"]), (&true.into(), &"cuda:0".into()));
}

#[test]
fn a_gpu_that_is_not_there_is_refused_by_name() {
    let folder = folder_with_model();
    let words = ["no GPU 99", "cuda:0 to cuda:1"];
    for args in [
        &["verify", "model", "--device", "cuda:99"][..],
        &["bench", "sleep", "--device", "cuda:99"],
        &["bench", "offload", "--device", "cuda:99"],
        &["bench", "churn", "--load", "moe", "--device", "cuda:99"],
        &["demo", "--device", "cuda:99"],
    ] {
        refused(&folder, "", args, &words);
    }
}

#[test]
fn calls_that_fail_end_a_command_with_one_sentence() {
    let folder = folder_with_model();
    for args in [
        &["verify", "model", "--device", "cuda:1"][..],
        &["bench", "sleep", "--device", "cuda:1", "--size", "32MiB"],
        &["bench", "offload", "--device", "cuda:1", "--size", "32MiB"],
    ] {
        refused(&folder, "cuMemCreate:5:1000000", args, &["CUDA_ERROR_UNKNOWN (999)", "unknown error"]);
    }
}

#[test]
fn a_gpu_that_cannot_be_had_says_what_may_help() {
    let folder = folder_with_model();
    let verify = ["verify", "model", "--device", "cuda:0"];
    for (fail, words) in [
        ("cuInit:1:1:100", &["shows this process no GPU", "CUDA_VISIBLE_DEVICES"][..]),
        ("cuInit:1:1:999", &["cuInit failed", "nvidia-modprobe -u"]),
        ("cuInit:1:1:803", &["cuInit failed", "restart the machine"]),
        ("cuInit:1:1:802", &["cuInit failed", "fabric manager"]),
        ("cuDevicePrimaryCtxRetain:1:1:2", &["cuDevicePrimaryCtxRetain failed", "some hundred MiB"]),
        ("cuDevicePrimaryCtxRetain:1:1:46", &["cuDevicePrimaryCtxRetain failed", "exclusive compute mode"]),
        ("cuDeviceTotalMem_v2:1:1:999", &["cuda:0", "CUDA_ERROR_UNKNOWN (999)"]),
    ] {
        refused(&folder, fail, &verify, words);
    }
    for (code, words) in [("100", "shows this process no GPU"), ("999", "cuInit failed")] {
        let ran = run_failing(&folder, &format!("cuInit:1:1:{code}"), &["doctor", "--json"]);
        let doctor = ran.json();
        ran.succeeded();
        assert_eq!(ids(&doctor), ["host"]);
        assert_eq!(warnings(&doctor, words).len(), 1, "{doctor}");
    }
}
