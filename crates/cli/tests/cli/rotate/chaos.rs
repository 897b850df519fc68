//! Five models of which two fit, each with some of the lies that there are, told by chance, and clients that ask all of
//! them at once, as streams and not, of which some go away.
//!
//! `POORWILL_EFFORT` says how many requests, and `POORWILL_SEED` which lies and which requests. Threads have their own order each time, and engines their own chance, so a seed gives the same plan
//! and not the same run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use fastrand::Rng;
use poorwill_mock_engine::Lie;
use poorwill_testkit::effort::{Effort, SEED, seed_of_this_run};
use serde_json::Value;

use super::came::{Came, Reply, Request};
use super::watch::{Scales, Watch, assert_fit};
use super::world::{self, Model, World};

const NAMES: [&str; 5] = ["amber", "birch", "cedar", "dogwood", "elder"];
const PROMPTS: [&str; 3] = ["Tell me of a road.", "Tell me of a mill.", "Tell me of bread."];
/// Room for two that are awake, and what three that sleep have of their own.
const GPU: &str = "200MiB";
const FIT: usize = 2;
const CLIENTS: u64 = 8;
const LINES: &str = "[model.rules]\nwait_max = \"10s\"\ndrain_max = \"1s\"\nsleep_max = \"500ms\"\nrelease_max = \"500ms\"\n\
                     wake_max = \"500ms\"\ncanary_max = \"500ms\"\nstart_max = \"10s\"\nstop_max = \"3s\"\n\
                     turn_max = \"300ms\"\nlook_every = \"500ms\"\n[model.canary]\ntokens = 4\n";
/// Longer than a request may wait, and than it takes until an engine that hangs has to leave for somebody else.
const BOUND: Duration = Duration::from_secs(60);
/// Clocks are read before or behind what they tell of, by so many milliseconds at most.
const CLOCK: u128 = 20;

/// What came of the requests of a client.
#[derive(Debug, Default)]
struct Tally {
    right: u64,
    broken: u64,
    left: u64,
    refused: BTreeMap<(u16, String), u64>,
    /// Whose words came, when they were asked for, and when the first of them was there.
    answers: Vec<(usize, u128, u128)>,
}

impl Tally {
    fn take_in(&mut self, model: usize, reply: Reply) {
        if reply.is_answer {
            self.answers.push((model, reply.sent, reply.first));
        }
        match reply.came {
            Came::Right => self.right += 1,
            Came::Broken => self.broken += 1,
            Came::Left => self.left += 1,
            Came::Refused(status, code) => *self.refused.entry((status, code)).or_default() += 1,
        }
    }

    fn add(&mut self, other: Self) {
        (self.right, self.broken, self.left) =
            (self.right + other.right, self.broken + other.broken, self.left + other.left);
        other.refused.into_iter().for_each(|(what, times)| *self.refused.entry(what).or_default() += times);
        self.answers.extend(other.answers);
    }
}

struct Wild {
    world: World,
    truth: Vec<Vec<String>>,
    requests: u64,
    asked: AtomicU64,
    is_over: AtomicBool,
}

#[test]
fn whatever_engines_do_each_request_is_answered_right_or_told_why() {
    let requests = match Effort::of_this_run() {
        Effort::Quick => 100,
        Effort::Usual => 1000,
        Effort::Long => 10_000,
    };
    let seed = seed_of_this_run().unwrap_or(1);
    println!("{SEED}={seed}, {requests} requests");
    let mut chance = Rng::with_seed(seed);
    let world = world(&mut chance);
    let truth = NAMES.iter().map(|name| world.truth(name, &PROMPTS, world::TOKENS)).collect();
    let wild = Wild { world, truth, requests, asked: AtomicU64::new(0), is_over: AtomicBool::new(false) };
    let scales = Scales::of(&wild.world);
    let rotator = wild.world.start(&[]);
    let watch = Watch::of(&wild.world);
    let began = Instant::now();
    let (mut tally, mut wrong) = (Tally::default(), Vec::new());
    let visits = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|_| chance.fork()).map(|chance| scope.spawn(|| wild.client(chance))).collect();
        let visitor = scope.spawn(|| wild.visitor());
        for client in clients {
            match client.join() {
                Ok(Ok(of_it)) => tally.add(of_it),
                Ok(Err(error)) => wrong.push(error),
                Err(_) => wrong.push("a client panicked".to_owned()),
            }
        }
        wild.is_over.store(true, Ordering::Relaxed);
        visitor.join()
    });
    let took = began.elapsed();
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), rotator.log());
    let visits = visits.expect("the visitor panicked").unwrap();
    // How many were answered goes by how late engines are on this machine; but all of them still answer.
    for (model, name) in NAMES.iter().enumerate() {
        world::until(&rotator, &format!("{name} answers"), || {
            let reply = wild.ask(model, 0, false, None).unwrap_or_else(|error| panic!("{error}"));
            reply.came == Came::Right
        });
    }
    let log = rotator.end();
    wild.world.assert_empty();
    let told = watch.ended();

    let refused: u64 = tally.refused.values().sum();
    println!(
        "{requests} requests in {took:.1?}: {} right, {} broke off, {} left, {refused} refused: {:?}",
        tally.right, tally.broken, tally.left, tally.refused
    );
    println!("{}", counts(&told));
    let _complaint = Complaint(&log);
    assert_eq!(tally.right + tally.broken + tally.left + refused, requests);
    assert_tried(&told);
    let asked: Vec<_> = tally.answers.iter().chain(&visits.answers).copied().collect();
    assert_ready(&told, &asked);
    // One that keeps half of its memory goes unnoticed where another's death makes up for it; a third never fits.
    scales.assert_within(60..=164);
    assert_fit(&told, FIT);
}

/// Shows what the rotation said, if that is of interest.
struct Complaint<'a>(&'a str);

impl Drop for Complaint<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("the rotation said:\n{}", self.0);
        }
    }
}

/// Each lie is told by one of them at least.
fn world(chance: &mut Rng) -> World {
    let mut lies = Lie::ALL.map(Lie::name);
    chance.shuffle(&mut lies);
    let mut models = NAMES.map(Model::new).to_vec();
    for (nth, model) in models.iter_mut().enumerate() {
        model.more = vec!["--tokens-per-s", "1000"];
        model.lines = LINES.to_owned();
        model.is_moody = true;
        for (at, lie) in lies.into_iter().enumerate() {
            if at % NAMES.len() != nth && chance.u32(..6) != 0 {
                continue;
            }
            let is_often_asked = ["hangs-in-answer", "crashes-in-stream", "says-asleep"].contains(&lie);
            let percent = if is_often_asked { 1 + chance.u64(..4) } else { 8 + chance.u64(..20) };
            model.made.extend(["--lie".to_owned(), format!("{lie}=0.{percent:02}")]);
        }
        println!("{}: {}", model.name, model.made.join(" "));
    }
    World::new(GPU, models)
}

impl Wild {
    fn ask(
        &self,
        model: usize,
        prompt: usize,
        is_stream: bool,
        leaves: Option<Duration>,
    ) -> Result<Reply, String> {
        let (model_name, truth) = (NAMES[model], &self.truth[model][prompt]);
        let request = Request { model: model_name, prompt: PROMPTS[prompt], is_stream, leaves_after: leaves };
        request.ask(self.world.front, truth, BOUND)
    }

    /// Stays with a model for a while, as clients do, and goes to another then, or when it is refused.
    fn client(&self, mut chance: Rng) -> Result<Tally, String> {
        let mut tally = Tally::default();
        let mut model = chance.usize(..NAMES.len());
        while self.asked.fetch_add(1, Ordering::Relaxed) < self.requests {
            let leaves = (chance.u32(..10) == 0).then(|| Duration::from_millis(chance.u64(..400)));
            let (prompt, is_stream) = (chance.usize(..PROMPTS.len()), chance.bool());
            let reply = self.ask(model, prompt, is_stream, leaves).inspect_err(|_| {
                // Nobody has to go on.
                self.asked.store(self.requests, Ordering::Relaxed);
            })?;
            let is_refused = matches!(reply.came, Came::Refused(..));
            tally.take_in(model, reply);
            if is_refused {
                sleep(Duration::from_millis(50));
            }
            if is_refused || chance.bool() {
                model = chance.usize(..NAMES.len());
            }
        }
        Ok(tally)
    }

    /// Asks one model after the other and never stays for long, so that whoever hangs has to leave for somebody in the
    /// end.
    fn visitor(&self) -> Result<Tally, String> {
        let mut tally = Tally::default();
        for model in (0..NAMES.len()).cycle() {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            tally.take_in(model, self.ask(model, 0, true, Some(Duration::from_secs(1)))?);
            sleep(Duration::from_millis(300));
        }
        Ok(tally)
    }
}

fn counts(told: &[Value]) -> String {
    let mut counts = BTreeMap::from([("quarantined".to_owned(), 0), ("failed canary".to_owned(), 0)]);
    for event in told {
        let what = match event["event"].as_str().unwrap() {
            "ready" => format!("ready {}", event["swap"]["path"].as_str().unwrap()),
            "failed" => format!("failed {}", event["stage"].as_str().unwrap()),
            "stage" if event["stage"] == "starting" => "starts".to_owned(),
            "stage" | "learnt" => continue,
            other => other.to_owned(),
        };
        *counts.entry(what).or_default() += 1;
    }
    let counts: Vec<String> = counts.iter().map(|(what, times)| format!("{what}: {times}")).collect();
    counts.join(", ")
}

/// That nobody whose canary came out wrong is ready before another one was right.
fn assert_tried(told: &[Value]) {
    for model in NAMES {
        let mut is_wrong = false;
        for event in told.iter().filter(|event| event["model"] == model) {
            match (event["event"].as_str().unwrap(), event["stage"].as_str().unwrap_or_default()) {
                ("failed", "canary") => is_wrong = true,
                ("stage", "canary") => is_wrong = false,
                ("stage", "ready") => assert!(!is_wrong, "a wrong canary was forgotten: {event}"),
                _ => {}
            }
        }
    }
}

/// That each answer came from a model that was ready some time between the question and the first word.
fn assert_ready(told: &[Value], answers: &[(usize, u128, u128)]) {
    let ready = NAMES.map(|model| {
        let of_it = |event: &&Value| event["event"] == "stage" && event["model"] == model;
        let mut times: Vec<(u128, u128)> = Vec::new();
        for event in told.iter().filter(of_it) {
            let at = u128::from(event["at_unix_ms"].as_u64().unwrap());
            if event["stage"] == "ready" {
                times.push((at, u128::MAX));
            } else if let Some(last) = times.last_mut().filter(|last| last.1 == u128::MAX) {
                last.1 = at;
            }
        }
        times
    });
    for (model, sent, first) in answers {
        let times = &ready[*model];
        assert!(
            times.iter().any(|(from, to)| *from <= first + CLOCK && *to >= sent - CLOCK),
            "{} answered between {sent} and {first}, and was ready at {times:?}",
            NAMES[*model]
        );
    }
}
