//! An end to what never ends: a deadlock fails its test instead of hanging it.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Far beyond what any test takes: only what never ends reaches it.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// Runs `test` on a thread of its own, and fails when it does not come to an end.
///
/// # Panics
/// As `test` does, or when it does not end.
pub fn watched(test: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _ended = ended; // Dropped also by a panic.
        test();
    });
    let result = end.recv_timeout(PATIENCE);
    assert!(result != Err(mpsc::RecvTimeoutError::Timeout), "no end after {PATIENCE:?}: a deadlock");
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Waits until `done`, which must come true by itself.
///
/// # Panics
/// When it does not.
pub fn eventually(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "{what}: not after {:?}", started.elapsed());
        thread::sleep(Duration::from_micros(200));
    }
}
