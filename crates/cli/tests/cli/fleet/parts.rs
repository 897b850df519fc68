//! An etcd, nodes and routers.

use std::fs;
use std::io;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use poorwill_testkit::etcd::Servers;
use serde_json::{Value, json};

use crate::rotate::fixture::{
    Fixture, HANGS, KEY, KEY_NAME, Model, Rotator, TOKENS, free_port, ran, text_of,
};
use crate::rotate::http::{self, Answer};
use crate::support::{Folder, Ran, command};

const NAMES: [&str; 3] = ["amber", "birch", "cedar"];
/// Of nodes and controllers, in seconds.
pub(super) const LEASE: u64 = 3;

/// A fleet whose parts a test starts.
pub(super) struct Fleet {
    pub(super) etcd: Servers,
    pub(super) nodes: Vec<Fixture>,
    /// The fronts of the routers.
    pub(super) routers: Vec<u16>,
    models: Vec<&'static str>,
    folder: Folder,
}

impl Fleet {
    /// With so many routers and nodes of two models each, of which each fits; `None` without an etcd.
    pub(super) fn of(routers: usize, nodes: usize) -> Option<Self> {
        Self::with(Servers::one()?, routers, nodes, 2, "512MiB")
    }

    pub(super) fn with(
        etcd: Servers,
        routers: usize,
        nodes: usize,
        models: usize,
        gpu: &'static str,
    ) -> Option<Self> {
        let urls = etcd.urls();
        let node = |nth: usize| {
            let mut node = Fixture::new(gpu, NAMES[..models].iter().map(|name| Model::new(name)).collect());
            node.tables = tables(&format!("node{nth}"), &urls);
            node
        };
        let folder = Folder::new();
        let routers: Vec<u16> = (0..routers).map(|_| free_port()).collect();
        for port in &routers {
            let text = format!(
                "[fleet]\nname = \"test\"\netcd = {}\nlease = \"{LEASE}s\"\n[front]\nlisten = \"127.0.0.1:{port}\"\n\
                 [rules]\nkeep_min = \"0s\"\n",
                json!(urls)
            );
            folder.write(format!("fleet{port}.toml"), text);
        }
        Some(Self {
            nodes: (0..nodes).map(node).collect(),
            routers,
            models: NAMES[..models].to_vec(),
            folder,
            etcd,
        })
    }

    pub(super) fn models(&self) -> &[&'static str] {
        &self.models
    }

    /// What each model answers.
    pub(super) fn truth(&self, prompts: &[&str]) -> Vec<Vec<String>> {
        self.models.iter().map(|model| self.nodes[0].truth(model, prompts, TOKENS)).collect()
    }

    /// Starts all nodes.
    pub(super) fn start(&self) -> Vec<Rotator> {
        self.nodes.iter().map(|node| node.start(&[])).collect()
    }

    /// Starts a router. One without a front is not waited for.
    pub(super) fn route(&self, nth: usize, more: &[&str]) -> Rotator {
        let port = self.routers[nth];
        let config = format!("fleet{port}.toml");
        let mut command = command(self.folder.path(), [&["route", "--config", &config], more].concat());
        if more.contains(&"controller") {
            Rotator::begun(&mut command)
        } else {
            Rotator::spawned(&mut command, port)
        }
    }

    /// The first router, with more lines of its `[fleet]`, and the nodes' key in its environment.
    pub(super) fn route_with(&self, lines: &str) -> Rotator {
        Rotator::spawned(self.keyed(lines, &[]).env(KEY_NAME, KEY), self.routers[0])
    }

    /// What `route --check` says of such a router.
    pub(super) fn check(&self, lines: &str) -> String {
        ran(self.keyed(lines, &["--check"]).env(KEY_NAME, KEY)).succeeded()
    }

    fn keyed(&self, lines: &str, more: &[&str]) -> Command {
        let text = fs::read_to_string(self.folder.join(format!("fleet{}.toml", self.routers[0]))).unwrap();
        self.folder.write("keyed.toml", text.replace("[front]", &format!("{lines}[front]")));
        command(self.folder.path(), [&["route", "--config", "keyed.toml"], more].concat())
    }

    /// The processes of a node's engines that run for good, by their models.
    pub(super) fn engines_that_are_up(&self, node: usize) -> Vec<(&'static str, u32)> {
        let node = &self.nodes[node];
        let is_up = |model: &&str| {
            let stage = node.now(model)["stage"].clone();
            stage == "ready" || stage == "asleep"
        };
        let up = self.models.iter().copied().filter(is_up);
        up.filter_map(|model| node.engine(model).map(|engine| (model, engine))).collect()
    }

    /// Runs `poorwill fleet`.
    pub(super) fn order(&self, words: &[&str]) -> Ran {
        let config = format!("fleet{}.toml", self.routers[0]);
        ran(&mut command(self.folder.path(), [&["fleet"], words, &["--config", &config]].concat()))
    }

    pub(super) fn status(&self) -> Value {
        let status = self.order(&["status", "--json"]).json();
        crate::json::expect("poorwill fleet status", &status);
        status
    }

    pub(super) fn has_node(&self, name: &str) -> bool {
        self.status()["nodes"].as_array().unwrap().iter().any(|node| node["node"] == name)
    }

    /// On how many nodes a field of a model has this value.
    pub(super) fn copies(&self, model: &str, field: &str, value: &str) -> usize {
        let status = self.status();
        let copies = status["models"].as_array().unwrap();
        copies.iter().filter(|copy| copy["model"] == model && copy[field] == value).count()
    }

    /// Whether requests for a model may go to this node, and it is awake or after a wake.
    pub(super) fn is_ready(&self, model: &str, node: &str) -> bool {
        let status = self.status();
        let mut copies = status["models"].as_array().unwrap().iter();
        let of = |copy: &&Value| copy["model"] == model && copy["node"] == node;
        copies.find(of).is_some_and(|copy| {
            let stage = copy["stage"].as_str();
            copy["goal"] != "none" && stage.is_some_and(|stage| ["awake", "asleep"].contains(&stage))
        })
    }

    /// The greatest of a model's placements.
    pub(super) fn fence(&self, model: &str) -> u64 {
        let status = self.status();
        let copies = status["models"].as_array().unwrap().iter().filter(|copy| copy["model"] == model);
        copies.filter_map(|copy| copy["fence"].as_u64()).max().unwrap_or_default()
    }

    /// Asks a router.
    pub(super) fn ask(&self, router: usize, model: &str, prompt: &str) -> io::Result<Answer> {
        let body = json!({ "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0 });
        http::ask(self.routers[router], "POST", "/v1/completions", &[], &body.to_string())
    }

    /// The same until it is served: a model is placed a moment after its node came.
    pub(super) fn served(&self, router: usize, model: &str, prompt: &str) -> Answer {
        let began = Instant::now();
        loop {
            let answer = self.ask(router, model, prompt).unwrap();
            if ![404, 503].contains(&answer.status) || began.elapsed() > HANGS {
                return answer;
            }
            sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn say(&self, router: usize, model: &str, prompt: &str) -> String {
        text_of(&self.served(router, model, prompt))
    }
}

/// The configuration of a node in the fleet.
pub(super) fn tables(node: &str, etcd: &[String]) -> String {
    format!("[fleet]\nname = \"test\"\nnode = \"{node}\"\netcd = {}\nlease = \"{LEASE}s\"\n", json!(etcd))
}

/// Waits for something that is to come.
pub(super) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < HANGS, "not so: {what}");
        sleep(Duration::from_millis(50));
    }
}
