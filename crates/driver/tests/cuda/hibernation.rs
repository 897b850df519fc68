//! The contract of checkpointers over the fake library, and on GPUs; then what the driver's results mean.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::{Library, Symbol};
use poorwill_core::hibernation::{CheckpointErrorKind, Checkpointer, Obstacle, ProcessState, Result};
use poorwill_driver::cuda::CudaCheckpointer;
use poorwill_driver::{CudaConfig, CudaDevice};
use poorwill_testkit::device::DeviceKind;
use poorwill_testkit::hibernation::{CudaSetup, HibernationTarget, Setup, expect_ended, targets};
use poorwill_testkit::watchdog::eventually;

poorwill_testkit::hibernation_contract!(open, targets::cuda);

const WAIT: Duration = Duration::from_secs(100);
/// Of a device whose memory two targets cannot both have.
const SMALL: &str = "16MiB/PAGE";

fn nvml() -> Option<PathBuf> {
    (!matches!(DeviceKind::of_this_run(), DeviceKind::Cuda(_))).then(poorwill_fake_nvml::path)
}

fn open() -> Option<CudaSetup> {
    let devices = [0, 1].map(|number| format!("GPU-{}:total=16GiB", uuid(number)));
    CudaSetup::open(nvml(), &[("POORWILL_FAKE_NVML_DEVICES", &devices.join(","))])
}

/// Over the fake library, with these variables besides. `None` also where the run is on a GPU.
fn open_fake(variables: &[(&str, &str)]) -> Option<CudaSetup> {
    nvml().and_then(|nvml| CudaSetup::open(Some(nvml), variables))
}

fn uuid(number: u32) -> String {
    poorwill_fake_libcuda::uuid_text(number)
}

fn start(setup: &CudaSetup, variables: &[(&str, &str)]) -> HibernationTarget {
    let mut command = setup.command(module_path!(), None);
    command.envs(variables.iter().copied());
    HibernationTarget::start(command)
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> CheckpointErrorKind {
    result.expect_err("the call must fail").kind
}

/// The n-th call of each symbol fails with the n-th of these results.
fn failing(symbols: &[&str], codes: &[i32]) -> String {
    let of_symbol = |symbol: &&str| {
        let items = (1..).zip(codes).map(|(nth, code)| format!("cuCheckpointProcess{symbol}:{nth}:1:{code}"));
        items.collect::<Vec<String>>().join(",")
    };
    symbols.iter().map(of_symbol).collect::<Vec<String>>().join(",")
}

#[test]
fn results_have_their_meaning() {
    let codes = [600, 2, 801, 3, 304, 800, 999];
    let fail = failing(&["Lock", "Checkpoint", "Unlock"], &codes);
    let Some(setup) = open_fake(&[("POORWILL_FAKE_CUDA_FAIL", &fail)]) else { return };
    let (checkpointer, mut target) = (setup.checkpointer_within(None), start(&setup, &[]));
    let pid = target.pid();
    let kinds = |step: &dyn Fn() -> Result<()>, state| {
        codes.map(|_| {
            let error = step().expect_err("the call must fail");
            assert_eq!(checkpointer.state(pid), Ok(state), "{error}");
            error.kind
        })
    };
    let refused = |kind: &CheckpointErrorKind, expected: i64| matches!(kind, CheckpointErrorKind::Refused { code, name, .. } if *code == expected && name.starts_with("CUDA_ERROR"));
    let [busy, memory, unsupported, none, system, permission, unknown] =
        kinds(&|| checkpointer.lock(pid, WAIT), ProcessState::Running);
    assert_eq!(
        (busy, memory),
        (CheckpointErrorKind::Busy { wait_max: WAIT }, CheckpointErrorKind::OutOfHostMemory)
    );
    assert!(matches!(unsupported, CheckpointErrorKind::Unsupported { .. }), "{unsupported:?}");
    assert_eq!(none, CheckpointErrorKind::NoDevice);
    for (kind, code) in [(system, 304), (permission, 800), (unknown, 999)] {
        assert!(refused(&kind, code), "{kind:?}"); // It answers, so it may be asked.
    }
    checkpointer.lock(pid, WAIT).unwrap();
    let [busy, memory, ..] = kinds(&|| checkpointer.checkpoint(pid), ProcessState::Locked);
    assert!(refused(&busy, 600), "{busy:?}");
    assert_eq!(memory, CheckpointErrorKind::OutOfHostMemory);
    checkpointer.checkpoint(pid).unwrap();
    checkpointer.restore(pid).unwrap();
    kinds(&|| checkpointer.unlock(pid), ProcessState::Locked);
    checkpointer.unlock(pid).unwrap();
    assert_eq!(target.ask("verify"), "same");
}

#[test]
fn each_call_may_fail_and_another_caller_goes_on() {
    let Some(setup) = open_fake(&[]) else { return };
    // SAFETY: a library of ours, which the checkpointer loads as well.
    let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
    // SAFETY: the type that the symbol has there.
    let arm: Symbol<extern "C" fn(u64, u64)> = unsafe { library.get(b"poorwillFakeArm") }.unwrap();
    // SAFETY: likewise.
    let disarm: Symbol<extern "C" fn() -> u64> = unsafe { library.get(b"poorwillFakeDisarm") }.unwrap();
    let mut target = start(&setup, &[]);
    let pid = target.pid();
    target.ask("fill 3");
    for nth in 0.. {
        let checkpointer = setup.checkpointer_within(None);
        arm(nth, 1);
        let round = || {
            checkpointer.inspect(pid)?;
            checkpointer.lock(pid, WAIT)?;
            checkpointer.checkpoint(pid)?;
            checkpointer.restore(pid)?;
            checkpointer.unlock(pid)
        };
        let (done, calls) = (round(), disarm());
        let another = setup.checkpointer_within(None);
        let state = another.state(pid).unwrap();
        if state == ProcessState::Checkpointed {
            another.restore(pid).unwrap();
        }
        if state != ProcessState::Running {
            another.unlock(pid).unwrap();
        }
        assert_eq!(target.ask("verify"), "same", "call {nth}");
        if done.is_ok() {
            assert_eq!((nth, calls), (5, 5), "each step is one call, and none failed unseen");
            return;
        }
    }
}

#[test]
fn a_look_at_a_stream_ends_a_checkpointed_process() {
    let Some(setup) = open() else { return };
    let (checkpointer, mut target) = (setup.checkpointer_within(None), start(&setup, &[]));
    let pid = target.pid();
    checkpointer.lock(pid, WAIT).unwrap();
    target.ask("look");
    let mut target = expect_ended(target, 1);
    checkpointer.checkpoint(pid).unwrap();
    checkpointer.restore(pid).unwrap();
    target.ask("look");
    let mut target = expect_ended(target, 2);
    checkpointer.checkpoint(pid).unwrap();
    target.say("look");
    eventually("it ends", || checkpointer.state(pid).is_err());
    assert_eq!(kind(checkpointer.restore(pid)), CheckpointErrorKind::NoSuchProcess);
}

#[test]
fn a_process_that_may_not_be_asked_is_not_permitted() {
    let fail = "cuCheckpointProcessGetState:1:100:304,cuCheckpointProcessLock:1:1:304,cuCheckpointProcessLock:2:1:800";
    let Some(setup) = open_fake(&[("POORWILL_FAKE_CUDA_FAIL", fail)]) else { return };
    let (checkpointer, target) = (setup.checkpointer_within(None), start(&setup, &[]));
    let lock = || checkpointer.lock(target.pid(), WAIT);
    for kind in [kind(checkpointer.state(target.pid())), kind(lock()), kind(lock())] {
        let CheckpointErrorKind::NotPermitted { reason } = kind else { panic!("{kind:?}") };
        assert!(reason.contains("CAP_SYS_PTRACE") && reason.contains("ptrace_scope"), "{reason}");
    }
}

#[test]
fn figures_are_missing_without_nvml() {
    let Some(setup) = open_fake(&[]) else { return };
    let library = poorwill_fake_libcuda::path();
    let checkpointer = CudaCheckpointer::open(Some(&library)).unwrap().reading(None);
    let target = start(&setup, &[]);
    let inspection = checkpointer.inspect(target.pid()).unwrap();
    assert_eq!((inspection.held, checkpointer.free_bytes(&uuid(0))), (vec![], None), "without NVML");
}

#[test]
fn a_restore_on_a_full_device_is_final() {
    let devices = format!("GPU-{}:total=16MiB", uuid(0));
    let variables = [("POORWILL_FAKE_NVML_DEVICES", &*devices), ("POORWILL_FAKE_CUDA_DEVICES", SMALL)];
    let Some(setup) = open_fake(&variables) else { return };
    let checkpointer = setup.checkpointer_within(None);
    let (mut away, mut other) = (start(&setup, &[]), start(&setup, &[]));
    let (pid, granules) = (away.pid(), (9 << 20) / rustix::param::page_size());
    away.ask(&format!("fill {granules}"));
    let held = checkpointer.inspect(pid).unwrap().host_bytes().unwrap();
    checkpointer.lock(pid, WAIT).unwrap();
    checkpointer.checkpoint(pid).unwrap();
    assert_eq!(checkpointer.free_bytes(&uuid(0)), Some(16 << 20));
    assert_eq!(checkpointer.used_bytes(&uuid(0)), Some(0));
    other.ask(&format!("fill {granules}"));
    assert!(checkpointer.free_bytes(&uuid(0)).unwrap() < held, "who looks knows before");
    assert_eq!(kind(checkpointer.restore(pid)), CheckpointErrorKind::OutOfDeviceMemory);
    assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Failed);
    other.kill();
    let later: Arc<dyn Checkpointer> = setup.checkpointer_within(None);
    assert_eq!(later.state(pid).unwrap(), ProcessState::Checkpointed, "as the driver says");
    let expected = CheckpointErrorKind::wrong_state(ProcessState::Failed, ProcessState::Checkpointed);
    assert_eq!(kind(later.restore(pid)), expected);
    assert_eq!(later.state(pid).unwrap(), ProcessState::Failed);
    away.kill();
    assert_eq!(kind(later.state(pid)), CheckpointErrorKind::NoSuchProcess);
}

#[test]
fn what_a_restore_fails_on_is_seen_before() {
    let Some(setup) = open_fake(&[]) else { return };
    let checkpointer = setup.checkpointer_within(None);
    std::fs::write(setup.folder().join("control"), "").unwrap();
    let folder = setup.folder().to_str().unwrap();
    let obstacle = |name, value| {
        let target = start(&setup, &[(name, value)]);
        checkpointer.inspect(target.pid()).unwrap().obstacles
    };
    assert!(matches!(obstacle("CUDA_MPS_PIPE_DIRECTORY", folder)[..], [Obstacle::Service(_)]));
    for (value, code) in [("communicator", 801), ("ipc", 1)] {
        let target = start(&setup, &[("POORWILL_FAKE_CUDA_CHECKPOINT", value)]);
        let pid = target.pid();
        let found = checkpointer.inspect(pid).unwrap().obstacles;
        match (code, &found[..]) {
            (801, [Obstacle::Communicator(what)]) => assert!(what.contains("@tmp/nccl-socket-1-"), "{what}"),
            (1, [Obstacle::SharedMemory(what)]) => assert!(what.contains("/dev/shm/cuda.shm."), "{what}"),
            _ => panic!("{found:?}"),
        }
        checkpointer.lock(pid, WAIT).unwrap();
        checkpointer.checkpoint(pid).unwrap();
        match kind(checkpointer.restore(pid)) {
            CheckpointErrorKind::Unsupported { reason } => assert_eq!(code, 801, "{reason}"),
            CheckpointErrorKind::Refused { code: refused, .. } => assert_eq!(refused, i64::from(code)),
            other => panic!("{other:?}"),
        }
        assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Failed);
    }
}

#[test]
fn an_old_driver_is_named_and_does_all_else() {
    let folder = tempfile::TempDir::new().unwrap();
    let library = poorwill_fake_libcuda::without_checkpoints(folder.path()).unwrap();
    let error = CudaCheckpointer::open(Some(&library)).unwrap_err().to_string();
    for part in ["CUDA 13.0", "has no cuCheckpointProcess", "use driver 570 (CUDA 12.8) or later"] {
        assert!(error.contains(part), "{error}");
    }
    CudaDevice::open(&CudaConfig::default().through(Some(library))).unwrap();
    let error = CudaCheckpointer::open(Some("/nonexistent/libcuda.so.1".as_ref())).unwrap_err().to_string();
    assert!(error.contains("NVIDIA's driver"), "{error}");
}
