//! Hot copies, and requests for another model that need their memory. No controller takes part: the test writes what one
//! would.

use poorwill_testkit::etcd::Servers;
use serde_json::json;

use super::parts::{Fleet, until};
use crate::rotate::fixture::{self, text_of};

const PROMPT: &str = "Tell me of a harbour.";

/// Row: a node dies.
#[test]
fn a_hot_copy_gives_way_to_a_request_where_no_operator_pinned_it() {
    let Some(etcd) = Servers::one() else { return };
    // Two of three models fit.
    let fleet = Fleet::with(etcd, 1, 2, 3, "200MiB").unwrap();
    let put = |key: &str, record: serde_json::Value| {
        fleet.etcd.put(&format!("/poorwill/test/{key}"), &record.to_string());
    };
    let place = |model: &str, node: &str, goal: &str, is_pinned: bool| {
        let record =
            json!({ "format": 1, "fence": 1, "goal": goal, "changed_at_ms": 0, "pinned": is_pinned });
        put(&format!("placements/{model}/{node}"), record);
    };
    let truth = fleet.truth(&[PROMPT]);
    place("cedar", "node0", "hot", false);
    place("cedar", "node1", "warm", false);
    ["amber", "birch"].iter().for_each(|model| place(model, "node1", "hot", true));
    let nodes = fleet.start();
    let router = fleet.route(0, &["--only", "front"]);
    let node = &fleet.nodes[1];
    let is_pinned = |model: &str| node.now(model)["is_pinned"] == true;
    for model in ["amber", "birch"] {
        fixture::until(&nodes[1], "it is awake and pinned", || {
            node.now(model)["stage"] == "ready" && is_pinned(model)
        });
    }
    assert_eq!(fleet.say(0, "cedar", PROMPT), truth[2][0], "{}", router.log());

    let mut nodes = nodes.into_iter();
    nodes.next().unwrap().kill();
    let rest = nodes.next().unwrap();
    // The living node says what is with it, and not that the dead one cannot be reached.
    let refused = fleet.ask(0, "cedar", PROMPT).unwrap();
    assert_eq!(refused.status, 503, "{refused:?}\n{}", rest.log());
    assert!(refused.body.contains("no_room"), "{refused:?}\n{}", router.log());
    assert!(["amber", "birch"].iter().all(|model| node.now(model)["stage"] == "ready"));

    place("birch", "node1", "hot", false);
    fixture::until(&rest, "one is pinned", || is_pinned("amber") && !is_pinned("birch"));
    // The pause behind the refusal ends.
    until("it is served", || {
        let answer = fleet.ask(0, "cedar", PROMPT).unwrap();
        answer.status == 200 && text_of(&answer) == truth[2][0]
    });
    assert_eq!(
        (&node.now("amber")["stage"], &node.now("birch")["is_ready"]),
        (&json!("ready"), &json!(false))
    );
    // A pin of a copy that gave way brings it back.
    place("birch", "node1", "hot", true);
    fixture::until(&rest, "it is awake and pinned", || {
        node.now("birch")["stage"] == "ready" && is_pinned("birch")
    });
    assert_eq!(node.now("amber")["stage"], "ready");
    assert!(!rest.log().contains("quarantined"), "{}", rest.log());
    router.end();
    rest.end();
}
