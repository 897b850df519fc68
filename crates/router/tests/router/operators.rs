//! A router's operators' listener over a real etcd: what it shows, which wishes it writes, and whom it refuses.

use std::net::SocketAddr;
use std::time::Duration;

use poorwill_fleet::etcd::{Etcd, Limits, Txn};
use poorwill_fleet::keys::Key;
use poorwill_fleet::records::{GpuRecord, ModelRecord, NodeRecord, Record, Stage, write};
use poorwill_router::{RouterConfig, RouterRunning, begin};
use poorwill_testkit::etcd::Servers;
use serde_json::{Value, json};

use super::client::{Answer, Metrics, STUCK, ask};

/// A router at an etcd, with a controller or without.
struct Fixture {
    etcd: Etcd,
    running: RouterRunning,
    control: SocketAddr,
}

impl Fixture {
    async fn start(etcd: &[String], lines: &str, controls: bool) -> Self {
        let text = format!(
            "[fleet]\nname = \"t\"\netcd = {etcd:?}\nlease = \"5s\"\n[front]\nlisten = \"127.0.0.1:0\"\n\
             [control]\nlisten = \"127.0.0.1:0\"\n{lines}"
        );
        let config = RouterConfig::parse(&text, &|_| Ok("key".to_owned())).unwrap();
        let running = begin(&config, true, controls).await.unwrap();
        let etcd = Etcd::new(etcd, Limits::default()).unwrap();
        Self { etcd, control: running.control().unwrap(), running }
    }

    async fn ask(&self, what: &str, body: &str) -> Answer {
        ask(self.control, what, "", body).await
    }

    async fn status(&self) -> Value {
        let answer = self.ask("GET /fleet/status", "").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// The status, once it is so.
    async fn status_when(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let wait = async {
            loop {
                last = self.status().await;
                if is_so(&last) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = tokio::time::timeout(STUCK, wait).await;
        assert!(waited.is_ok(), "it is never so: {what}\n{last:#}");
        last
    }

    async fn put<T: Record>(&self, key: Key, record: &T) {
        let text = write(&key, record).unwrap();
        self.etcd.commit(&Txn::new().put(&key.in_fleet(&"t".parse().unwrap()), &text, None)).await.unwrap();
    }

    /// A node of one GPU, with these models asleep.
    async fn put_node(&self, name: &str, models: &[&str]) {
        let node: poorwill_fleet::name::NodeName = name.parse().unwrap();
        let record = NodeRecord {
            front_url: format!("http://{name}.invalid:8080"),
            control_url: format!("http://{name}.invalid:8081"),
            gpus: vec![GpuRecord { total_bytes: 100, budget_bytes: 90 }],
            ..NodeRecord::new("5f0c")
        };
        for model in models {
            let record =
                ModelRecord { need_bytes: Some(vec![40]), ..ModelRecord::new(Stage::Asleep, vec![0]) };
            self.put(Key::Model { node: node.clone(), model: model.parse().unwrap() }, &record).await;
        }
        self.put(Key::Node(node), &record).await;
    }
}

/// What is wanted of a model on a node.
fn goal<'v>(status: &'v Value, model: &str, node: &str) -> &'v Value {
    let copies = status["models"].as_array().unwrap();
    let copy = copies.iter().find(|copy| copy["model"] == model && copy["node"] == node);
    copy.map_or(&Value::Null, |copy| &copy["goal"])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_fleet_has_and_why_is_shown() {
    let Some(servers) = Servers::one() else { return };
    let fleet = Fixture::start(&servers.urls(), "", true).await;
    let first = fleet.status_when("etcd was read", |status| status["revision"] != 0).await;
    assert_eq!((&first["fleet"], &first["nodes"]), (&json!("t"), &json!([])));
    assert_eq!(fleet.ask("GET /fleet/ready", "").await.status, 200);
    fleet.put_node("n1", &["org/a", "b"]).await;
    fleet.put_node("n2", &["org/a"]).await;
    let all_placed = |status: &Value| {
        goal(status, "org/a", "n1") == "warm"
            && goal(status, "org/a", "n2") == "warm"
            && status["leader"] != Value::Null
    };
    let status = fleet.status_when("both are placed", all_placed).await;
    assert_eq!(status["nodes"][0]["control_url"], "http://n1.invalid:8081");
    assert_eq!(status["is_current"], true);
    let is_shown = |status: &Value| {
        let controller = &status["controller"];
        let short = json!([{ "model": "b", "text": "`b`: 1 of 2 nodes; no other can have it" }]);
        controller["is_leader"] == true && controller["shortages"] == short && controller["written"] == 3
    };
    fleet.status_when("it says what it did and what is short", is_shown).await;

    let why = fleet.ask("GET /fleet/why/b", "").await.json();
    assert_eq!(why["shortages"], json!(["`b`: 1 of 2 nodes; no other can have it"]));
    assert_eq!(why["nodes"][0]["text"], "it is asleep; warm is wanted, since it was placed on 0 of 2 nodes");
    assert!(why["nodes"][0]["changed_at_ms"].as_u64() > Some(1_700_000_000_000), "{why:#}");
    assert_eq!(why["nodes"][1]["text"], "the node does not have it configured; it was never placed there");
    assert_eq!(fleet.ask("GET /fleet/why/org%2Fa", "").await.json()["model"], "org/a");
    let answer = fleet.ask("GET /fleet/why/c", "").await;
    assert!(answer.status == 404 && answer.message().contains("b, org/a"), "{answer:?}");

    let changes = async || fleet.ask("GET /fleet/changes", "").await.json()["changes"].clone();
    let all = async {
        while changes().await.as_array().map(Vec::len) != Some(3) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let all = tokio::time::timeout(STUCK, all).await;
    let changes = changes().await;
    let is_whole =
        |change: &Value| change["goal"] == "warm" && change["before"] == "none" && change["why"] != "";
    assert!(all.is_ok() && changes.as_array().unwrap().iter().all(is_whole), "{changes:#}");

    let answer = fleet.ask("GET /metrics", "").await;
    assert_eq!(answer.head["content-type"], "application/openmetrics-text; version=1.0.0; charset=utf-8");
    let metrics = Metrics::of(&answer.body);
    for (sample, value) in [
        ("nodes", 2.0),
        ("nodes_draining", 0.0),
        ("copies{stage=\"asleep\",goal=\"warm\"}", 3.0),
        ("copies{stage=\"awake\",goal=\"hot\"}", 0.0),
        ("is_leader", 1.0),
        ("has_leader", 1.0),
        ("etcd_is_current", 1.0),
        ("placements_written_total", 3.0),
        ("shortages", 1.0),
        ("requests_running", 0.0),
    ] {
        assert_eq!(
            metrics.at(&format!("poorwill_fleet_{sample}")).to_bits(),
            f64::to_bits(value),
            "{sample}"
        );
    }
    assert_eq!(metrics.types["poorwill_fleet_decision_seconds"], "gauge");
    fleet.running.end(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wishes_are_written_and_taken_back() {
    let Some(servers) = Servers::one() else { return };
    let fleet = Fixture::start(&servers.urls(), "", true).await;
    fleet.put_node("n1", &["org/a"]).await;
    fleet.put_node("n2", &["org/a"]).await;
    fleet.status_when("both are there", |status| status["nodes"].as_array().map(Vec::len) == Some(2)).await;
    for (what, body, words) in [
        ("PUT /fleet/drains/n1", "{\"why\": \"new memory\"}", "node n1 drains: its models go elsewhere"),
        (
            "PUT /fleet/pins/org%2Fa",
            "{\"copies\": 1, \"nodes\": [\"n2\"]}",
            "model org/a is kept awake on 1 of its nodes",
        ),
    ] {
        let answer = fleet.ask(what, body).await;
        assert_eq!((answer.status, &answer.json()["wish"]), (200, &json!(words)), "{answer:?}");
    }
    let is_followed = |status: &Value| {
        goal(status, "org/a", "n1") == "none"
            && goal(status, "org/a", "n2") == "hot"
            && status["pins"] != json!([])
    };
    let status = fleet.status_when("the controller follows", is_followed).await;
    assert_eq!(status["drains"], json!([{ "node": "n1", "why": "new memory" }]));
    assert_eq!(status["nodes"][0]["is_draining"], true);
    assert_eq!(status["pins"], json!([{ "model": "org/a", "copies": 1, "nodes": ["n2"] }]));
    for (what, words) in [
        ("DELETE /fleet/drains/n1", "node n1 takes models again"),
        ("DELETE /fleet/pins/org%2Fa", "model org/a is not pinned any more"),
    ] {
        assert_eq!(fleet.ask(what, "").await.json()["wish"], words);
    }
    let is_over = |status: &Value| status["drains"] == json!([]) && status["pins"] == json!([]);
    fleet.status_when("both are taken back", is_over).await;
    // Without a body, a pin is for one copy on any node.
    assert_eq!(fleet.ask("PUT /fleet/pins/org%2Fa", "").await.status, 200);
    let is_pinned =
        |status: &Value| status["pins"] == json!([{ "model": "org/a", "copies": 1, "nodes": [] }]);
    fleet.status_when("it is pinned", is_pinned).await;
    fleet.running.end(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wishes_that_cannot_be_are_refused() {
    let Some(servers) = Servers::one() else { return };
    let fleet = Fixture::start(&servers.urls(), "", false).await;
    fleet.put_node("n1", &["org/a"]).await;
    let long = format!("{:>16385}", "{}");
    for (what, body, status, words) in [
        ("PUT /fleet/drains/n2", "", 404, "there is no node `n2` in the fleet; there are: n1"),
        ("PUT /fleet/drains/n%2F2", "", 400, "node `n/2`"),
        ("PUT /fleet/drains/n1", "{\"wy\": \"\"}", 400, "`wy`"),
        ("PUT /fleet/drains/n1", &long, 413, "16384"),
        ("DELETE /fleet/drains/n1", &long, 413, "16384"),
        ("PUT /fleet/pins/b", "", 404, "there is no model `b` in the fleet; there are: org/a"),
        ("PUT /fleet/pins/org%2Fa", "{\"copies\": 0}", 400, "remove the pin instead"),
        ("PUT /fleet/pins/org%2Fa", "{\"copies\": -1}", 400, "-1"),
        ("PUT /fleet/pins/org%2Fa", "{\"nodes\": [\"n2\"]}", 404, "`n2`"),
        ("POST /fleet/pins/org%2Fa", "", 405, "PUT"),
        ("PUT /fleet/pins/org/a", "", 404, "%2F"),
    ] {
        let answer = fleet.ask(what, body).await;
        assert!(answer.status == status && answer.message().contains(words), "{what} {body}: {answer:?}");
    }
    let (entries, _) = fleet.etcd.read("/poorwill/t/wishes/").await.unwrap();
    assert_eq!(entries, []);
    let status = fleet.status().await;
    assert_eq!(
        (&status["leader"], &status["controller"]),
        (&Value::Null, &Value::Null),
        "it is no candidate"
    );
    fleet.running.end(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_etcd_it_says_so() {
    let Some(mut servers) = Servers::one() else { return };
    servers.kill(0);
    let fleet = Fixture::start(&servers.urls(), "", true).await;
    let answer = fleet.ask("GET /fleet/ready", "").await;
    assert!(answer.status == 503 && answer.message().contains("etcd"), "{answer:?}");
    let status = fleet.status().await;
    assert_eq!(
        (&status["is_current"], &status["revision"], &status["nodes"]),
        (&json!(false), &json!(0), &json!([]))
    );
    assert_eq!(fleet.ask("GET /health", "").await.status, 200);
    let answer = fleet.ask("PUT /fleet/drains/n1", "").await;
    assert!(answer.status == 503 && answer.message().contains("etcd"), "{answer:?}");
    servers.restart(0);
    fleet.status_when("etcd is read", |status| status["revision"] != 0 && status["is_current"] == true).await;
    assert_eq!(fleet.ask("GET /fleet/ready", "").await.status, 200);
    fleet.running.end(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_key_and_who_is_of_another_site_gets_nothing() {
    let Some(servers) = Servers::one() else { return };
    let fleet = Fixture::start(&servers.urls(), "keys = [\"env:KEY\"]\n", false).await;
    fleet.put_node("n1", &["org/a"]).await;
    let all = [
        "GET /fleet/status",
        "GET /fleet/changes",
        "GET /fleet/why/org%2Fa",
        "GET /metrics",
        "PUT /fleet/drains/n1",
        "DELETE /fleet/drains/n1",
        "PUT /fleet/pins/org%2Fa",
        "DELETE /fleet/pins/org%2Fa",
    ];
    let key = "Authorization: Bearer key\r\n";
    for what in all {
        for wrong in ["", "Authorization: Bearer other\r\n"] {
            let answer = ask(fleet.control, what, wrong, "").await;
            assert!(answer.status == 401 && !answer.body.contains("n1"), "{what}: {answer:?}");
        }
        for foreign in [
            "Origin: http://elsewhere.example\r\n",
            "Sec-Fetch-Site: cross-site\r\n",
            "Host: evil.example\r\n",
        ] {
            let answer = ask(fleet.control, what, &format!("{key}{foreign}"), "").await;
            assert!(answer.status == 403 && !answer.body.contains("n1"), "{what} {foreign}: {answer:?}");
        }
    }
    let (entries, _) = fleet.etcd.read("/poorwill/t/wishes/").await.unwrap();
    assert_eq!(entries, []);
    for open in ["GET /", "GET /health"] {
        assert_eq!(ask(fleet.control, open, "", "").await.status, 200, "{open}");
    }
    let page = ask(fleet.control, "GET /", "", "").await;
    assert!(page.body.contains("<title>Poorwill fleet</title>") && !page.body.contains("n1"), "{page:?}");
    assert!(page.head["content-security-policy"].starts_with("default-src 'none'; "), "{page:?}");
    // The router reads the fleet while it answers.
    while ask(fleet.control, "GET /fleet/why/org%2Fa", key, "").await.status == 404 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for what in all {
        let answer = ask(fleet.control, what, key, "").await;
        assert_eq!(answer.status, 200, "{what}: {answer:?}");
    }
    fleet.running.end(Duration::ZERO).await;
    let lines = "keys = [\"env:KEY\"]\nopen_metrics = true\n";
    let fleet = Fixture::start(&servers.urls(), lines, false).await;
    assert_eq!(fleet.ask("GET /metrics", "").await.status, 200);
    assert_eq!(fleet.ask("GET /fleet/status", "").await.status, 401);
    fleet.running.end(Duration::ZERO).await;
}
