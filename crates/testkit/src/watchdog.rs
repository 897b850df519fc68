//! A time limit for tests: a deadlock fails its test instead of hanging it.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Far longer than any test takes: only a hang reaches it.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(240);

/// Runs `test` on its own thread, and fails if it does not end.
///
/// # Panics
/// As `test` does, or if it does not end.
pub fn watched(test: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _ended = ended; // Also dropped by a panic.
        test();
    });
    let result = end.recv_timeout(TEST_TIMEOUT);
    assert!(result != Err(mpsc::RecvTimeoutError::Timeout), "no end after {TEST_TIMEOUT:?}: a deadlock");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Waits until `done`, which must become true without this thread.
///
/// # Panics
/// If it does not.
pub fn eventually(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < TEST_TIMEOUT, "{what}: not after {:?}", started.elapsed());
        thread::sleep(Duration::from_micros(200));
    }
}
