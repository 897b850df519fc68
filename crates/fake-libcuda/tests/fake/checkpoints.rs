//! Checkpoints of processes: arguments, results as on a GPU, and settings. The driver's tests have the steps.

use std::ffi::c_int;
use std::process::{Command, Stdio};
use std::ptr;

use crate::api::{Cuda, INVALID_VALUE, NOT_INITIALIZED, expect_success, in_a_child, is_child, turn};

const OPERATING_SYSTEM: c_int = 304;
const NOT_SUPPORTED: c_int = 801;

type Step = fn(&Cuda, c_int, *mut [u32; 16]) -> c_int;

const STEPS: [Step; 4] = [
    Cuda::cuCheckpointProcessLock,
    Cuda::cuCheckpointProcessCheckpoint,
    Cuda::cuCheckpointProcessRestore,
    Cuda::cuCheckpointProcessUnlock,
];

fn state(cuda: &Cuda, pid: c_int) -> c_int {
    let mut state = -1;
    let code = cuda.cuCheckpointProcessGetState(pid, &raw mut state);
    assert_eq!(code == 0, state >= 0);
    code
}

#[test]
fn without_a_folder_nothing_is_supported() {
    let cuda = turn();
    assert_eq!(state(&cuda, 1), NOT_SUPPORTED);
    for step in STEPS {
        assert_eq!(step(&cuda, 1, &mut [0; 16]), NOT_SUPPORTED);
    }
}

#[test]
fn arguments_are_checked_and_results_are_those_of_a_gpu() {
    if !is_child() {
        let name = "checkpoints::arguments_are_checked_and_results_are_those_of_a_gpu";
        let folder = concat!(env!("CARGO_TARGET_TMPDIR"), "/checkpoints");
        return expect_success(&in_a_child(name, &[("POORWILL_FAKE_CUDA_PROCESSES", folder)]));
    }
    let cuda = turn();
    let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let pid = other.id().cast_signed();
    for (pid, code) in [(pid, NOT_INITIALIZED), (0, OPERATING_SYSTEM), (-1, OPERATING_SYSTEM)] {
        assert_eq!(state(&cuda, pid), code, "{pid}");
        for step in STEPS {
            assert_eq!(step(&cuda, pid, &mut [0; 16]), code, "{pid}");
        }
    }
    assert_eq!(cuda.cuCheckpointProcessGetState(pid, ptr::null_mut()), INVALID_VALUE);
    for (nth, step) in STEPS.into_iter().enumerate() {
        assert_eq!(step(&cuda, pid, ptr::null_mut()), INVALID_VALUE);
        for field in 0..16 {
            let mut args = [0; 16];
            args[field] = 1;
            // Only a lock has a limit.
            let expected = if (nth, field) == (0, 0) { NOT_INITIALIZED } else { INVALID_VALUE };
            assert_eq!(step(&cuda, pid, &raw mut args), expected, "step {nth}, field {field}");
        }
    }
    drop(other.stdin.take());
    other.wait().unwrap();
    assert_eq!(state(&cuda, pid), OPERATING_SYSTEM);
}

#[test]
fn malformed_settings_fail_the_init() {
    if is_child() {
        assert_eq!(Cuda::loaded().cuInit(0), INVALID_VALUE);
        return;
    }
    let variables = [("POORWILL_FAKE_CUDA_CHECKPOINT", "lock:7,restore")];
    let output = in_a_child("checkpoints::malformed_settings_fail_the_init", &variables);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("POORWILL_FAKE_CUDA_CHECKPOINT: `restore`: write STEP:CODE"), "{message}");
    expect_success(&output);
}
