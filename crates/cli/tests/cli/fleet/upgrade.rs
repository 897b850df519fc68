//! All parts of a fleet are replaced one by one, as by an upgrade, and no client notices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::PROMPT;
use super::parts::{Fleet, until};
use crate::rotate::fixture::{Rotator, text_of};

#[test]
#[ignore = "long: every process is replaced, one by one"]
fn no_request_is_lost_while_every_part_is_replaced() {
    let Some(fleet) = Fleet::of(2, 2) else { return };
    let truth = fleet.truth(&[PROMPT]);
    let mut nodes = fleet.start();
    let mut routers: Vec<Rotator> = (0..2).map(|nth| fleet.route(nth, &[])).collect();
    for model in fleet.models() {
        fleet.say(0, model, PROMPT);
    }
    let is_over = AtomicBool::new(false);
    let (right, logs) = thread::scope(|scope| {
        let client = |of: usize| {
            let (fleet, truth, is_over) = (&fleet, &truth, &is_over);
            move || {
                let mut right = 0;
                while !is_over.load(Ordering::Relaxed) {
                    // As a load balancer does: to the other router where none listens.
                    let answers = [of % 2, 1 - of % 2]
                        .map(|router| move || fleet.ask(router, fleet.models()[of], PROMPT));
                    let answer = answers.into_iter().find_map(|ask| ask().ok());
                    let answer = answer.ok_or("no router was there")?;
                    // A stalled machine loses its leases, and says so.
                    if answer.status == 503 && answer.body.contains("not_placed") {
                        continue;
                    }
                    if answer.status != 200 || text_of(&answer) != truth[of][0] {
                        return Err(format!("{answer:?}"));
                    }
                    right += 1;
                }
                Ok(right)
            }
        };
        let clients: Vec<_> = (0..fleet.models().len()).map(|of| scope.spawn(client(of))).collect();
        for at in 0..nodes.len() {
            let name = format!("node{at}");
            fleet.order(&["drain", &name, "--why", "a newer version"]).succeeded();
            let is_on_it = |copy: &&serde_json::Value| copy["node"] == *name;
            let is_empty = || {
                let copies = fleet.status()["models"].as_array().unwrap().clone();
                copies.iter().filter(is_on_it).all(|copy| copy["goal"] == "none")
            };
            until("it is empty", || {
                is_empty() && fleet.models().iter().all(|model| fleet.nodes[at].now(model)["running"] == 0)
            });
            let old = nodes.remove(at);
            old.end();
            until("it has left", || !fleet.has_node(&name));
            nodes.insert(at, fleet.nodes[at].start(&[]));
            fleet.order(&["drain", &name, "--off"]).succeeded();
            until("it has its models again", || {
                fleet.models().iter().all(|model| fleet.is_ready(model, &name))
            });
        }
        for at in 0..routers.len() {
            routers.remove(at).end();
            routers.insert(at, fleet.route(at, &[]));
        }
        is_over.store(true, Ordering::Relaxed);
        let right: Vec<Result<u64, String>> =
            clients.into_iter().map(|client| client.join().unwrap()).collect();
        let logs: Vec<String> = nodes.iter().chain(&routers).map(Rotator::log).collect();
        (right, logs.join("\n--- the next\n"))
    });
    for right in right {
        assert!(right.unwrap_or_else(|error| panic!("{error}\n{logs}")) > 0);
    }
    routers.into_iter().chain(nodes).for_each(|part| drop(part.end()));
}
