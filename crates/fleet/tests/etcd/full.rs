//! An etcd that has no space left.

use poorwill_fleet::etcd::{EtcdError, Txn};
use poorwill_fleet::records::Goal;
use poorwill_fleet::session::Session;
use poorwill_testkit::etcd::Servers;
use serde_json::json;

use super::fleet::{Fleet, leads, leads_no_more};
use super::support::{TTL, compact, eventually, post, put, steady, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_reported_in_words_and_goes_on_when_there_is_space() {
    let Some(servers) = Servers::start(1, &["--quota-backend-bytes=2097152"]) else { return };
    let fleet = Fleet::new(steady(&servers.urls()));
    let node = fleet.node("n1", &["one"]).await;
    let controller = fleet.controller(fleet.etcd.clone(), "a", TTL);
    let since = leads(&controller).await;
    fleet.node("n2", &["one"]).await;
    fleet.pin("one", 1).await;
    let before = fleet.settled().await;
    assert_eq!(before.len(), 2);

    let much = "x".repeat(256 << 10);
    let mut error = None;
    eventually("it is full", async || {
        error = fleet.etcd.commit(&Txn::new().put("/much", &much, None)).await.err();
        error.is_some()
    })
    .await;
    let error = error.unwrap();
    assert!(matches!(error, EtcdError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("database space exceeded"), "{error}");

    // Removals may be carried out, and so the controller gets something to write.
    fleet.etcd.revoke(node).await.unwrap();
    let late = Session::start(fleet.etcd.clone(), TTL);
    leads_no_more(&controller, since).await;
    assert_eq!(fleet.placed().await, before);

    let last = fleet.etcd.read("/").await.unwrap().1;
    compact(&servers, last);
    post(&servers, "/v3/maintenance/defragment", &json!({}));
    let path = "/v3/maintenance/alarm";
    let alarms = post(&servers, path, &json!({ "action": "GET" }));
    let [alarm] = alarms["alarms"].as_array().unwrap().as_slice() else { panic!("{alarms}") };
    let disarm = json!({ "action": "DEACTIVATE", "memberID": alarm["memberID"], "alarm": "NOSPACE" });
    let disarmed = post(&servers, path, &disarm);
    assert!(disarmed.get("error").is_none(), "{disarmed}");
    until(&mut late.lease(), "a lease is granted", Option::is_some).await;
    put(&fleet.etcd, "/a", "", None).await;
    leads(&controller).await;
    let after = fleet.settled().await;
    let is_on = |node: &str, goal| after.iter().any(|((_, of), had)| of == node && *had == goal);
    assert!(after.len() == 2 && is_on("n1", Goal::Warm) && is_on("n2", Goal::Hot), "{after:?}");
    late.end().await;
    controller.end().await;
}
