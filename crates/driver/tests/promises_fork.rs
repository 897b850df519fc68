//! A process that forks while a pool prepares a sleep: the child gets errors and hangs nowhere, and the parent loses
//! nothing.
//!
//! A separate program: a forking process should have no threads of other tests.
#![allow(unsafe_code, clippy::unwrap_used)]

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use poorwill_core::{AllocRequest, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, Tag, WakeRequest};
use poorwill_testkit::device::TestDevice;
use poorwill_testkit::latch::Latch;
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::TEST_TIMEOUT;

#[test]
fn a_forked_child_does_not_wait_for_a_preparation_of_its_parent() {
    let device = TestDevice::open(16);
    let (tell, reached) = mpsc::channel();
    let (tell, latch) = (Mutex::new(tell), Arc::new(Latch::default()));
    let pass = Arc::clone(&latch);
    let driver = ScriptedDriver::new(device.driver(), move |call| {
        if call.op == Op::Save && !call.waiting {
            let _ = tell.lock().unwrap().send(());
            pass.pass();
        }
        Verdict::Pass
    });
    let driver = driver.with_info(|info| info.fast_digests = true);
    let pool = Pool::new(Arc::new(driver), PoolConfig::default()).unwrap();
    let bytes = 3 * device.info().granule_bytes;
    let len = usize::try_from(bytes).unwrap();
    let block = pool.alloc(&AllocRequest::new(bytes, Tag::weights())).unwrap();
    pattern::fill(&pool, block.id, 5, len).unwrap();
    let all = SleepRequest::all(Level::One);
    let preparation = pool.prepare_sleep(&all).unwrap();
    reached.recv().unwrap();
    // SAFETY: the only test of this program; the child asks, drops and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let wrong = |error: Option<PoolError>| matches!(error, Some(PoolError::WrongProcess(_)));
        preparation.cancel();
        let refused = !preparation.progress().is_ended
            && wrong(pool.prepare_sleep(&all).err())
            && wrong(preparation.wait().err());
        drop(pool);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if refused { 7 } else { 8 }) };
    }
    let (mut ended, mut status, started) = (0, 0, Instant::now());
    while ended == 0 && started.elapsed() < TEST_TIMEOUT {
        // SAFETY: our own child, and `status` outlives the call.
        ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        thread::sleep(Duration::from_millis(5));
    }
    if ended == 0 {
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: likewise.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    }
    latch.open();
    let report = preparation.wait().unwrap();
    assert_eq!(ended, child, "the child waits for a thread that does not exist there");
    assert_eq!(libc::WEXITSTATUS(status), 7, "the child's verdict, of status {status}");
    assert_eq!(report.copied_bytes, bytes);
    pool.sleep(&all).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    assert!(pattern::read(&pool, block.id, len).unwrap() == pattern::bytes(5, len));
}
