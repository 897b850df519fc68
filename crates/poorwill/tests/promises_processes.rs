//! Two processes on one device. Whatever happens to one, the other keeps its bytes and can wake. The memory
//! of a process that ended is free again.
//!
//! On a GPU the processes really share the device. A host device and the fake libcuda belong to one process
//! each. There, tests that share memory use a second pool of the same process.
//!
//! A program of its own: it compares figures of the whole device.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use poorwill::{
    AllocRequest, Block, Driver, Level, Op, Pool, PoolConfig, PoolError, SleepRequest, Tag, TagState, Verify,
    WakeRequest,
};
use poorwill_testkit::child;
use poorwill_testkit::device::{DeviceKind, TestDevice};
use poorwill_testkit::pattern;
use poorwill_testkit::scripted::{ScriptedDriver, Verdict};
use poorwill_testkit::watchdog::eventually;

const MIB: u64 = 1 << 20;

/// Size in MiB where the processes share a device; less where each has its own, and only the calls matter.
fn size(mib: u64) -> u64 {
    mib * MIB / if matches!(DeviceKind::of_this_run(), DeviceKind::Cuda(_)) { 1 } else { 16 }
}

/// A pool with known bytes.
struct Resident {
    pool: Pool,
    blocks: Vec<Block>,
    seed: u64,
}

impl Resident {
    fn new(driver: Arc<dyn Driver>, seed: u64, sizes: &[u64]) -> Self {
        let pool = Pool::new(driver, PoolConfig::default()).unwrap();
        let blocks: Vec<Block> = sizes
            .iter()
            .map(|bytes| pool.alloc(&AllocRequest::new(*bytes, Tag::weights())).unwrap())
            .collect();
        let resident = Self { pool, blocks, seed };
        for (nth, block) in (0..).zip(&resident.blocks) {
            pattern::fill(&resident.pool, block.id, seed + nth, len(block)).unwrap();
        }
        resident
    }

    fn sleep(&self) {
        self.pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    }

    fn wake(&self) {
        self.pool.wake(&WakeRequest::all()).unwrap();
    }

    fn verify(&self) {
        for (nth, block) in (0..).zip(&self.blocks) {
            let read = pattern::read(&self.pool, block.id, len(block)).unwrap();
            assert!(read == pattern::bytes(self.seed + nth, len(block)), "block {nth}");
            assert_eq!(self.pool.block(block.id).unwrap().range, block.range, "block {nth} has moved");
        }
    }
}

fn len(block: &Block) -> usize {
    usize::try_from(block.requested_bytes).unwrap()
}

/// This test file again, in a process of its own, as `role`.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str) -> Self {
        let mut child = child::command_for("the_other_process", role, &[])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Waits for this output.
    fn hear(&mut self, word: &str) {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                self.output.read_line(&mut line).unwrap(),
                0,
                "the other process ended before `{word}`"
            );
            if line.trim_end().ends_with(word) {
                return;
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn say(word: &str) {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{word}").unwrap();
    stdout.flush().unwrap();
}

/// What the other process does. As a test of its own it does nothing.
#[test]
fn the_other_process() {
    let Some(role) = child::role() else { return };
    let device = TestDevice::with_capacity(256 * MIB).machine();
    match role.as_str() {
        "leaver" => {
            let resident = Resident::new(device, 77, &[size(40), size(3)]);
            std::mem::forget(resident); // Ends without giving anything back.
            say("done");
        }
        "hog" => {
            let free_bytes = device.memory_info().unwrap().free_bytes;
            let pool = Pool::new(device, PoolConfig::default()).unwrap();
            pool.alloc(&AllocRequest::new(free_bytes - 64 * MIB, Tag::weights())).unwrap();
            say("ready");
            std::io::stdin().read_line(&mut String::new()).unwrap();
            pool.close().unwrap();
        }
        "newcomer" => {
            let resident = Resident::new(device, 33, &[size(20), size(7), 600]);
            let all = SleepRequest::all(Level::One);
            for round in 0..2 {
                resident.pool.prepare_sleep(&all).unwrap().wait().unwrap();
                resident.sleep();
                resident.pool.wake(&WakeRequest::all().verifying(Verify::All)).unwrap();
                resident.verify();
                assert_eq!(resident.pool.stats().unwrap().deferred_release_bytes, 0, "round {round}");
            }
            resident.pool.close().unwrap();
            say("clean");
        }
        moment if moment.starts_with(STOPS) => stop_at(device, moment),
        napper => {
            let resident = Resident::new(device, 55, &[size(120), size(50), MIB / 3]);
            say("ready");
            if napper == "crasher" {
                thread::spawn(|| {
                    thread::sleep(Duration::from_millis(40));
                    use rustix::process::{Signal, getpid, kill_process};
                    kill_process(getpid(), Signal::ABORT).unwrap(); // As a bug of the engine's would end it.
                });
            }
            loop {
                say("sleeping");
                resident.sleep();
                resident.wake();
                // So that the next sleep copies again.
                pattern::fill(&resident.pool, resident.blocks[0].id, 55, len(&resident.blocks[0])).unwrap();
            }
        }
    }
}

/// Begins the role of a process that stops in the middle.
const STOPS: &str = "stops-";
/// The point at which it stops.
const MOMENTS: [&str; 6] = ["preparing", "saving", "unmapping", "releasing", "mapping", "filling"];

/// Sleeps and wakes, but stops at a point, with all that it holds there.
fn stop_at(device: Arc<dyn Driver>, role: &str) {
    let moment = role.strip_prefix(STOPS).unwrap().to_owned();
    let op = match moment.as_str() {
        "preparing" => Op::Save,
        "saving" => Op::CopyToHost,
        "unmapping" => Op::Unmap,
        "releasing" => Op::Release,
        "mapping" => Op::Map,
        _ => Op::CopyToDevice,
    };
    let (armed, seen) = (Arc::new(AtomicBool::new(false)), AtomicU64::new(0));
    let is_armed = Arc::clone(&armed);
    let driver = ScriptedDriver::new(device, move |call| {
        // The second call: something was done, and something is not.
        let counts = is_armed.load(Ordering::Relaxed) && call.op == op && !call.waiting;
        if counts && seen.fetch_add(1, Ordering::Relaxed) == 1 {
            say("stopped");
            loop {
                thread::park();
            }
        }
        Verdict::Pass
    });
    let driver = driver.with_info(|info| info.fast_digests = true);
    let resident = Resident::new(Arc::new(driver), 11, &[33 * MIB, 3 * MIB, 600]);
    armed.store(true, Ordering::Relaxed);
    if moment == "preparing" {
        let preparation = resident.pool.prepare_sleep(&SleepRequest::all(Level::One)).unwrap();
        preparation.wait().unwrap();
    }
    resident.sleep();
    resident.wake();
    say("went on");
}

/// The machine's figures are compared here: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn another_process_may_end_in_any_way() {
    let _turn = alone();
    let device = TestDevice::with_capacity(256 * MIB).machine();
    let mine = Resident::new(Arc::clone(&device), 1, &[size(60), size(9), 700, size(2)]);
    mine.sleep();
    let before_bytes = device.memory_info().unwrap().free_bytes;
    for attempt in 0..6u64 {
        let mut other = Other::start("napper");
        other.hear("ready");
        for _ in 0..=attempt % 3 {
            other.hear("sleeping");
        }
        thread::sleep(Duration::from_millis(attempt * 7));
        mine.wake();
        mine.verify();
        other.kill();
        mine.verify();
        mine.sleep();
        given_back(&*device, before_bytes);
    }
    for role in ["crasher", "leaver"] {
        let mut other = Other::start(role);
        other.hear(if role == "leaver" { "done" } else { "ready" });
        mine.wake();
        let status = other.child.wait().unwrap();
        assert_eq!(status.success(), role == "leaver", "{role}");
        mine.verify();
        mine.sleep();
        given_back(&*device, before_bytes);
    }
    mine.wake();
    mine.verify();
}

#[test]
fn a_kill_in_the_middle_leaves_a_device_on_which_others_start_clean() {
    let _turn = alone();
    let device = TestDevice::with_capacity(256 * MIB).machine();
    let before_bytes = device.memory_info().unwrap().free_bytes;
    for moment in MOMENTS {
        let mut other = Other::start(&format!("{STOPS}{moment}"));
        other.hear("stopped");
        other.kill();
        given_back(&*device, before_bytes);
        let mut newcomer = Other::start("newcomer");
        newcomer.hear("clean");
        assert!(newcomer.child.wait().unwrap().success(), "after a kill while {moment}");
        given_back(&*device, before_bytes);
    }
}

/// Waits until the device has as much free as before the other process came.
fn given_back(device: &dyn Driver, before_bytes: u64) {
    let is_back = || device.memory_info().unwrap().free_bytes >= before_bytes;
    eventually("the memory of the other process is the device's again", is_back);
}

/// A process with almost all of the device.
enum Hog {
    Process(Other),
    Pool(Pool),
}

impl Hog {
    fn new(device: &TestDevice) -> Self {
        if device.is_shared_between_processes() {
            let mut other = Other::start("hog");
            other.hear("ready");
            return Self::Process(other);
        }
        let driver = device.machine();
        let free_bytes = driver.memory_info().unwrap().free_bytes;
        let pool = Pool::new(driver, PoolConfig::default()).unwrap();
        pool.alloc(&AllocRequest::new(free_bytes - 64 * MIB, Tag::weights())).unwrap();
        Self::Pool(pool)
    }

    fn leave(self) {
        match self {
            Self::Process(mut other) => {
                drop(other.input.take());
                assert!(other.child.wait().unwrap().success());
            }
            Self::Pool(pool) => pool.close().unwrap(),
        }
    }
}

#[test]
fn a_wake_that_finds_its_memory_taken_says_so_and_works_later() {
    let _turn = alone();
    let device = TestDevice::with_capacity(256 * MIB);
    let mine = Resident::new(device.machine(), 9, &[100 * MIB, 5 * MIB]);
    mine.sleep();
    let hog = Hog::new(&device);
    for _ in 0..3 {
        let refused = mine.pool.wake(&WakeRequest::all()).unwrap_err();
        let PoolError::DeviceFull { shortage, .. } = &refused else { panic!("{refused}") };
        assert!(shortage.needed_bytes >= 105 * MIB && shortage.free_bytes < 100 * MIB, "{refused}");
        assert!(refused.to_string().contains("weights"), "{refused}");
        assert_eq!(mine.pool.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
        assert_eq!(mine.pool.stats().unwrap().mapped_bytes, 0, "nothing stays half awake");
    }
    hog.leave();
    eventually("its memory is there again", || mine.pool.wake(&WakeRequest::all()).is_ok());
    mine.verify();
}
