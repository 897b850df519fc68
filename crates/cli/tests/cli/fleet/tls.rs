//! A fleet in which everything has a certificate, and asks for one.

use std::path::Path;

use poorwill_testkit::certificates::{Authority, Files, Use};
use poorwill_testkit::etcd::Servers;
use serde_json::json;

use super::parts::tables;
use crate::rotate::fixture::{Fixture, HANGS, Model, Rotator, TOKENS, free_port, text_of};
use crate::rotate::http;
use crate::support::{Folder, command};

const PROMPT: &str = "Tell me of a harbour.";

/// The keys that begin with this prefix.
fn keys(prefix: &str, ca: &Path, own: &Files) -> String {
    format!(
        "{prefix}ca = {ca:?}\n{prefix}certificate = {:?}\n{prefix}certificate_key = {:?}\n",
        own.certificate, own.key
    )
}

#[test]
fn routers_nodes_and_etcd_know_each_other_by_certificates() {
    let folder = Folder::new();
    let mut authority = Authority::new(folder.path(), "ca");
    let ca = authority.ca.clone();
    let own = authority.issue("etcd", &["127.0.0.1"], Use::Both);
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let flags = [
        flag("cert-file", &own.certificate),
        flag("key-file", &own.key),
        flag("trusted-ca-file", &ca),
        "--client-cert-auth".to_owned(),
    ];
    let Some(etcd) = Servers::start(1, &flags.each_ref().map(String::as_str)) else { return };

    let own = authority.issue("node", &["127.0.0.1"], Use::Both);
    let mut node = Fixture::new("512MiB", vec![Model::new("amber")]);
    node.tables = tables("node0", &etcd.urls()) + &keys("etcd_", &ca, &own);
    let front = format!(
        "[front]\ncertificate = {:?}\ncertificate_key = {:?}\nclients_ca = {ca:?}\n",
        own.certificate, own.key
    );
    let started = node.start_with(&node.config().replacen("[front]\n", &front, 1), &[]);

    let own = authority.issue("router", &[], Use::Client);
    let port = free_port();
    let text = format!(
        "[fleet]\nname = \"test\"\netcd = {}\n{}{}[front]\nlisten = \"127.0.0.1:{port}\"\n",
        json!(etcd.urls()),
        keys("etcd_", &ca, &own),
        keys("node_", &ca, &own),
    );
    folder.write("fleet.toml", text);
    let router = Rotator::spawned(&mut command(folder.path(), ["route", "--config", "fleet.toml"]), port);
    let body = json!({ "model": "amber", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0 });
    let began = std::time::Instant::now();
    let answer = loop {
        let answer = http::ask(port, "POST", "/v1/completions", &[], &body.to_string()).unwrap();
        // It is placed a moment after its node came.
        if ![404, 503].contains(&answer.status) || began.elapsed() > HANGS {
            break answer;
        }
    };
    assert_eq!(answer.status, 200, "{answer:?} {} {}", router.log(), started.log());
    assert_eq!(text_of(&answer), node.truth("amber", &[PROMPT], TOKENS)[0]);
    let status = crate::rotate::fixture::ran(&mut command(
        folder.path(),
        ["fleet", "status", "--json", "--config", "fleet.toml"],
    ));
    let url = &status.json()["nodes"][0]["front_url"];
    assert_eq!(url, &json!(format!("https://127.0.0.1:{}", node.front)));
    // Who has no certificate does not reach the node past the router.
    http::ask(node.front, "GET", "/health", &[], "").unwrap_err();
    router.end();
    started.end();
}
