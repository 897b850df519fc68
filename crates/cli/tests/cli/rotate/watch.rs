//! What a rotation tells of itself, followed from its beginning to its end, and what its engines hold meanwhile, by the
//! system's word.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::fixture::{self, Fixture, Rotator, until};
use super::http;

/// What follows the events of a rotation.
pub(crate) struct Watch {
    events: Arc<Mutex<Vec<Value>>>,
    follower: JoinHandle<()>,
}

impl Watch {
    /// From the first event on. The rotation has to be there.
    pub(crate) fn of(fixture: &Fixture) -> Self {
        let stream = http::send(fixture.control, "GET", "/rotate/events?past=1000", &[], "").unwrap();
        let events: Arc<Mutex<Vec<Value>>> = Arc::default();
        let kept = Arc::clone(&events);
        let follower = thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let Some(event) = line.strip_prefix("data: ") else { continue };
                // When the rotation is killed it breaks off, amid an event or not.
                let Ok(event) = serde_json::from_str(event) else { break };
                kept.lock().unwrap().push(event);
            }
        });
        Self { events, follower }
    }

    /// The last reported stage of a model.
    pub(crate) fn stage(&self, model: &str) -> String {
        last_stage(&self.events.lock().unwrap(), model)
    }

    /// Number of reported events.
    pub(crate) fn len(&self) -> usize {
        self.events.lock().unwrap().len()
    }

    /// Waits until a model is in a stage, and says whether it was found there. It was not if it went by too fast, behind
    /// so many events.
    pub(crate) fn sees(&self, rotator: &Rotator, behind: usize, model: &str, stage: &str) -> bool {
        let is_it =
            |event: &Value| event["event"] == "stage" && event["model"] == model && event["stage"] == stage;
        until(rotator, &format!("{model} is {stage}"), || {
            self.events.lock().unwrap()[behind..].iter().any(is_it)
        });
        self.stage(model) == stage
    }

    /// All events, after the rotation has ended. Only those before the first follower are missing.
    pub(crate) fn ended(self) -> Vec<Value> {
        self.follower.join().unwrap();
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        let first = events.first().map_or(1, |event| event["seq"].as_u64().unwrap());
        for (seq, event) in (first..).zip(&events) {
            assert_eq!(event["seq"], seq, "events were lost");
        }
        events
    }
}

/// The stage that a model was in by the last of these events.
pub(crate) fn last_stage(events: &[Value], model: &str) -> String {
    let of_it = |event: &&Value| event["model"] == model && event["event"] == "stage";
    let last = events.iter().rev().find(of_it);
    last.map_or("unknown", |event| event["stage"].as_str().unwrap()).to_owned()
}

/// At most so many models were awake at a time. A model counts from its wake or start, or from its discovery,
/// until a measured sleep or the end of its engine. A crash is reported a moment after its memory is free: a
/// model whose next event is its crash does not count.
pub(crate) fn assert_fit(events: &[Value], most: usize) {
    let mut awake = BTreeSet::new();
    for (at, event) in events.iter().enumerate().filter(|(_, event)| event["event"] == "stage") {
        let model = event["model"].as_str().unwrap();
        match event["stage"].as_str().unwrap() {
            "waking" | "starting" | "measuring" | "ready" => awake.insert(model),
            "asleep" | "cold" | "unknown" | "stopping" | "quarantined" => awake.remove(model),
            _ => false,
        };
        if awake.len() > most {
            let is_there = |model: &&&str| !is_dead(&events[at + 1..], model);
            let there: Vec<&&str> = awake.iter().filter(is_there).collect();
            let around = &events[at.saturating_sub(20)..events.len().min(at + 20)];
            let around: Vec<String> = around.iter().map(Value::to_string).collect();
            let around = around.join("\n");
            assert!(there.len() <= most, "{there:?} are awake, by {event}, amid:\n{around}");
        }
    }
}

/// Whether the next event of a model, besides the end of requests, is the loss of its engine.
fn is_dead(after: &[Value], model: &str) -> bool {
    let mut next = after.iter().filter(|event| event["model"] == model && event["stage"] != "draining");
    next.next().is_some_and(|event| {
        event["reason"].as_str().is_some_and(|reason| reason.contains("the engine is gone"))
    })
}

/// Longest time between two looks at the memory, so that no model can sleep and wake between them.
const LOOK_MAX: Duration = Duration::from_millis(30);

/// Measures the engines of a fixture repeatedly.
pub(crate) struct Scales {
    is_over: Arc<AtomicBool>,
    measuring: JoinHandle<Weighed>,
}

/// The most that was held at one time: by whom, how much, and when, in milliseconds since 1970.
#[derive(Debug, Default)]
struct Weighed {
    all: u64,
    each: BTreeMap<String, u64>,
    at: u128,
}

impl Scales {
    pub(crate) fn of(fixture: &Fixture) -> Self {
        let is_over: Arc<AtomicBool> = Arc::default();
        let state = fixture.folder.join("state");
        let over = Arc::clone(&is_over);
        let measuring = thread::spawn(move || {
            let mut most = Weighed::default();
            while !over.load(Ordering::Relaxed) {
                let began = Instant::now();
                let (first, second) = (weighed(&state), weighed(&state));
                if began.elapsed() < LOOK_MAX {
                    // Another process is another engine.
                    let both = |(file, (pid, mib)): (&String, &(u32, u64))| {
                        let (_, other) = second.get(file).filter(|(other, _)| other == pid)?;
                        Some((file.clone(), *other.min(mib)))
                    };
                    let each: BTreeMap<String, u64> = first.iter().filter_map(both).collect();
                    let all = each.values().sum();
                    if all > most.all {
                        most = Weighed { all, each, at: now() };
                    }
                }
                sleep(Duration::from_millis(5));
            }
            most
        });
        Self { is_over, measuring }
    }

    /// That at least so many MiB and at most so many were held at one time.
    pub(crate) fn assert_within(self, mib: RangeInclusive<u64>) {
        self.is_over.store(true, Ordering::Relaxed);
        let most = self.measuring.join().unwrap();
        let Weighed { all, each, at } = most;
        assert!(mib.contains(&all), "{all} MiB were held at {at}, and not {mib:?}: {each:?}");
    }
}

pub(crate) fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()
}

/// What the engines that are written down hold, beside what their program has: the process of each, and MiB.
fn weighed(state: &Path) -> BTreeMap<String, (u32, u64)> {
    let entries = fs::read_dir(state).into_iter().flatten().filter_map(Result::ok);
    let engines = entries.filter_map(|entry| {
        // Others are on their way to be one.
        let name = entry.file_name().to_str()?.strip_suffix(".json")?.to_owned();
        Some((name, fixture::engine_of(&entry.path())?))
    });
    engines.map(|(name, pid)| (name, (pid, held_mib(pid)))).collect()
}

/// Nothing for one that has ended.
fn held_mib(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib =
        |line: &str| line.strip_prefix("RssShmem:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    text.lines().find_map(kib).unwrap_or_default() / 1024
}
