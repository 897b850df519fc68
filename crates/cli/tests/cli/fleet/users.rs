//! A fleet over an etcd with users: nodes, routers and operators are one of them.

use poorwill_testkit::etcd::Servers;
use serde_json::json;

use super::parts::{tables, until};
use crate::rotate::fixture::{Fixture, Model, Rotator, TOKENS, free_port, ran, text_of};
use crate::rotate::http;
use crate::support::{Folder, command};

const PASSWORD: &str = "kept-secret";
const PROMPT: &str = "Tell me of a harbour.";

#[test]
fn nodes_routers_and_operators_are_a_user_of_etcd() {
    let Some(etcd) = Servers::start(1, &["--bcrypt-cost=4"]) else { return };
    etcd.enable_users(PASSWORD);
    let folder = Folder::new();
    folder.write("password", format!("{PASSWORD}\n"));
    let user = format!(
        "etcd_user = \"poor\"\netcd_password = {}\n",
        json!(format!("file:{}", folder.path().join("password").display()))
    );
    let mut node = Fixture::new("512MiB", vec![Model::new("amber")]);
    node.tables = tables("node0", &etcd.urls()) + &user;
    let started = node.start(&[]);

    let port = free_port();
    let text = format!(
        "[fleet]\nname = \"test\"\netcd = {}\n{user}[front]\nlisten = \"127.0.0.1:{port}\"\nkeys = [\"env:CLIENT_KEY\"]\n",
        json!(etcd.urls()),
    );
    folder.write("fleet.toml", text);
    let mut router = command(folder.path(), ["route", "--config", "fleet.toml"]);
    let router = Rotator::spawned(router.env("CLIENT_KEY", "of-clients"), port);
    let body = json!({ "model": "amber", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0 });
    let key = [("Authorization", "Bearer of-clients")];
    let ask = || http::ask(port, "POST", "/v1/completions", &key, &body.to_string()).unwrap();
    until("it is served", || ask().status == 200);
    assert_eq!(text_of(&ask()), node.truth("amber", &[PROMPT], TOKENS)[0]);

    // Operators have no keys of clients.
    let ordered = |words: &[&str]| ran(&mut command(folder.path(), [&["fleet"], words].concat()));
    assert_eq!(ordered(&["status", "--json"]).json()["nodes"][0]["node"], "node0");
    ordered(&["pin", "amber"]).succeeded();
    ordered(&["drain", "node0"]).succeeded();
    folder.write("password", "wrong-password");
    let failed = ordered(&["drain", "node0", "--off"]);
    let said = failed.failed(&["authentication failed", "etcd_user and etcd_password"]).to_owned();
    for text in [said, router.log(), started.log()] {
        assert!(!text.contains(PASSWORD) && !text.contains("wrong-password"), "{text}");
    }
    router.end();
    started.end();
}
