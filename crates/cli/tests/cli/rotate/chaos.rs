//! Five models, two of which fit, with random faults. Clients send requests to all of them at once, with and
//! without streaming, and some disconnect.
//!
//! `POORWILL_EFFORT` sets the number of requests, and `POORWILL_SEED` the faults and requests. The order of
//! threads and the engines' own random numbers vary, so a seed repeats the plan and not the run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use fastrand::Rng;
use poorwill_mock_engine::Fault;
use poorwill_testkit::effort::{Effort, SEED, seed_of_this_run};
use serde_json::Value;

use super::fixture::{self, Fixture, Model};
use super::received::{Received, Reply, Request};
use super::watch::{Scales, Watch, assert_fit};

const NAMES: [&str; 5] = ["amber", "birch", "cedar", "dogwood", "elder"];
const PROMPTS: [&str; 3] = ["Tell me of a road.", "Tell me of a mill.", "Tell me of bread."];
/// BackupBuffer for two that are awake, and what three that sleep have of their own.
const GPU: &str = "200MiB";
const FIT: usize = 2;
const CLIENTS: u64 = 8;
const LINES: &str = "[model.rules]\nwait_max = \"10s\"\ndrain_max = \"1s\"\nsleep_max = \"500ms\"\nrelease_max = \"500ms\"\n\
                     wake_max = \"500ms\"\ncanary_max = \"500ms\"\nstart_max = \"10s\"\nstop_max = \"3s\"\n\
                     turn_max = \"300ms\"\nlook_every = \"500ms\"\n[model.canary]\ntokens = 4\n";
/// Longer than a request may wait for its model. An engine that hangs in an answer may stay longer: it leaves when others
/// need its memory, and an idle one leaves before it.
const BOUND: Duration = Duration::from_secs(60);
/// Longer than an engine needs to start.
const LEFT_AFTER: Duration = Duration::from_secs(5);
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
            Received::Right => self.right += 1,
            Received::Broken => self.broken += 1,
            Received::Left => self.left += 1,
            Received::Refused(status, code) => *self.refused.entry((status, code)).or_default() += 1,
        }
    }

    fn add(&mut self, other: Self) {
        (self.right, self.broken, self.left) =
            (self.right + other.right, self.broken + other.broken, self.left + other.left);
        other.refused.into_iter().for_each(|(what, times)| *self.refused.entry(what).or_default() += times);
        self.answers.extend(other.answers);
    }
}

struct Chaos {
    fixture: Fixture,
    truth: Vec<Vec<String>>,
    requests: u64,
    asked: AtomicU64,
    is_over: AtomicBool,
}

#[test]
#[ignore = "long: many faults in real processes"]
fn every_request_gets_the_right_answer_or_an_error() {
    let requests = match Effort::of_this_run() {
        Effort::Quick => 100,
        Effort::Usual => 1000,
        Effort::Long => 10_000,
    };
    let seed = seed_of_this_run().unwrap_or(1);
    println!("{SEED}={seed}, {requests} requests");
    let mut chance = Rng::with_seed(seed);
    let fixture = fixture(&mut chance);
    let truth = NAMES.iter().map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS)).collect();
    let chaos = Chaos { fixture, truth, requests, asked: AtomicU64::new(0), is_over: AtomicBool::new(false) };
    let scales = Scales::of(&chaos.fixture);
    let rotator = chaos.fixture.start(&[]);
    let watch = Watch::of(&chaos.fixture);
    let began = Instant::now();
    let (mut tally, mut wrong) = (Tally::default(), Vec::new());
    let visits = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|_| chance.fork()).map(|chance| scope.spawn(|| chaos.client(chance))).collect();
        let visitor = scope.spawn(|| chaos.visitor());
        for client in clients {
            match client.join() {
                Ok(Ok(of_it)) => tally.add(of_it),
                Ok(Err(error)) => wrong.push(error),
                Err(_) => wrong.push("a client panicked".to_owned()),
            }
        }
        chaos.is_over.store(true, Ordering::Relaxed);
        visitor.join()
    });
    let took = began.elapsed();
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), rotator.log());
    let visits = visits.expect("the visitor panicked").unwrap();
    // How many were answered goes by how late engines are on this machine; but all of them still answer. Without other
    // clients no turn ends, so a request that hangs is left, and another comes.
    for (model, name) in NAMES.iter().enumerate() {
        fixture::until(&rotator, &format!("{name} answers"), || {
            let reply =
                chaos.ask(model, 0, false, Some(LEFT_AFTER)).unwrap_or_else(|error| panic!("{error}"));
            reply.came == Received::Right
        });
    }
    let log = rotator.end();
    chaos.fixture.assert_empty();
    let events = watch.ended();

    let refused: u64 = tally.refused.values().sum();
    println!(
        "{requests} requests in {took:.1?}: {} right, {} broke off, {} left, {refused} refused: {:?}",
        tally.right, tally.broken, tally.left, tally.refused
    );
    println!("{}", counts(&events));
    let _complaint = Complaint(&log);
    assert_eq!(tally.right + tally.broken + tally.left + refused, requests);
    assert_tried(&events);
    let asked: Vec<_> = tally.answers.iter().chain(&visits.answers).copied().collect();
    assert_ready(&events, &asked);
    // One that keeps half of its memory goes unnoticed where another's death makes up for it; a third never fits.
    scales.assert_within(60..=164);
    assert_fit(&events, FIT);
}

/// Prints the log of the rotation after a failure.
struct Complaint<'a>(&'a str);

impl Drop for Complaint<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("output of the rotation:\n{}", self.0);
        }
    }
}

/// Each fault is injected by at least one of them.
fn fixture(chance: &mut Rng) -> Fixture {
    // An engine that is not healthy answers errors of its own. One whose health hangs never comes up.
    let others = [Fault::Unhealthy, Fault::HangsInHealth];
    let faults = Fault::ALL.into_iter().filter(|fault| !others.contains(fault));
    let mut faults: Vec<&'static str> = faults.map(Fault::name).collect();
    chance.shuffle(&mut faults);
    let mut models = NAMES.map(Model::new).to_vec();
    for (nth, model) in models.iter_mut().enumerate() {
        model.more = vec!["--tokens-per-s", "1000"];
        model.lines = LINES.to_owned();
        model.is_moody = true;
        for (at, fault) in faults.iter().copied().enumerate() {
            if at % NAMES.len() != nth && chance.u32(..6) != 0 {
                continue;
            }
            let is_often_asked = ["hangs-in-answer", "crashes-in-stream", "says-asleep"].contains(&fault);
            let percent = if is_often_asked { 1 + chance.u64(..4) } else { 8 + chance.u64(..20) };
            model.made.extend(["--fault".to_owned(), format!("{fault}=0.{percent:02}")]);
        }
        println!("{}: {}", model.name, model.made.join(" "));
    }
    Fixture::new(GPU, models)
}

impl Chaos {
    fn ask(
        &self,
        model: usize,
        prompt: usize,
        is_stream: bool,
        leaves: Option<Duration>,
    ) -> Result<Reply, String> {
        let (model_name, truth) = (NAMES[model], &self.truth[model][prompt]);
        let request = Request { model: model_name, prompt: PROMPTS[prompt], is_stream, leaves_after: leaves };
        let engine = &self.fixture.models[model];
        request.ask(self.fixture.front, truth, BOUND, || engine.has_injected("hangs-in-answer"))
    }

    /// Stays with a model for a while, as clients do, and goes to another then, or when it is refused.
    fn client(&self, mut chance: Rng) -> Result<Tally, String> {
        let mut tally = Tally::default();
        let mut model = chance.usize(..NAMES.len());
        while self.asked.fetch_add(1, Ordering::Relaxed) < self.requests {
            let leaves = (chance.u32(..10) == 0).then(|| Duration::from_millis(chance.u64(..400)));
            let (prompt, is_stream) = (chance.usize(..PROMPTS.len()), chance.bool());
            let reply = self.ask(model, prompt, is_stream, leaves).inspect_err(|_| {
                // No client has to go on.
                self.asked.store(self.requests, Ordering::Relaxed);
            })?;
            let is_refused = matches!(reply.came, Received::Refused(..));
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

    /// Asks one model after the other and never stays for long.
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

fn counts(events: &[Value]) -> String {
    let mut counts = BTreeMap::from([("quarantined".to_owned(), 0), ("failed canary".to_owned(), 0)]);
    for event in events {
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

/// No model becomes ready after a wrong canary without a right one.
fn assert_tried(events: &[Value]) {
    for model in NAMES {
        let mut is_wrong = false;
        for event in events.iter().filter(|event| event["model"] == model) {
            match (event["event"].as_str().unwrap(), event["stage"].as_str().unwrap_or_default()) {
                ("failed", "canary") => is_wrong = true,
                ("stage", "canary") => is_wrong = false,
                ("stage", "ready") => assert!(!is_wrong, "a wrong canary was forgotten: {event}"),
                _ => {}
            }
        }
    }
}

/// Each answer came from a model that was ready between the request and the first word.
fn assert_ready(events: &[Value], answers: &[(usize, u128, u128)]) {
    let ready = NAMES.map(|model| {
        let of_it = |event: &&Value| event["event"] == "stage" && event["model"] == model;
        let mut times: Vec<(u128, u128)> = Vec::new();
        for event in events.iter().filter(of_it) {
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
