//! Parts of a fleet are killed, stopped and cut off while clients send requests to two routers.
//!
//! `POORWILL_EFFORT` sets how often. Each client gets the right answer, an error in words, an answer that is visibly not
//! complete, or no answer of a router that was killed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::Duration;

use fastrand::Rng;
use poorwill_testkit::effort::{Effort, SEED, seed_of_this_run};
use poorwill_testkit::etcd::Servers;
use poorwill_testkit::proxy::Proxy;
use serde_json::json;

use super::parts::{Fleet, LEASE, tables};
use crate::rotate::fixture::{Rotator, TOKENS};
use crate::rotate::http;
use crate::rotate::received::{Received, judged, read};

const PROMPTS: [&str; 2] = ["Tell me of a bridge.", "Tell me of a barn."];
const NODES: usize = 3;
const ROUTERS: usize = 2;
/// Longer than any part stays away, with an election and the start of an engine behind it.
const BOUND: Duration = Duration::from_secs(120);
const BEYOND_LEASE: Duration = Duration::from_millis(LEASE * 1000 + 500);
const PAUSE: Duration = Duration::from_millis(400);

/// What happens to the fleet.
#[derive(Debug, Clone, Copy)]
enum Mishap {
    NodeKilled,
    NodeStopped,
    NodeCutOff,
    NodeEnds,
    RouterKilled,
    RouterStopped,
    /// The leader of its members, as in the next two.
    EtcdKilled,
    EtcdStopped,
    /// From the other members. Clients reach it.
    EtcdIsolated,
}

/// The last one needs more than one member.
const ALL: [Mishap; 9] = [
    Mishap::NodeKilled,
    Mishap::RouterStopped,
    Mishap::EtcdKilled,
    Mishap::NodeStopped,
    Mishap::RouterKilled,
    Mishap::NodeCutOff,
    Mishap::EtcdStopped,
    Mishap::NodeEnds,
    Mishap::EtcdIsolated,
];

#[derive(Debug, Default)]
struct Tally {
    right: u64,
    broken: u64,
    /// No answer came: its router was killed.
    unanswered: u64,
    refused: BTreeMap<(u16, String), u64>,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.right += other.right;
        self.broken += other.broken;
        self.unanswered += other.unanswered;
        other.refused.into_iter().for_each(|(what, times)| *self.refused.entry(what).or_default() += times);
    }
}

/// Row: a node dies or is stopped.
#[test]
#[ignore = "long: many faults in real processes"]
fn clients_get_right_answers_or_words_whatever_part_fails() {
    let (mishaps, clients, members) = match Effort::of_this_run() {
        Effort::Quick => (4, 4, 1),
        Effort::Usual => (18, 6, 3),
        Effort::Long => (180, 16, 3),
    };
    let Some(etcd) = Servers::start(members, &[]) else { return };
    let kinds = if members > 1 { &ALL[..] } else { &ALL[..ALL.len() - 1] };
    let seed = seed_of_this_run().unwrap_or(1);
    println!("{SEED}={seed}, {mishaps} mishaps");
    let mut chance = Rng::with_seed(seed);
    // Two of three models fit on a node.
    let mut fleet = Fleet::with(etcd, ROUTERS, NODES, 3, "200MiB").unwrap();
    let to_all = || (0..members).map(|member| Proxy::to(fleet.etcd.port(member))).collect();
    let proxies: Vec<Vec<Proxy>> = (0..NODES).map(|_| to_all()).collect();
    for (nth, proxies) in proxies.iter().enumerate() {
        fleet.nodes[nth].models.iter_mut().for_each(|model| model.more = vec!["--tokens-per-s", "2000"]);
        fleet.nodes[nth].tables =
            tables(&format!("node{nth}"), &proxies.iter().map(Proxy::url).collect::<Vec<_>>());
    }
    let truth = fleet.truth(&PROMPTS);
    let mut nodes: Vec<Option<Rotator>> = fleet.start().into_iter().map(Some).collect();
    let mut routers: Vec<Option<Rotator>> = (0..ROUTERS).map(|nth| Some(fleet.route(nth, &[]))).collect();
    for model in fleet.models() {
        fleet.say(0, model, PROMPTS[0]);
    }
    let (is_over, was_killed) = (AtomicBool::new(false), AtomicBool::new(false));
    let (ports, models) = (fleet.routers.clone(), fleet.models().to_vec());
    let outcome = thread::scope(|scope| {
        let client = |mut chance: Rng| {
            let (truth, is_over, was_killed, ports, models) =
                (&truth, &is_over, &was_killed, &ports, &models);
            move || {
                let mut tally = Tally::default();
                while !is_over.load(Ordering::Relaxed) {
                    let (model, prompt) = (chance.usize(..models.len()), chance.usize(..PROMPTS.len()));
                    let (router, is_stream) = (chance.usize(..ROUTERS), chance.bool());
                    let truth = &truth[model][prompt];
                    let got = ask(ports[router], models[model], PROMPTS[prompt], is_stream, truth);
                    match got.map_err(|error| format!("{} by router {router}: {error}", models[model]))? {
                        Some(Received::Right) => tally.right += 1,
                        Some(Received::Broken | Received::Left) => tally.broken += 1,
                        Some(Received::Refused(status, code)) => {
                            *tally.refused.entry((status, code)).or_default() += 1;
                            sleep(Duration::from_millis(20));
                        }
                        None if was_killed.load(Ordering::Relaxed) => {
                            tally.unanswered += 1;
                            sleep(Duration::from_millis(20));
                        }
                        None => return Err("no router was killed, and one did not answer".to_owned()),
                    }
                }
                Ok(tally)
            }
        };
        let clients: Vec<_> = (0..clients).map(|_| scope.spawn(client(chance.fork()))).collect();
        for nth in 0..mishaps {
            let mishap = kinds[nth % kinds.len()];
            println!("{mishap:?}");
            let (node, router) = (chance.usize(..NODES), chance.usize(..ROUTERS));
            match mishap {
                Mishap::NodeKilled => {
                    let killed = nodes[node].take().unwrap();
                    assert_ordered(&killed);
                    let engines = fleet.engines_that_are_up(node);
                    killed.kill();
                    sleep(if chance.bool() { BEYOND_LEASE } else { PAUSE });
                    let started = fleet.nodes[node].start(&[]);
                    for (model, engine) in engines {
                        assert_eq!(
                            fleet.nodes[node].engine(model),
                            Some(engine),
                            "{model}: {}",
                            started.log()
                        );
                    }
                    nodes[node] = Some(started);
                }
                Mishap::NodeStopped => stopped(nodes[node].as_ref().unwrap()),
                Mishap::NodeCutOff => {
                    proxies[node].iter().for_each(Proxy::hold);
                    sleep(BEYOND_LEASE);
                    proxies[node].iter().for_each(Proxy::go_on);
                }
                Mishap::NodeEnds => {
                    let ended = nodes[node].take().unwrap();
                    assert_ordered(&ended);
                    ended.end();
                    nodes[node] = Some(fleet.nodes[node].start(&[]));
                }
                Mishap::RouterKilled => {
                    was_killed.store(true, Ordering::Relaxed);
                    routers[router].take().unwrap().kill();
                    sleep(PAUSE);
                    routers[router] = Some(fleet.route(router, &[]));
                }
                Mishap::RouterStopped => stopped(routers[router].as_ref().unwrap()),
                Mishap::EtcdKilled => {
                    let leader = fleet.etcd.leader();
                    fleet.etcd.kill(leader);
                    sleep(PAUSE);
                    fleet.etcd.restart(leader);
                }
                Mishap::EtcdStopped => {
                    let leader = fleet.etcd.leader();
                    fleet.etcd.hold(leader);
                    sleep(BEYOND_LEASE);
                    fleet.etcd.go_on(leader);
                }
                Mishap::EtcdIsolated => {
                    let leader = fleet.etcd.leader();
                    fleet.etcd.isolate(leader);
                    sleep(BEYOND_LEASE);
                    fleet.etcd.rejoin();
                }
            }
            sleep(PAUSE);
            if clients.iter().any(thread::ScopedJoinHandle::is_finished) {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().expect("a client panicked")).collect::<Vec<_>>()
    });
    let logs = || {
        let all = nodes.iter().chain(&routers).flatten().map(Rotator::log);
        all.collect::<Vec<_>>().join("\n--- the next\n")
    };
    let mut tally = Tally::default();
    for of_client in outcome {
        tally.add(of_client.unwrap_or_else(|error| panic!("{error}\n{}", logs())));
    }
    for router in 0..ROUTERS {
        for (model, truth) in fleet.models().iter().zip(&truth) {
            assert_eq!(fleet.say(router, model, PROMPTS[0]), truth[0], "{}", logs());
        }
    }
    nodes.iter().flatten().for_each(assert_ordered);
    println!("{tally:?}");
    assert!(tally.right > 0);
    routers.into_iter().flatten().for_each(|router| drop(router.end()));
    nodes.into_iter().flatten().for_each(|node| drop(node.end()));
}

/// Stands still for longer than its lease lasts.
fn stopped(process: &Rotator) {
    process.signal("STOP");
    sleep(BEYOND_LEASE);
    process.signal("CONT");
}

/// A node lets a model go only while the last goal that it read is `none`.
fn assert_ordered(node: &Rotator) {
    let log = node.log();
    let mut goals = BTreeMap::new();
    let model_of =
        |line: &str| line.split("model=").nth(1).and_then(|rest| rest.split(' ').next().map(str::to_owned));
    for line in log.lines() {
        if line.contains("a model has a new goal") {
            goals.insert(model_of(line), line.contains("goal=none"));
        } else if line.contains("lets a model go") {
            assert_eq!(goals.get(&model_of(line)), Some(&true), "{line}: no order was in force\n{log}");
        }
    }
}

/// What came; `None` if the router was not there, or broke off before the head of an answer.
fn ask(
    port: u16,
    model: &str,
    prompt: &str,
    is_stream: bool,
    truth: &str,
) -> Result<Option<Received>, String> {
    let body = json!({
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": is_stream,
    });
    let Ok(mut stream) = http::send(port, "POST", "/v1/completions", &[], &body.to_string()) else {
        return Ok(None);
    };
    let (bytes, _, is_over) = read(&mut stream, BOUND);
    let text = String::from_utf8_lossy(&bytes);
    if !is_over {
        return Err(format!("it hangs for {BOUND:?}; it was {text:?}"));
    }
    if !text.contains("\r\n\r\n") {
        return Ok(None);
    }
    judged(&bytes, is_stream, truth)
        .map(Some)
        .map_err(|error| format!("{error}; {truth:?} is right; it was {text:?}"))
}
