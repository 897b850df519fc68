//! Tests that need the fake libcuda to fail from the beginning: each runs once more, in a process of its own.

use std::process::Command;

/// Whether the caller is the child in which these calls fail; otherwise one has run, and done well.
pub(crate) fn in_a_child(test: &str, fail: &str) -> bool {
    if std::env::var_os("CHILD").is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command.env("CHILD", test).env("POORWILL_FAKE_CUDA_FAIL", fail);
    let output = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{fail}: {out}\n{err}");
    false
}
