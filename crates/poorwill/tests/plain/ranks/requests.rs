//! What a coordinator or a rank must not say gets a clear sentence, and the rank serves on.

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use poorwill::decision::{Decision, Verdict};
use poorwill::ranks::{
    FileDecision, Group, GroupConfig, GroupError, GroupSleep, GroupState, GroupWake, Rank, RankServer,
    RankState, RanksError, StageError, StagedRank,
};
use poorwill::{AllocRequest, Arena, BlockId, Config, Level, SleepRequest, Tag, TagState, WakeRequest};
use poorwill_testkit::watchdog::{eventually, watched};
use serde_json::{Value, json};

/// A group in this process.
struct Scene {
    folder: tempfile::TempDir,
    config: GroupConfig,
    arenas: Vec<(Arena, BlockId)>,
    servers: Vec<RankServer>,
}

impl Scene {
    fn new(world_size: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = GroupConfig::new("job", world_size).unwrap().in_folder(folder.path().to_owned());
        let mut scene = Self { folder, config, arenas: Vec::new(), servers: Vec::new() };
        for rank in 0..world_size {
            let arena = Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap();
            let block = arena.alloc(&AllocRequest::new(4 << 20, Tag::weights())).unwrap().id;
            arena.write_all(block, 0, &[7; 1000]).unwrap();
            scene.servers.push(RankServer::start(&scene.config, rank, arena.clone()).unwrap());
            scene.arenas.push((arena, block));
        }
        scene
    }

    fn group(&self) -> Group {
        Group::open(&self.config).unwrap()
    }

    fn assert_awake(&self) {
        for (arena, block) in &self.arenas {
            assert_eq!(arena.tag_state(&Tag::weights()).unwrap(), TagState::Awake);
            assert_eq!(arena.read_vec(*block, 0, 1000).unwrap(), [7; 1000]);
        }
    }

    fn assert_asleep(&self) {
        for (arena, _) in &self.arenas {
            assert_eq!(arena.tag_state(&Tag::weights()).unwrap(), TagState::AsleepBackedUp);
            assert_eq!(arena.stats().unwrap().mapped_bytes, 0);
        }
    }

    /// Nothing of a call is left in the group's folder.
    fn decisions(&self) -> usize {
        let entries = std::fs::read_dir(self.config.folder()).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_dir()).count()
    }
}

/// A caller that says what it likes.
struct Caller(BufReader<UnixStream>);

impl Caller {
    fn of(socket: &Path) -> Self {
        Self(BufReader::new(UnixStream::connect(socket).unwrap()))
    }

    fn ask(&mut self, line: &[u8]) -> Value {
        self.0.get_mut().write_all(&[line, b"\n"].concat()).unwrap();
        self.hear()
    }

    fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

fn group_error(result: Result<Vec<Value>, RanksError>) -> GroupError {
    match result {
        Err(RanksError::Group(error)) => *error,
        other => panic!("{other:?}"),
    }
}

fn all() -> GroupSleep {
    GroupSleep::all(Level::One)
}

#[test]
fn a_group_sleeps_and_wakes_as_one() {
    let scene = Scene::new(3);
    let reports = scene.group().sleep(&all()).unwrap();
    assert!(reports.iter().all(|report| report["released_bytes"] == 4 << 20), "{reports:?}");
    scene.assert_asleep();
    assert_eq!(scene.group().sleep(&all()).unwrap()[2]["already_asleep_tags"], json!(["weights"]));
    let reports = scene.group().wake(&GroupWake::all()).unwrap();
    assert_eq!((reports.len(), &reports[0]["copied_bytes"]), (3, &json!(4 << 20)));
    scene.assert_awake();
    assert_eq!(scene.decisions(), 0);
    for (rank, status) in (0..).zip(scene.group().status(Duration::from_secs(60))) {
        let status = status.unwrap();
        assert_eq!((status.rank, status.state, status.problem), (rank, RankState::Idle, None));
    }
}

#[test]
fn one_rank_that_cannot_sleep_keeps_all_awake() {
    let scene = Scene::new(3);
    let lora = Tag::new("lora").unwrap();
    let block = scene.arenas[1].0.alloc(&AllocRequest::new(1 << 20, lora.clone())).unwrap();
    let error = group_error(scene.group().sleep(&all().choosing(vec![lora])));
    assert_eq!((error.state, &error.unconfirmed[..]), (GroupState::Unchanged, &[][..]));
    // One of the two may hear of the other's failure before it tries.
    let words = error.to_string();
    for (rank, complaint) in &error.complaints {
        assert!([0, 2].contains(rank) && complaint.contains("cannot sleep: no tag `lora`"), "{words}");
    }
    assert!(!error.complaints.is_empty() && words.ends_with("all ranks are as they were"), "{words}");
    scene.assert_awake();
    let hold = scene.arenas[2].0.hold(&Tag::weights(), "nccl").unwrap();
    let error = group_error(scene.group().sleep(&all()));
    assert!(error.to_string().contains("held by nccl") && error.complaints.len() == 1, "{error}");
    scene.assert_awake();
    drop(hold);
    scene.arenas[1].0.free(block.id).unwrap();
    scene.group().sleep(&all()).unwrap();
    scene.assert_asleep();
    assert_eq!(scene.decisions(), 0);
}

#[test]
fn bad_requests_are_one_sentence_and_the_rank_serves_on() {
    let scene = Scene::new(1);
    let decision = FileDecision::create(Some(scene.folder.path())).unwrap();
    let path = decision.path().to_str().unwrap();
    let mut caller = Caller::of(scene.servers[0].socket());
    let call = |fields: Value| {
        let mut call =
            json!({"protocol": 1, "call": "sleep", "level": 1, "decision": path, "undo_after_s": 60});
        call.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        call.to_string()
    };
    let nowhere = scene.folder.path().join("decision-none");
    for (line, words) in [
        (call(json!({"level": 3})), "level 3: a sleep has level 1 or 2"),
        (call(json!({"level": "one"})), "invalid type"),
        (call(json!({"level": 1.5})), "1.5"),
        (call(json!({"tags": ["no such"]})), "cannot be a tag"),
        (call(json!({"tags": ["absent"]})), "no tag `absent`"),
        (call(json!({"tags": 7})), "sequence"),
        (call(json!({"undo_after_s": -1})), "`undo_after_s` is -1"),
        (call(json!({"undo_after_s": 1e300})), "86400 seconds"),
        (call(json!({"wait_s": 1e9})), "`wait_s`"),
        (call(json!({"protocol": 2})), "speaks protocol 2"),
        (call(json!({"call": "dance"})), "dance"),
        (call(json!({"call": "decided", "decision": "/other"})), "takes no part"),
        (call(json!({"decision": nowhere})), "there is no decision"),
        (call(json!({"decision": "/etc/passwd"})), "/etc/passwd"),
        ("{".into(), "not JSON"),
        (String::new(), "not JSON"),
    ] {
        // A rank that was asked and cannot proposes to undo: each has a decision of its own.
        let own = FileDecision::create(Some(scene.folder.path())).unwrap();
        let answer = caller.ask(line.replace(path, own.path().to_str().unwrap()).as_bytes());
        let why = answer["why"].as_str().unwrap();
        assert!(answer["answer"] == "refused" && why.contains(words), "{line}: {answer}");
        assert_eq!(scene.servers[0].status().state, RankState::Idle);
    }
    assert!(caller.ask(b"\xff\xfe")["why"].as_str().unwrap().contains("UTF-8"));
    assert_eq!(caller.ask(br#"{"protocol":1,"call":"status"}"#)["state"], "idle");

    let mut endless = Caller::of(scene.servers[0].socket());
    // It is answered as soon as it is too long, so the rest may find no reader.
    let _ = endless.0.get_mut().write_all(&[b'x'; 70_000]);
    assert!(endless.hear()["why"].as_str().unwrap().contains("more than 65536 bytes"));
    scene.assert_awake();
    scene.group().sleep(&all()).unwrap();
    scene.assert_asleep();
}

/// So many callers that a rank hangs up on the oldest.
const MANY: usize = 40;

fn idle(socket: &Path) -> Vec<Caller> {
    let served = |_| {
        let mut caller = Caller::of(socket);
        assert_eq!(caller.ask(br#"{"protocol":1,"call":"status"}"#)["answer"], "status");
        caller
    };
    (0..MANY).map(served).collect()
}

fn has_ended(caller: &mut Caller) -> bool {
    caller.0.read_line(&mut String::new()).map_or(true, |bytes| bytes == 0)
}

#[test]
fn idle_callers_give_way_to_a_group() {
    let scene = Scene::new(1);
    let mut idle = idle(scene.servers[0].socket());
    scene.group().sleep(&all()).unwrap();
    scene.assert_asleep();
    assert!(has_ended(&mut idle[0]), "the oldest");
    assert_eq!(idle[MANY - 1].ask(br#"{"protocol":1,"call":"status"}"#)["state"], "idle");
}

#[test]
fn a_caller_whose_turn_it_is_does_not_give_way() {
    let scene = Scene::new(1);
    let socket = scene.servers[0].socket();
    let staging = |caller: &mut Caller| {
        let decision = FileDecision::create(Some(scene.folder.path())).unwrap();
        let call = json!({"protocol": 1, "call": "sleep", "level": 1, "decision": decision.path(), "undo_after_s": 3600});
        assert_eq!(caller.ask(call.to_string().as_bytes())["answer"], "staged");
        decision
    };
    let decided = |decision: &FileDecision| {
        json!({"protocol": 1, "call": "decided", "decision": decision.path()}).to_string()
    };
    let mut caller = Caller::of(socket);
    let decision = staging(&mut caller);
    // It waits for the outcome of another's decision, and gives way all the same.
    let mut waiting = Caller::of(socket);
    waiting.0.get_mut().write_all(&[decided(&decision).as_bytes(), b"\n"].concat()).unwrap();
    let _idle = idle(socket);
    assert!(has_ended(&mut waiting));
    decision.decide(Verdict::Undo).unwrap();
    assert_eq!(caller.ask(decided(&decision).as_bytes())["answer"], "ended");
    scene.assert_awake();

    // With turns that are over, callers give way, too.
    let turn = |_| {
        let mut caller = Caller::of(socket);
        let decision = staging(&mut caller);
        decision.decide(Verdict::Undo).unwrap();
        assert_eq!(caller.ask(decided(&decision).as_bytes())["answer"], "ended");
        caller
    };
    let _over: Vec<Caller> = (0..MANY).map(turn).collect();
    scene.group().sleep(&all()).unwrap();
    scene.assert_asleep();
}

#[test]
fn a_decision_that_is_made_or_gone_moves_no_rank() {
    let scene = Scene::new(1);
    let mut caller = Caller::of(scene.servers[0].socket());
    for verdict in [Verdict::Commit, Verdict::Undo] {
        let decision = FileDecision::create(Some(scene.folder.path())).unwrap();
        decision.decide(verdict).unwrap();
        let call = json!({"protocol": 1, "call": "sleep", "level": 1, "decision": decision.path(), "undo_after_s": 60});
        let answer = caller.ask(call.to_string().as_bytes());
        assert_eq!(answer["answer"], if verdict == Verdict::Undo { "ended" } else { "refused" });
        assert!(answer["why"].as_str().unwrap().contains("the request is late"), "{answer}");
    }
    scene.assert_awake();
}

#[test]
fn a_rank_whose_decision_vanishes_keeps_its_memory_and_says_so() {
    let scene = Scene::new(1);
    let decision = FileDecision::create(Some(scene.folder.path())).unwrap();
    let mut caller = Caller::of(scene.servers[0].socket());
    let call =
        json!({"protocol": 1, "call": "sleep", "level": 1, "decision": decision.path(), "undo_after_s": 0});
    let started = caller.ask(call.to_string().as_bytes());
    // With no time at all it has proposed to undo, maybe before this.
    assert_eq!(started["answer"], "staged");
    eventually("it undoes", || scene.servers[0].status().state == RankState::Idle);
    scene.assert_awake();

    let decision = FileDecision::create(Some(scene.folder.path())).unwrap();
    let call = json!({"protocol": 1, "call": "sleep", "level": 1, "decision": decision.path(), "undo_after_s": 3600});
    assert_eq!(caller.ask(call.to_string().as_bytes())["answer"], "staged");
    std::fs::remove_dir_all(decision.path()).unwrap();
    let status = caller.ask(br#"{"protocol":1,"call":"status"}"#);
    assert_eq!(status["state"], "staged");
    assert!(status["problem"].as_str().unwrap().contains("its verdict is lost"), "{status}");
    drop(caller);
    let error = group_error(scene.group().sleep(&all()));
    assert!(error.to_string().contains("rank 0: it is busy with a sleep of another call"), "{error}");
    scene.arenas[0].0.close().unwrap(); // Ends what waits.
    eventually("it ends", || scene.servers[0].status().state == RankState::Idle);
}

/// Stages when it may.
struct Held {
    arena: Arena,
    begun: Sender<()>,
    may_go_on: Mutex<Receiver<()>>,
}

impl Rank for Held {
    fn stage_sleep(
        &self,
        request: &SleepRequest,
        decision: Arc<dyn Decision>,
        undo_after: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        self.begun.send(())?;
        self.may_go_on.lock().unwrap_or_else(PoisonError::into_inner).recv()?;
        Ok(Box::new(self.arena.stage_sleep(request, decision, undo_after)?))
    }

    fn stage_wake(
        &self,
        _: &WakeRequest,
        _: Arc<dyn Decision>,
        _: Duration,
    ) -> Result<Box<dyn StagedRank>, StageError> {
        std::panic::panic_any("as a rank's own code may")
    }
}

#[test]
fn two_coordinators_and_a_rank_that_panics() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let config = GroupConfig::new("job", 1).unwrap().in_folder(folder.path().to_owned());
        let ((begun, begins), (go_on, may_go_on)) = (channel(), channel());
        let arena = Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap();
        arena.alloc(&AllocRequest::new(1 << 20, Tag::weights())).unwrap();
        let held = Held { arena, begun, may_go_on: Mutex::new(may_go_on) };
        let server = RankServer::start(&config, 0, held).unwrap();
        let group = Group::open(&config).unwrap();
        let first = {
            let group = group.clone();
            thread::spawn(move || group.sleep(&all()))
        };
        begins.recv().unwrap();
        let error = group_error(group.sleep(&all()));
        assert!(error.to_string().contains("busy with a sleep of another call"), "{error}");
        assert_eq!(server.status().state, RankState::Staging);
        go_on.send(()).unwrap();
        assert_eq!(first.join().unwrap().unwrap().len(), 1);
        let error = group_error(group.wake(&GroupWake::all()));
        assert!(error.to_string().contains("rank 0: it panicked"), "{error}");
        assert_eq!(server.status().state, RankState::Idle);
    });
}

/// A rank that answers each line with the next of these.
fn answering(config: &GroupConfig, rank: u32, answers: Vec<String>) -> thread::JoinHandle<()> {
    let path = config.socket(rank).unwrap();
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut requests = BufReader::new(stream.try_clone().unwrap());
        for answer in answers {
            if requests.read_line(&mut String::new()).unwrap_or(0) == 0 {
                return;
            }
            let _ = stream.write_all(answer.as_bytes());
        }
        let _ = stream.shutdown(Shutdown::Both);
    })
}

#[test]
fn what_is_wrong_with_a_rank_is_said() {
    let mut scene = Scene::new(2);
    let status = |rank: u32, size: u32| {
        let status = json!({"protocol": 1, "answer": "status", "group": "job", "rank": rank, "world_size": size,
            "pid": 7, "state": "idle"});
        format!("{status}\n")
    };
    let good = || status(1, 2);
    let answer = |text: &str| format!("{text}\n");
    scene.servers.pop();
    for (answers, words) in [
        (vec![status(0, 2)], "answers as rank 0 of `job`: give each rank its own number"),
        (vec![status(1, 4)], "a group of 4 ranks, and 2 are asked"),
        (vec![answer("garbage")], "rank 1: the line is not JSON"),
        (vec![answer(r#"{"protocol":9,"answer":"staged"}"#)], "speaks protocol 9"),
        (vec![answer(r#"{"protocol":1,"answer":"staged"}"#)], "it answered another question"),
        (vec![], "rank 1: it hung up"),
        (vec![good()], "rank 1: it hung up"),
        (vec![good(), "{\"protocol\"".into()], "it hung up within a line"),
        (vec![good(), answer("garbage")], "rank 1: the line is not JSON"),
        (vec![good(), answer("\u{1}")], "not JSON"),
        (vec![good(), good()], "it answered another question"),
        (vec![good(), answer(r#"{"protocol":1,"answer":"refused","why":"no mood"}"#)], "rank 1: no mood"),
        (
            vec![good(), answer(r#"{"protocol":1,"answer":"ended","outcome":"done","report":{}}"#)],
            "out of turn",
        ),
    ] {
        let rank = answering(&scene.config, 1, answers);
        let error = group_error(scene.group().sleep(&all()));
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert_eq!(error.state, GroupState::Unchanged);
        rank.join().unwrap();
        scene.assert_awake();
    }
    // A rank that says twice that it is staged: the group commits before it is heard, or undoes.
    let twice = answer(r#"{"protocol":1,"answer":"staged"}"#).repeat(2);
    let rank = answering(&scene.config, 1, vec![good(), twice, String::new()]);
    let error = group_error(scene.group().sleep(&all()));
    assert!(error.to_string().contains("twice"), "{error}");
    rank.join().unwrap();
    let (first, _) = &scene.arenas[0];
    let is_asleep = first.tag_state(&Tag::weights()).unwrap() == TagState::AsleepBackedUp;
    assert_eq!(is_asleep, error.state == GroupState::Done, "{error}");
}

#[test]
fn a_rank_is_served_once_and_by_the_next_process_when_it_is_left() {
    let scene = Scene::new(2);
    let arena = || scene.arenas[0].0.clone();
    let error = RankServer::start(&scene.config, 1, arena()).unwrap_err();
    assert!(error.to_string().contains("rank 1 of `job` is served by another process already"), "{error}");
    let error = RankServer::start(&scene.config, 2, arena()).unwrap_err();
    assert_eq!(error.to_string(), "`job` has no rank 2: its 2 ranks are counted from 0");

    let mut servers = scene.servers;
    servers.pop();
    let group = Group::open(&scene.config).unwrap();
    let error = group_error(group.sleep(&all()));
    assert!(error.to_string().contains("rank 1: it does not serve"), "{error}");
    let socket = scene.config.socket(1).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    let error = group_error(group.sleep(&all()));
    assert!(error.to_string().contains("rank 1: its process has ended"), "{error}");
    servers.push(RankServer::start(&scene.config, 1, scene.arenas[1].0.clone()).unwrap());
    group.sleep(&all()).unwrap();
}

#[test]
fn a_path_that_is_too_long_for_a_socket_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let deep = |bytes: usize| -> PathBuf {
        let name = "/job/rank-0.sock".len();
        folder.path().join("x".repeat(bytes - name - 1 - folder.path().as_os_str().len()))
    };
    let config = |bytes| GroupConfig::new("job", 1).unwrap().in_folder(deep(bytes));
    let arena = Arena::open(Config::on("host:64MiB".parse().unwrap())).unwrap();
    let error = RankServer::start(&config(108), 0, arena.clone()).unwrap_err();
    assert!(error.to_string().contains("a path of 108 bytes, and the system allows 107"), "{error}");
    assert!(matches!(Group::open(&config(108)), Err(RanksError::PathTooLong { .. })));
    let _server = RankServer::start(&config(107), 0, arena).unwrap();
    assert!(Group::open(&config(107)).unwrap().sleep(&all()).is_ok());
}
