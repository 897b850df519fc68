//! The scripts that measure peers hold what they promise, as far as no GPU and no PyTorch are needed for it.

use std::path::Path;
use std::process::Command;

/// Runs the tests of a folder's scripts.
fn holds(tests: &str) {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let script =
        Path::new(&own).parent().expect("xtask lies in the workspace").join("bench/peers").join(tests);
    // No bytecode: a test leaves nothing in the tree.
    let Ok(output) = Command::new("python3").arg("-B").arg(script).output() else {
        eprintln!("skipped: there is no python3 here");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "long: tests of scripts that only measure peers"]
fn scripts_do_what_they_say() {
    holds("test_run.py");
}

#[test]
#[ignore = "long: tests of scripts that only measure peers"]
fn scripts_for_vllm_do_what_they_say() {
    holds("vllm/test_scripts.py");
    holds("vllm/test_table.py");
    holds("vllm/test_connectors.py");
}

#[test]
#[ignore = "long: tests of scripts that only measure peers"]
fn scripts_for_the_rotation_do_what_they_say() {
    holds("rotation/test_rotation.py");
}
