//! Arenas lend through a broker that is there, started by one of them, lost or mute, and bytes are right in each case.

use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use poorwill::broker::{Broker, BrokerEnd, BrokerOptions, BrokerStop};
use poorwill::doctor::{Plan, examine};
use poorwill::lend::{Lending, PeerCopies};
use poorwill::{
    AllocRequest, Arena, Block, Changes, Config, Device, DeviceSpec, Level, PoolConfig, PoolError,
    SleepReport, SleepRequest, Tag, WakeReport, WakeRequest,
};
use poorwill_testkit::device::{DeviceKind, TestDevice, skipped_unless};
use poorwill_testkit::pattern;
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually};

/// A broker on a thread, until this is dropped.
struct Served {
    stop: Arc<BrokerStop>,
    thread: Option<JoinHandle<BrokerEnd>>,
}

impl Served {
    fn start(path: &Path) -> Self {
        let stop = Arc::new(BrokerStop::new().unwrap());
        let mut options = BrokerOptions::default();
        (options.idle, options.hello) = (TEST_TIMEOUT, TEST_TIMEOUT);
        let broker = Broker::bind(path, options).unwrap();
        let stopped = Arc::clone(&stop);
        Self { stop, thread: Some(std::thread::spawn(move || broker.run(&stopped).unwrap())) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A device, and a place for a broker.
struct World {
    device: TestDevice,
    folder: tempfile::TempDir,
    /// One test at a time: a process that one starts has all descriptors until it is another program, and memory is in
    /// use as long.
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl World {
    fn open() -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let device = TestDevice::open(96);
        let shares_memory = device.info().memory_name.is_some();
        let skipped = skipped_unless(|_| shares_memory, "the device has no descriptors of its memory");
        (!skipped).then(|| Self { device, folder: tempfile::tempdir().unwrap(), _turn: turn })
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("broker.sock")
    }

    fn lending(&self) -> Lending {
        Lending::default().at(self.socket()).within(TEST_TIMEOUT)
    }

    fn lender(&self, lending: &Lending) -> Lender {
        let config = PoolConfig::default().in_chunks_of(4).in_spans_of(16).in_segments_of(8);
        let arena = Arena::over(self.device.driver(), config.keeping_backups(true)).unwrap();
        arena.lend_through(lending).unwrap();
        Lender { arena, blocks: Vec::new(), granule: self.device.info().granule_bytes }
    }

    fn memory_name(&self) -> String {
        self.device.info().memory_name.clone().unwrap()
    }
}

struct Lender {
    arena: Arena,
    blocks: Vec<Block>,
    granule: u64,
}

impl Lender {
    fn load(&mut self, granules: u64) {
        let request = AllocRequest::new(granules * self.granule, Tag::weights());
        let block = self.arena.alloc(&request).unwrap();
        let (seed, len) = (self.blocks.len() as u64, usize::try_from(block.requested_bytes).unwrap());
        pattern::fill(self.arena.pool(), block.id, seed, len).unwrap();
        self.blocks.push(block);
    }

    fn lend(&self) -> SleepReport {
        self.arena.sleep(&SleepRequest::all(Level::One).lending()).unwrap()
    }

    /// All bytes are right afterwards.
    fn wake(&self) -> WakeReport {
        let woken = self.arena.wake(&WakeRequest::all()).unwrap();
        for (seed, block) in (0..).zip(&self.blocks) {
            let len = usize::try_from(block.requested_bytes).unwrap();
            let read = pattern::read(self.arena.pool(), block.id, len).unwrap();
            assert!(read == pattern::bytes(seed, len), "{block:?}");
        }
        woken
    }

    fn granules(&self, bytes: u64) -> u64 {
        bytes / self.granule
    }
}

#[test]
fn two_arenas_that_fit_by_half_lend_to_each_other() {
    // A share of a device does not count what others hold of it.
    if skipped_unless(|kind| kind == DeviceKind::Host, "the device of this test is a share of one") {
        return;
    }
    let Some(world) = World::open() else { return };
    let _broker = Served::start(&world.socket());
    let (mut one, mut two) = (world.lender(&world.lending()), world.lender(&world.lending()));
    (0..6).for_each(|_| one.load(10));
    let slept = one.lend();
    assert_eq!((one.granules(slept.lent_bytes), slept.released_bytes), (60, 0), "{slept:?}");
    let name = world.memory_name();
    assert_eq!(world.lending().reclaimable_bytes(&name).unwrap(), slept.lent_bytes);
    // It lacks 24 granules, and gets them from what the other lends.
    (0..6).for_each(|_| two.load(10));
    let left = one.granules(world.lending().reclaimable_bytes(&name).unwrap());
    assert!((30..=36).contains(&left), "{left}");
    two.lend();
    let woken = one.wake();
    assert_eq!((one.granules(woken.returned_bytes), one.granules(woken.copied_bytes)), (left, 60 - left));
    one.lend();
    let woken = two.wake();
    assert_eq!(two.granules(woken.returned_bytes + woken.copied_bytes), 60);
    assert!(woken.returned_bytes > 0, "{woken:?}");
}

#[test]
fn an_arena_that_opens_beside_a_lender_may_have_what_is_lent() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "only host devices are opened by these names") {
        return;
    }
    let Some(world) = World::open() else { return };
    let _broker = Served::start(&world.socket());
    let name = format!("host:64MiB@{}/device", world.folder.path().display());
    let spec: DeviceSpec = name.parse().unwrap();
    let open = |lending| Arena::open(Config::on(spec.clone()).lending_by(lending)).unwrap();
    let block = |mib: u64| AllocRequest::new(mib << 20, Tag::weights());
    let lender = open(Some(world.lending()));
    lender.alloc(&block(48)).unwrap();
    assert_eq!(lender.sleep(&SleepRequest::all(Level::One).lending()).unwrap().lent_bytes, 48 << 20);
    let device = Device::open(&spec).unwrap();
    let budget = device.budget(None);
    assert_eq!((budget.headroom_bytes, budget.process_used_bytes), (Some(16 << 20), Some(0)));
    assert_eq!(device.reclaimable_bytes(&world.lending()), Some(48 << 20));
    assert_eq!(device.reclaimable_bytes(&world.lending().at("/no/such/socket")), None);
    let report = examine(&Plan::default().on(spec.clone()).asking(world.socket())).unwrap();
    assert_eq!(report.devices[0].memory.reclaimable_bytes, Some(48 << 20), "{:?}", report.warnings);
    for lending in [None, Some(world.lending())] {
        let asks = lending.is_some();
        let beside = open(lending);
        assert_eq!(beside.limit_bytes(), 64 << 20);
        let had = beside.alloc(&block(60));
        assert!(if asks { had.is_ok() } else { matches!(had, Err(PoolError::DeviceFull { .. })) }, "{had:?}");
    }
}

#[test]
fn copies_in_a_neighbours_memory_serve_wakes_until_it_is_needed_there() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "only host devices are opened by these names") {
        return;
    }
    let Some(world) = World::open() else { return };
    let _broker = Served::start(&world.socket());
    let spec = |name: &str| -> DeviceSpec {
        format!("host:64MiB@{}/{name}", world.folder.path().display()).parse().unwrap()
    };
    let neighbour = Device::open(&spec("gpu1")).unwrap();
    let copies = PeerCopies::On(vec![spec("gpu0"), spec("gpu1")]);
    let config = Config::on(spec("gpu0")).lending_by(world.lending()).copying_to(copies.clone());
    let arena = Arena::open(config).unwrap();
    let blocks = (0..3).map(|_| arena.alloc(&AllocRequest::new(16 << 20, Tag::weights())).unwrap()).collect();
    let sleeper = Lender { arena, blocks, granule: 2 << 20 };
    for (seed, block) in (0..).zip(&sleeper.blocks) {
        pattern::fill(sleeper.arena.pool(), block.id, seed, 16 << 20).unwrap();
    }
    let sleep = || sleeper.arena.sleep(&SleepRequest::all(Level::One)).unwrap();
    let reclaimable_bytes = || neighbour.reclaimable_bytes(&world.lending()).unwrap();
    let free_bytes = || neighbour.driver().memory_info().unwrap().free_bytes;
    let slept = sleep();
    assert_eq!((slept.peer_bytes, slept.released_bytes), (48 << 20, 48 << 20));
    assert_eq!((reclaimable_bytes(), free_bytes()), (48 << 20, 16 << 20));
    let woken = sleeper.wake();
    assert_eq!((woken.peer_bytes, woken.read_bytes), (48 << 20, 0));
    sleep();
    let other = Arena::open(Config::on(spec("gpu1")).lending_by(world.lending())).unwrap();
    other.alloc(&AllocRequest::new(30 << 20, Tag::weights())).unwrap();
    let left_bytes = reclaimable_bytes();
    assert!((1..=32 << 20).contains(&left_bytes), "{left_bytes}");
    let woken = sleeper.wake();
    assert_eq!((woken.peer_bytes, woken.copied_bytes), (left_bytes, 48 << 20));
    assert_eq!(sleep().peer_bytes, 0, "an eighth stays free there");
    sleeper.wake();
    drop(sleeper);
    assert_eq!(reclaimable_bytes(), 0, "a closed arena leaves nothing");

    let alone = Arena::open(Config::on(spec("gpu0")).copying_to(copies)).unwrap_err();
    assert!(alone.to_string().contains("set `lending`"), "{alone}");
    for elsewhere in ["cuda:1", "host:64MiB"] {
        let copies = PeerCopies::On(vec![elsewhere.parse().unwrap()]);
        let config = Config::on(spec("gpu0")).lending_by(world.lending()).copying_to(copies);
        let error = poorwill::chain(&Arena::open(config).unwrap_err());
        assert!(error.contains(elsewhere) && error.contains("reaches"), "{error}");
    }
}

/// Two ranks that sleep and wake together keep copies in each other's memory, which neither can wake without.
#[test]
fn neighbours_that_wake_at_once_have_their_memory_back() {
    if skipped_unless(|kind| kind == DeviceKind::Host, "only host devices are opened by these names") {
        return;
    }
    let Some(world) = World::open() else { return };
    let _broker = Served::start(&world.socket());
    let spec = |name: &str| -> DeviceSpec {
        format!("host:64MiB@{}/{name}", world.folder.path().display()).parse().unwrap()
    };
    let rank = |own: &str, other: &str| {
        let config = Config::on(spec(own)).lending_by(world.lending());
        let arena = Arena::open(config.copying_to(PeerCopies::On(vec![spec(other)]))).unwrap();
        let blocks =
            (0..5).map(|_| arena.alloc(&AllocRequest::new(8 << 20, Tag::weights())).unwrap()).collect();
        let rank = Lender { arena, blocks, granule: 2 << 20 };
        for (seed, block) in (0..).zip(&rank.blocks) {
            pattern::fill(rank.arena.pool(), block.id, seed, 8 << 20).unwrap();
        }
        rank
    };
    let ranks = [rank("gpu0", "gpu1"), rank("gpu1", "gpu0")];
    let together = Barrier::new(2);
    for _ in 0..8 {
        let cycle = |rank: &Lender| {
            together.wait();
            rank.arena.sleep(&SleepRequest::all(Level::One)).unwrap();
            together.wait();
            rank.wake();
        };
        std::thread::scope(|scope| ranks.iter().for_each(|rank| _ = scope.spawn(move || cycle(rank))));
    }
}

#[test]
fn what_is_to_stay_free_is_asked_of_others() {
    let Some(world) = World::open() else { return };
    let _broker = Served::start(&world.socket());
    let mut one = world.lender(&world.lending());
    one.load(10);
    let other = Tag::new("other").unwrap();
    one.arena.alloc(&AllocRequest::new(10 * one.granule, other.clone())).unwrap();
    one.arena.keep_free(1 << 49);
    assert_eq!(one.granules(one.lend().lent_bytes), 20);
    one.arena.wake(&WakeRequest::of([other])).unwrap();
    assert_eq!(one.granules(one.wake().returned_bytes), 10, "its own stays");
}

#[test]
fn all_is_given_up_for_those_that_do_not_ask() {
    let Some(world) = World::open() else { return };
    let (name, lending) = (world.memory_name(), world.lending());
    let free = |bytes, spared| lending.free(&name, bytes, spared, Duration::ZERO).unwrap();
    assert_eq!((free(u64::MAX, vec![]), lending.reclaimable_bytes(&name).unwrap()), (0, 0), "no broker");
    let _broker = Served::start(&world.socket());
    let mut lender = world.lender(&lending);
    (0..3).for_each(|_| lender.load(8));
    let lent_bytes = lender.lend().lent_bytes;
    assert_eq!(free(u64::MAX, vec![std::process::id()]), 0);
    let part_bytes = free(1, vec![]);
    assert!((1..lent_bytes).contains(&part_bytes), "{part_bytes}");
    assert_eq!(free(u64::MAX, vec![]), lent_bytes - part_bytes);
    assert_eq!(lending.free("another", u64::MAX, vec![], Duration::ZERO).unwrap(), 0);
    let woken = lender.wake();
    assert_eq!((woken.returned_bytes, woken.copied_bytes), (0, lent_bytes));
}

#[test]
fn what_changes_all_the_time_moves_only_as_far_as_it_does_not_fit() {
    let Some(world) = World::open() else { return };
    let broker = Served::start(&world.socket());
    let (mut trainer, mut engine) = (world.lender(&world.lending()), world.lender(&world.lending()));
    trainer.arena.declare_changes(&Tag::weights(), Changes::Volatile).unwrap();
    (0..6).for_each(|_| trainer.load(10));
    let slept = trainer.lend();
    assert_eq!((trainer.granules(slept.resident_bytes), slept.copied_bytes), (60, 0), "{slept:?}");
    assert_eq!(world.lending().reclaimable_bytes(&world.memory_name()).unwrap(), slept.resident_bytes);
    // It lacks 14 granules, and the trainer's pool moves two blocks.
    (0..5).for_each(|_| engine.load(10));
    engine.lend();
    let woken = trainer.wake();
    let moved = trainer.granules(woken.copied_bytes);
    assert!((14..=20).contains(&moved), "{moved}");
    assert_eq!(trainer.granules(woken.returned_bytes), 60 - moved);
    trainer.lend();
    drop(broker);
    // Others could ask no more.
    let resident = || trainer.arena.stats().unwrap().resident_bytes;
    eventually("resident memory leaves", || resident() == 0);
    trainer.wake();
}

/// A test that is the program of a broker, and ends with its caller's input or when it is killed.
#[test]
fn broker_program() {
    let Some(socket) = std::env::var_os("POORWILL_TEST_BROKER") else { return };
    let mut options = BrokerOptions::default();
    options.idle = TEST_TIMEOUT;
    Broker::bind(Path::new(&socket), options).unwrap().run(&BrokerStop::new().unwrap()).unwrap();
}

/// This program as a broker.
fn started(socket: &Path) -> Vec<OsString> {
    let mut variable = OsString::from("POORWILL_TEST_BROKER=");
    variable.push(socket);
    let program = std::env::current_exe().unwrap();
    let test = ["lend::broker_program", "--exact"].map(OsString::from);
    ["env".into(), variable, program.into()].into_iter().chain(test).collect()
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn the_first_that_lends_starts_a_broker_and_a_killed_one_is_started_again() {
    let Some(world) = World::open() else { return };
    let lending = world.lending().starting(started(&world.socket()));
    let mut lender = world.lender(&lending);
    lender.load(20);
    for _ in 0..2 {
        let slept = lender.lend();
        assert_eq!((lender.granules(slept.lent_bytes), slept.lend_refused), (20, None));
        let broker = world.lending().status().unwrap().unwrap().pid;
        assert_ne!(broker, std::process::id());
        kill(broker);
        let woken = lender.wake();
        assert_eq!((woken.returned_bytes, lender.granules(woken.copied_bytes)), (0, 20));
    }
}

#[test]
fn without_a_broker_sleeps_release_and_say_why() {
    let Some(world) = World::open() else { return };
    let socket = world.socket();
    let absent = || Lending::default().at(&socket).within(TEST_TIMEOUT);
    for (lending, why) in [
        (absent(), "no broker is at"),
        (absent().starting(vec![]), "the command that starts a broker is empty"),
        (absent().starting(vec!["/no/such/program".into()]), "/no/such/program"),
        (absent().starting(vec!["true".into()]), "the broker that was started does not answer"),
    ] {
        let mut lender = world.lender(&lending);
        lender.load(10);
        for _ in 0..2 {
            let slept = lender.lend();
            assert_eq!((slept.lent_bytes, lender.granules(slept.released_bytes)), (0, 10));
            let refused = slept.lend_refused.unwrap();
            assert!(refused.contains(why), "{refused}");
            assert_eq!(lender.granules(lender.wake().copied_bytes), 10);
        }
    }
}

#[test]
fn a_mute_broker_is_asked_once() {
    let Some(world) = World::open() else { return };
    let listener = UnixListener::bind(world.socket()).unwrap();
    // Of another kind of socket, so that it refuses; then one that never answers.
    let mut lender = world.lender(&world.lending());
    lender.load(10);
    assert!(lender.lend().lend_refused.is_some());
    lender.wake();
    drop(listener);
    std::fs::remove_file(world.socket()).unwrap();
    let mute = mute(&world.socket());
    let mut lender = world.lender(&world.lending().within(Duration::from_millis(20)));
    lender.load(10);
    let refusals: Vec<_> = (0..3)
        .map(|_| {
            let refused = lender.lend().lend_refused;
            lender.wake();
            refused.unwrap()
        })
        .collect();
    assert!(refusals[0].contains("has not answered `hello` within 20 ms"), "{refusals:?}");
    assert!(refusals.iter().all(|refused| *refused == refusals[0]), "{refusals:?}");
    let device = Device::open(&DeviceSpec::host()).unwrap();
    assert_eq!(device.reclaimable_bytes(&world.lending().within(Duration::from_millis(20))), None);
    drop(mute);
}

/// Takes connections in its backlog and answers none.
fn mute(path: &Path) -> rustix::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 16).unwrap();
    listener
}
