//! Free memory of GPUs, real and simulated.
#![cfg(target_os = "linux")]

use std::os::unix::fs::symlink;
use std::process::{Child, Command};
use std::sync::Arc;

use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, WakeRequest};
use poorwill_rotate::measure::{Devices, GpuMemory, Meter, MeterError, Processes};
use poorwill_rotation_policy::Gpu;
use poorwill_testkit::watchdog::{eventually, watched};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Environment variable of a process that runs one test.
const ROLE: &str = "POORWILL_TEST_METER";

pub(super) fn measured(meter: &dyn Meter, gpus: &[usize]) -> Result<Vec<GpuMemory>, MeterError> {
    let gpus: Vec<Gpu> = gpus.iter().copied().map(Gpu).collect();
    tokio::runtime::Runtime::new().unwrap().block_on(meter.measure(&gpus))
}

fn free(meter: &dyn Meter) -> u64 {
    measured(meter, &[0]).unwrap()[0].free_bytes
}

/// A meter with these processes on its first GPU, and none on its second.
fn with(gpu_bytes: u64, pids: Vec<u32>) -> Processes {
    Processes::new(gpu_bytes, Arc::new(move |gpu| if gpu == Gpu(0) { pids.clone() } else { Vec::new() }))
}

fn sleeper() -> Child {
    Command::new("sleep").arg("300").spawn().unwrap()
}

#[test]
fn memory_of_the_host_device_counts() {
    watched(|| {
        let meter = with(64 * GIB, vec![std::process::id()]);
        let before = free(&meter);
        let arena = Arena::open(Config::on("host:256MiB".parse().unwrap())).unwrap();
        let block = arena.alloc(&AllocRequest::new(128 * MIB, Tag::weights())).unwrap();
        let piece = vec![7; 1 << 20];
        let fill = || (0..128).for_each(|nth| arena.write_all(block.id, nth * MIB, &piece).unwrap());
        fill();
        // Other tests in this process hold some, too.
        let awake = free(&meter);
        assert!(before - awake > 100 * MIB, "{before} {awake}");
        arena.sleep(&SleepRequest::all(Level::Two)).unwrap();
        let asleep = free(&meter);
        assert!(asleep - awake > 100 * MIB, "{awake} {asleep}");
        arena.wake(&WakeRequest::all()).unwrap();
        fill();
        let again = free(&meter);
        assert!(asleep - again > 100 * MIB, "{asleep} {again}");
    });
}

#[test]
fn a_simulated_gpu_has_all_of_an_engines_processes() {
    watched(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let meter = with(GIB, Vec::new());
        let held = |pids: Vec<u32>| runtime.block_on(meter.held(&[Gpu(0), Gpu(1)], pids));
        let [mut one, mut two] = [sleeper(), sleeper()];
        // Without processes nothing is known, and a process that has ended holds nothing.
        assert_eq!(held(Vec::new()), None);
        eventually("both count", || {
            let (both, single) = (held(vec![one.id(), two.id()]), held(vec![one.id(); 2]));
            both.zip(single).is_some_and(|(both, single)| both[0] > single[0] && both[0] == both[1])
        });
        for one in [&mut one, &mut two] {
            one.kill().unwrap();
            one.wait().unwrap();
        }
        assert_eq!(held(vec![one.id(), two.id()]), None);
    });
}

#[test]
fn each_gpu_has_its_own() {
    watched(|| {
        let mut one = sleeper();
        let meter = with(GIB, vec![one.id()]);
        let gpus = measured(&meter, &[1, 0, 1]).unwrap();
        assert_eq!(gpus.iter().map(|gpu| gpu.total_bytes).collect::<Vec<_>>(), [GIB; 3]);
        assert_eq!((gpus[0].free_bytes, gpus[2].free_bytes), (GIB, GIB));
        assert!(gpus[1].free_bytes < GIB);
        // A repeated process counts once, and free memory is never negative.
        let used = |pids: Vec<u32>| GIB - free(&with(GIB, pids));
        // Its share still changes as other processes map the same library.
        eventually("it counts once", || {
            let (once, twice) = (used(vec![one.id()]), used(vec![one.id(); 2]));
            once > 0 && twice < once * 3 / 2
        });
        assert_eq!(free(&with(1, vec![one.id()])), 0);
        assert_eq!(measured(&meter, &[]), Ok(Vec::new()));
        one.kill().unwrap();
        one.wait().unwrap();
    });
}

#[test]
fn an_ended_process_holds_nothing() {
    watched(|| {
        let mut one = sleeper();
        let meter = with(GIB, vec![one.id()]);
        assert!(free(&meter) < GIB);
        one.kill().unwrap();
        // Reaped or not.
        eventually("it ends", || free(&meter) == GIB);
        one.wait().unwrap();
        assert_eq!(free(&meter), GIB);
    });
}

/// Runs a test again with the fake NVML and these devices, or without NVML.
pub(super) fn played(test: &str, devices: Option<&str>) {
    let libraries = tempfile::tempdir().unwrap();
    for name in ["libnvidia-ml.so.1", "libnvidia-ml.so"] {
        let path = libraries.path().join(name);
        match devices {
            Some(_) => symlink(poorwill_fake_nvml::path(), path).unwrap(),
            None => std::fs::write(path, "no library").unwrap(),
        }
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("LD_LIBRARY_PATH", libraries.path()).env(ROLE, "1");
    command.env("POORWILL_FAKE_NVML_DEVICES", devices.unwrap_or_default());
    let output = command.output().unwrap();
    let output_text = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output_text.contains("1 passed"), "{output_text}\n{error}");
}

pub(super) fn is_played() -> bool {
    std::env::var_os(ROLE).is_some()
}

#[test]
fn devices_are_those_at_the_positions_of_nvml() {
    let uuid = |nth: u32| format!("GPU-00000000-0000-0000-0000-00000000000{nth}");
    if !is_played() {
        let devices = [
            format!("{}:total=80GiB:used=30GiB", uuid(1)),
            format!("{}:total=24GiB:used=4GiB", uuid(2)),
            format!("{}:total=80GiB:mig_mode=1", uuid(3)),
            format!("{}:total=8GiB:free=9GiB", uuid(4)),
            format!("{}:total=8GiB:memory_error=4", uuid(5)),
        ];
        return played("measure::devices_are_those_at_the_positions_of_nvml", Some(&devices.join(",")));
    }
    let meter = Devices::default();
    let memory = |free: u64, total: u64| GpuMemory::new(free * GIB, total * GIB);
    assert_eq!(measured(&meter, &[1, 0]), Ok(vec![memory(20, 24), memory(50, 80)]));
    assert_eq!(measured(&meter, &[0]), Ok(vec![memory(50, 80)]));
    assert_eq!(tokio::runtime::Runtime::new().unwrap().block_on(meter.remark(Gpu(0))), None);
    for (gpu, words) in [
        (2, "MIG"),
        (3, "9 GiB of 8 GiB"),
        (4, "does not report"),
        (5, "shows 5 GPUs"),
        (usize::MAX, "none at"),
    ] {
        let error = measured(&meter, &[0, gpu]).unwrap_err();
        assert_eq!(error.gpu, Gpu(gpu));
        assert!(error.to_string().contains(words), "{error}");
    }
    // A failure does not spoil later measurements.
    assert_eq!(measured(&meter, &[1]), Ok(vec![memory(20, 24)]));
}

#[test]
fn nvml_counts_what_each_process_holds() {
    if !is_played() {
        let uuid = |nth: u32| format!("GPU-00000000-0000-0000-0000-00000000000{nth}");
        let devices = [
            format!("{}:total=80GiB:process=4711/3GiB:process=4712/1GiB:process=1/9GiB", uuid(1)),
            format!("{}:total=24GiB:process=4711/2GiB", uuid(2)),
        ];
        return played("measure::nvml_counts_what_each_process_holds", Some(&devices.join(",")));
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let meter = Devices::default();
    let held = |gpus: &[usize], pids: &[u32]| {
        let gpus: Vec<Gpu> = gpus.iter().copied().map(Gpu).collect();
        runtime.block_on(meter.held(&gpus, pids.to_vec()))
    };
    assert_eq!(held(&[0, 1], &[4711, 4712, 4711]), Some(vec![4 * GIB, 2 * GIB]));
    // Not there is not zero: a container may have other numbers.
    assert_eq!(held(&[0], &[5]), None);
    assert_eq!(held(&[0, 1], &[4712]), None);
    assert_eq!(held(&[0, 7], &[4711]), None);
    assert_eq!(held(&[1], &[4711]), Some(vec![2 * GIB]));
    assert_eq!(measured(&meter, &[0]).unwrap()[0].total_bytes, 80 * GIB);
}

#[test]
fn without_nvml_the_error_says_what_helps() {
    if !is_played() {
        return played("measure::without_nvml_the_error_says_what_helps", None);
    }
    // Without cards of other makers.
    let root = tempfile::tempdir().unwrap();
    let meter = Devices::default().below(root.path());
    for _ in 0..2 {
        let output_text = measured(&meter, &[3]).unwrap_err().to_string();
        for words in [
            "cannot measure GPU 3",
            "libnvidia-ml.so.1",
            "install NVIDIA's driver",
            "measure = \"processes\"",
        ] {
            assert!(output_text.contains(words), "{output_text}");
        }
    }
}
