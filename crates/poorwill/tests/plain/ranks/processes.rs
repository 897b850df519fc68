//! Ranks and coordinators as processes. One is stopped or killed at each moment of a sleep and of a wake.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use poorwill::decision::Decision;
use poorwill::ranks::{
    Group, GroupConfig, GroupSleep, GroupWake, Rank, RankOutcome, RankServer, RankState, StageError,
    StagedRank,
};
use poorwill::{AllocRequest, Arena, Config, Level, SleepRequest, Tag, TagState, WakeRequest};
use poorwill_testkit::child::{self, OwnedChild};
use poorwill_testkit::watchdog::{eventually, watched};
use rustix::process::{Pid, Signal, kill_process};

const FOLDER: &str = "POORWILL_TEST_FOLDER";
const RANKS: u32 = 3;
/// At which the second rank pauses: before it stages, before it says so, and before it says what became of it.
const MOMENTS: [&str; 3] = ["staging", "staged", "ended"];

/// Where the process pauses.
#[derive(Debug, Default)]
struct Pause {
    at: Mutex<Option<String>>,
    changed: Condvar,
}

impl Pause {
    fn set(&self, moment: Option<&str>) {
        *self.at.lock().unwrap() = moment.map(str::to_owned);
        self.changed.notify_all();
    }

    fn reach(&self, moment: &str) {
        let mut at = self.at.lock().unwrap();
        if at.as_deref() == Some(moment) {
            say(&format!("at {moment}"));
            while at.as_deref() == Some(moment) {
                at = self.changed.wait(at).unwrap();
            }
        }
    }
}

struct PausingRank {
    arena: Arena,
    pause: Arc<Pause>,
}

struct PausingStaged(Box<dyn StagedRank>, Arc<Pause>);

impl StagedRank for PausingStaged {
    fn wait(self: Box<Self>) -> RankOutcome {
        let outcome = self.0.wait();
        self.1.reach("ended");
        outcome
    }
}

impl PausingRank {
    fn pausing<S: StagedRank + 'static>(
        &self,
        stage: impl FnOnce() -> Result<S, StageError>,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        self.pause.reach("staging");
        let staged = PausingStaged(Box::new(stage()?), Arc::clone(&self.pause));
        self.pause.reach("staged");
        Ok(Box::new(staged))
    }
}

impl Rank for PausingRank {
    fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        self.pausing(|| Ok(self.arena.stage_sleep(request, decision, undo_after)?))
    }

    fn stage_wake(
        &self,
        request: &WakeRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        self.pausing(|| Ok(self.arena.stage_wake(request, decision, undo_after)?))
    }
}

fn say(words: &str) {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{words}").unwrap();
    stdout.flush().unwrap();
}

fn config(folder: &Path) -> GroupConfig {
    GroupConfig::new("job", RANKS).unwrap().in_folder(folder.to_owned())
}

/// What the other processes do. As a test of its own it does nothing.
#[test]
fn another_process() {
    let Some(role) = child::role() else { return };
    let config = config(Path::new(&std::env::var_os(FOLDER).unwrap()));
    match role.split(' ').collect::<Vec<_>>()[..] {
        ["rank", rank] => be_rank(&config, rank.parse().unwrap()),
        ["coordinator", op, within_ms] => {
            coordinate(&config, op, Duration::from_millis(within_ms.parse().unwrap()));
        }
        _ => panic!("{role}"),
    }
}

fn be_rank(config: &GroupConfig, rank: u32) {
    let arena = Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap();
    let weights = arena.alloc(&AllocRequest::new(4 << 20, Tag::weights())).unwrap();
    let bytes: Vec<u8> = (0..4_000_000u32).map(|at| (at / 7 + rank).to_le_bytes()[0]).collect();
    arena.write_all(weights.id, 0, &bytes).unwrap();
    let pause = Arc::new(Pause::default());
    let does = PausingRank { arena: arena.clone(), pause: Arc::clone(&pause) };
    let server = RankServer::start(config, rank, does).unwrap();
    say("ready");
    for line in std::io::stdin().lines() {
        match line.unwrap().split_once(' ').unwrap() {
            ("pause", moment) => pause.set(Some(moment)),
            ("go", _) => pause.set(None),
            ("check", _) => {
                let is_awake = || arena.tag_state(&Tag::weights()).unwrap() == TagState::Awake;
                // A request that comes meanwhile, of a coordinator that has ended, changes nothing for long.
                eventually("it is decided", || {
                    let expected_bytes = if is_awake() { 4 << 20 } else { 0 };
                    let mapped_bytes = arena.stats().unwrap().mapped_bytes;
                    mapped_bytes == expected_bytes && server.status().state == RankState::Idle
                });
                say(if is_awake() { "it is awake" } else { "it is asleep" });
            }
            ("verify", _) => {
                arena.wake(&WakeRequest::all()).unwrap();
                let read = arena.read_vec(weights.id, 0, 4_000_000).unwrap();
                assert!(read == bytes, "the bytes of rank {rank} have changed");
                assert_eq!(arena.pool().block(weights.id).unwrap().range, weights.range);
                say("verified");
            }
            other => panic!("{other:?}"),
        }
        if pause.at.lock().unwrap().is_some() {
            say("armed");
        }
    }
}

/// Again and again, until it is done or that is enough: a machine that stalls only repeats it.
fn coordinate(config: &GroupConfig, op: &str, within: Duration) {
    let is_enough = Arc::new(AtomicBool::new(false));
    let enough = Arc::clone(&is_enough);
    thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        enough.store(true, Ordering::SeqCst);
    });
    let group = Group::open(config).unwrap();
    loop {
        let result = match op {
            "sleep" => group.sleep(&GroupSleep::all(Level::One).within(within)),
            _ => group.wake(&GroupWake::all().within(within)),
        };
        match result {
            Ok(_) => return say("done"),
            Err(error) if is_enough.load(Ordering::SeqCst) => return say(&format!("{error} failed")),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

struct Other {
    child: OwnedChild,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(folder: &Path, role: &str) -> Self {
        let folder = folder.to_str().unwrap();
        let mut command = child::command_for("ranks::processes::another_process", role, &[(FOLDER, folder)]);
        let mut child = OwnedChild::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn ask(&mut self, line: &str) {
        // One that has ended says so where it is heard.
        let _ = self.child.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes());
    }

    /// Waits for one of these, and returns it.
    fn hear<'w>(&mut self, words: &[&'w str]) -> &'w str {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended before {words:?}");
            if let Some(heard) = words.iter().find(|words| line.trim_end().ends_with(**words)) {
                return heard;
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id().try_into().unwrap()).unwrap(), signal).unwrap();
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    op: &'static str,
    moment: &'static str,
    is_coordinator: bool,
    is_killed: bool,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for moment in MOMENTS {
            for (is_coordinator, is_killed) in [(false, false), (true, false), (false, true), (true, true)] {
                cases.extend(["sleep", "wake"].map(|op| Self { op, moment, is_coordinator, is_killed }));
            }
        }
        cases
    }

    /// Where the group is when all is at rest; `None`: it depends on the time.
    fn expected(self) -> Option<&'static str> {
        let is_done = self.moment == "ended";
        self.is_killed.then_some(if is_done == (self.op == "sleep") { "it is asleep" } else { "it is awake" })
    }

    fn run(self) {
        let folder = tempfile::tempdir().unwrap();
        let start = |rank| Other::start(folder.path(), &format!("rank {rank}"));
        let mut ranks: Vec<Other> = (0..RANKS).map(start).collect();
        for rank in &mut ranks {
            rank.hear(&["ready"]);
        }
        if self.op == "wake" {
            Group::open(&config(folder.path())).unwrap().sleep(&GroupSleep::all(Level::One)).unwrap();
        }
        ranks[1].ask(&format!("pause {}", self.moment));
        ranks[1].hear(&["armed"]);
        let within_ms = if self.is_killed { 120_000 } else { 150 };
        let mut coordinator = Other::start(folder.path(), &format!("coordinator {} {within_ms}", self.op));
        ranks[1].hear(&[&format!("at {}", self.moment)]);

        let victim = if self.is_coordinator { &mut coordinator } else { &mut ranks[1] };
        if self.is_killed {
            victim.child.end();
        } else {
            victim.signal(Signal::STOP);
        }
        if self.is_coordinator {
            ranks[1].ask("go on");
            if !self.is_killed {
                // The others do not wait for it.
                self.agree(&mut ranks);
                coordinator.ask("enough");
                coordinator.signal(Signal::CONT);
                coordinator.hear(&["done", "failed"]);
            }
        } else {
            coordinator.ask("enough");
            let heard = coordinator.hear(&["done", "failed"]);
            assert!(!self.is_killed || heard == "failed", "{self:?}");
            if self.is_killed {
                ranks.remove(1);
            } else {
                ranks[1].signal(Signal::CONT);
                ranks[1].ask("go on");
            }
        }
        let found = self.agree(&mut ranks);
        assert!(self.expected().is_none_or(|expected| expected == found), "{self:?}: {found}");
        for rank in &mut ranks {
            rank.ask("verify all");
            rank.hear(&["verified"]);
        }
    }

    /// No rank is undecided, and all are in one state.
    fn agree(self, ranks: &mut [Other]) -> &'static str {
        let state = |rank: &mut Other| {
            rank.ask("check it");
            rank.hear(&["it is awake", "it is asleep"])
        };
        let states: BTreeSet<&str> = ranks.iter_mut().map(state).collect();
        assert_eq!(states.len(), 1, "{self:?}");
        states.into_iter().next().unwrap()
    }
}

#[test]
fn whatever_is_stopped_or_killed_the_others_agree() {
    watched(|| {
        let (cases, next) = (Case::all(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                        case.run();
                    }
                });
            }
        });
    });
}
