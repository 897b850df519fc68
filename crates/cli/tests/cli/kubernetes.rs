//! The manifests of `deploy/kubernetes`, as far as files can be tested: their fields, names and ports fit together, probes
//! ask for routes that exist, and the configurations and commands in them are understood.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use granit_parser::{Event, Parser, ScalarStyle};
use poorwill_rotate::config::{Config, Control};
use poorwill_router::RouterConfig;
use poorwill_testkit::certificates::Authority;
use serde_json::{Map, Value, json};

use crate::support::{Folder, run};

const NODE_ROUTES: &str = include_str!("../../../rotate/src/control/routes.rs");
const ROUTER_ROUTES: &str = include_str!("../../../router/src/operators/routes.rs");
const ROUTER_METRICS: &str = include_str!("../../../router/src/operators/metrics.rs");
const NODE_METRICS: &str = include_str!("../../../../docs/reference/metrics.md");
const KEYS: &str = "/etc/poorwill-keys";
/// The CA of etcd's certificate, among them.
const CA: &str = "etcd-ca.pem";
/// How long a service lets requests finish at its end.
const DRAIN_S: u64 = 60;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

/// The documents of a file of plain YAML, without anchors and tags.
fn documents(text: &str) -> Vec<Value> {
    let mut parser = Parser::new_from_str(text);
    let mut documents = Vec::new();
    loop {
        match next(&mut parser) {
            Event::StreamEnd => return documents,
            Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
            event => documents.push(value(&mut parser, event)),
        }
    }
}

fn next<'t>(parser: &mut Parser<'t, granit_parser::StrInput<'t>>) -> Event<'t> {
    parser.next_event().expect("it ends in order").unwrap().0
}

fn value<'t>(parser: &mut Parser<'t, granit_parser::StrInput<'t>>, event: Event<'t>) -> Value {
    match event {
        Event::Scalar(text, ScalarStyle::Plain, ..) => match &*text {
            "true" => json!(true),
            "false" => json!(false),
            "" | "~" | "null" => Value::Null,
            text => text.parse::<i64>().map_or_else(|_| json!(text), |number| json!(number)),
        },
        Event::Scalar(text, ..) => json!(&*text),
        Event::SequenceStart(..) => {
            let mut items = Vec::new();
            loop {
                match next(parser) {
                    Event::SequenceEnd => return Value::Array(items),
                    event => items.push(value(parser, event)),
                }
            }
        }
        Event::MappingStart(..) => {
            let mut map = Map::new();
            loop {
                let key = match next(parser) {
                    Event::MappingEnd => return Value::Object(map),
                    event => value(parser, event),
                };
                let event = next(parser);
                let inner = value(parser, event);
                let key = key.as_str().expect("a key is text").to_owned();
                assert!(map.insert(key.clone(), inner).is_none(), "{key} is there twice");
            }
        }
        event => panic!("{event:?} is not plain YAML"),
    }
}

/// All documents of all files.
fn all() -> Vec<Value> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert_eq!(files.len(), 4, "{files:?}");
    files.iter().flat_map(|file| documents(&fs::read_to_string(file).unwrap())).collect()
}

fn of_kind(kind: &str) -> Vec<Value> {
    all().into_iter().filter(|one| one["kind"] == kind).collect()
}

fn named(kind: &str, name: &str) -> Value {
    let found = of_kind(kind).into_iter().find(|one| one["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

fn text<'v>(value: &'v Value, path: &str) -> &'v str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_else(|| panic!("no text at {path} of {value:#}"))
}

fn list<'v>(value: &'v Value, path: &str) -> &'v [Value] {
    value.pointer(path).and_then(Value::as_array).unwrap_or_else(|| panic!("no list at {path} of {value:#}"))
}

/// Both workloads, and the routes of what runs in them.
fn workloads() -> [(Value, &'static str); 2] {
    [
        (named("DaemonSet", "poorwill-node"), NODE_ROUTES),
        (named("Deployment", "poorwill-router"), ROUTER_ROUTES),
    ]
}

fn container(workload: &Value) -> &Value {
    let containers = list(workload, "/spec/template/spec/containers");
    assert_eq!(containers.len(), 1);
    &containers[0]
}

/// The number of a container's port.
fn port(workload: &Value, name: &str) -> u64 {
    let ports = list(container(workload), "/ports");
    let found = ports.iter().find(|port| port["name"] == name).unwrap_or_else(|| panic!("no port {name}"));
    found["containerPort"].as_u64().unwrap()
}

/// Whether each label is one of the others, with its value.
fn is_within(labels: &Value, others: &Value) -> bool {
    let labels = labels.as_object().expect("labels");
    assert!(!labels.is_empty(), "it selects everything");
    labels.iter().all(|(name, value)| others.get(name) == Some(value))
}

/// The workload that a configuration is for, by the name that both have.
fn configured(config: &str, key: &str) -> (Value, String) {
    let map = named("ConfigMap", config);
    let workload = workloads().into_iter().find(|(one, _)| one["metadata"]["name"] == config).unwrap().0;
    (workload, text(&map, &format!("/data/{key}")).to_owned())
}

/// Variables that the workload has, and keys where its secret is mounted.
fn secret(workload: &Value) -> impl Fn(&str) -> Result<String, String> {
    let variables: BTreeSet<String> = container(workload)["env"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|variable| text(variable, "/name").to_owned())
        .collect();
    let mounts = list(container(workload), "/volumeMounts").to_vec();
    move |source: &str| {
        if let Some(name) = source.strip_prefix("env:") {
            return variables.contains(name).then(|| "value".to_owned()).ok_or_else(|| format!("no {name}"));
        }
        let path = Path::new(source.strip_prefix("file:").ok_or("it is neither env: nor file:")?);
        let is_mounted = mounts.iter().any(|mount| mount["name"] == "keys" && mount["mountPath"] == KEYS);
        let file = path.strip_prefix(KEYS).ok().and_then(Path::to_str);
        let is_known = file.is_some_and(|file| ["client", "node", "operator", "etcd"].contains(&file));
        (is_mounted && is_known).then(|| "key".to_owned()).ok_or_else(|| format!("no {source}"))
    }
}

#[test]
fn each_object_is_of_a_known_kind_and_has_its_name() {
    let known: BTreeMap<&str, &str> = [
        ("Namespace", "v1"),
        ("ConfigMap", "v1"),
        ("Service", "v1"),
        ("DaemonSet", "apps/v1"),
        ("Deployment", "apps/v1"),
        ("PodDisruptionBudget", "policy/v1"),
        ("InferencePool", "inference.networking.k8s.io/v1"),
    ]
    .into();
    let (mut kinds, mut names) = (BTreeSet::new(), BTreeSet::new());
    for one in all() {
        let (kind, name) = (text(&one, "/kind").to_owned(), text(&one, "/metadata/name").to_owned());
        assert_eq!(known.get(&*kind), Some(&text(&one, "/apiVersion")), "{kind}");
        let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(name.len() <= 63 && name.chars().all(is_label), "{name}");
        match kind.as_str() {
            "Namespace" => assert_eq!(name, "poorwill"),
            _ => assert_eq!(text(&one, "/metadata/namespace"), "poorwill", "{name}"),
        }
        let needs: &[&str] = match kind.as_str() {
            "ConfigMap" => &["/data"],
            "Service" => &["/spec/selector", "/spec/ports"],
            "DaemonSet" | "Deployment" => &["/spec/selector/matchLabels", "/spec/template/spec/containers"],
            "PodDisruptionBudget" => &["/spec/minAvailable", "/spec/selector/matchLabels"],
            "InferencePool" => {
                &["/spec/selector/matchLabels", "/spec/targetPorts", "/spec/endpointPickerRef/name"]
            }
            _ => &[],
        };
        for path in needs {
            assert!(one.pointer(path).is_some(), "{kind} {name} has no {path}");
        }
        assert!(names.insert((kind.clone(), name.clone())), "{kind} {name} twice");
        kinds.insert(kind);
    }
    assert_eq!(kinds.len(), known.len(), "{kinds:?}");
}

#[test]
fn selectors_match_the_labels_of_one_workload_and_ports_are_its_own() {
    let templates = workloads().map(|(workload, _)| workload);
    let labels = |workload: &Value| workload["spec"]["template"]["metadata"]["labels"].clone();
    for workload in &templates {
        assert!(is_within(&workload["spec"]["selector"]["matchLabels"], &labels(workload)), "{workload:#}");
    }
    let of = |selector: &Value| {
        let found: Vec<&Value> = templates.iter().filter(|one| is_within(selector, &labels(one))).collect();
        assert_eq!(found.len(), 1, "{selector}");
        found[0]
    };
    for service in of_kind("Service") {
        let workload = of(&service["spec"]["selector"]);
        for one in list(&service, "/spec/ports") {
            assert!(port(workload, text(one, "/targetPort")) > 0);
        }
    }
    let budget = named("PodDisruptionBudget", "poorwill-router");
    let replicas = of(&budget["spec"]["selector"]["matchLabels"])["spec"]["replicas"].as_u64();
    assert!(replicas > budget["spec"]["minAvailable"].as_u64(), "no pod could ever be evicted");
    let pool = named("InferencePool", "poorwill");
    let workload = of(&pool["spec"]["selector"]["matchLabels"]);
    assert_eq!(pool["spec"]["targetPorts"], json!([{ "number": port(workload, "front") }]));
    for spread in
        list(&named("Deployment", "poorwill-router"), "/spec/template/spec/topologySpreadConstraints")
    {
        of(&spread["labelSelector"]["matchLabels"]);
    }
}

#[test]
fn probes_and_scrapers_ask_for_routes_that_exist() {
    for (workload, routes) in workloads() {
        let is_route = |path: &str| routes.contains(&format!(".route(\"{path}\", get("));
        for (probe, path) in [("readinessProbe", "/fleet/ready"), ("livenessProbe", "/health")] {
            let asked = &container(&workload)[probe]["httpGet"];
            assert_eq!((text(asked, "/path"), text(asked, "/port")), (path, "control"), "{probe}");
            assert!(is_route(path) && port(&workload, "control") > 0, "{path}");
        }
        let annotations = &workload["spec"]["template"]["metadata"]["annotations"];
        assert_eq!(annotations["prometheus.io/scrape"], "true");
        assert_eq!(annotations["prometheus.io/port"], port(&workload, "control").to_string());
        assert!(is_route(annotations["prometheus.io/path"].as_str().unwrap()), "{annotations}");
    }
}

#[test]
fn what_is_mounted_is_there() {
    for (workload, _) in workloads() {
        let volumes = list(&workload, "/spec/template/spec/volumes");
        let names: BTreeSet<&str> = volumes.iter().map(|volume| text(volume, "/name")).collect();
        let mounted: BTreeSet<&str> =
            list(container(&workload), "/volumeMounts").iter().map(|mount| text(mount, "/name")).collect();
        assert_eq!(names, mounted);
        for map in volumes.iter().filter_map(|volume| volume.pointer("/configMap/name")) {
            assert_eq!(map, &workload["metadata"]["name"]);
            named("ConfigMap", map.as_str().unwrap());
        }
        let command: Vec<&str> =
            list(container(&workload), "/command").iter().filter_map(Value::as_str).collect();
        let ["poorwill", "rotate" | "route", "--config", path, "--json"] = command[..] else {
            panic!("{command:?}");
        };
        let key = path.strip_prefix("/etc/poorwill/").unwrap();
        configured(text(&workload, "/metadata/name"), key);
    }
}

fn assert_control(workload: &Value, control: &Control) {
    assert_eq!(u64::from(control.listen.port()), port(workload, "control"));
    assert!(control.listen.ip().is_unspecified(), "the kubelet asks by the pod's address");
    assert!(!control.keys.is_empty() && control.metrics_are_open, "scrapers have no key");
}

#[test]
fn configurations_are_accepted_and_are_of_one_fleet() {
    let folder = Folder::new();
    let ca = Authority::new(folder.path(), "ca").ca;
    // Its file is read with the configuration.
    let with_ca = |(workload, text): (Value, String)| {
        let named = format!("etcd_ca = \"{KEYS}/{CA}\"");
        assert!(text.contains(&named), "{text}");
        (workload, text.replace(&named, &format!("etcd_ca = {ca:?}")))
    };
    let (workload, text) = with_ca(configured("poorwill-node", "node.toml"));
    let node = Config::parse(&text, &secret(&workload)).unwrap();
    assert_eq!(u64::from(node.front.listen.port()), port(&workload, "front"));
    assert!(!node.front.keys.is_empty());
    assert_control(&workload, &node.control);
    let fleet = node.fleet.as_ref().unwrap();
    assert_eq!(fleet.node.as_str(), "value", "a node has the machine's name");
    assert_eq!(fleet.front_url, format!("http://value:{}", port(&workload, "front")));
    assert_eq!(fleet.control_url, format!("http://value:{}", port(&workload, "control")));
    let mounts = list(container(&workload), "/volumeMounts");
    let state = mounts.iter().find(|mount| mount["name"] == "state").unwrap();
    assert_eq!(node.state.as_deref(), Some(Path::new(state["mountPath"].as_str().unwrap())));

    let (_, text) = with_ca(configured("poorwill-node", "fleet.toml"));
    let commands = RouterConfig::parse(&text, &secret(&workload)).unwrap();
    let (workload, text) = with_ca(configured("poorwill-router", "router.toml"));
    let router = RouterConfig::parse(&text, &secret(&workload)).unwrap();
    assert_eq!(u64::from(router.front.listen.port()), port(&workload, "front"));
    assert!(!router.front.keys.is_empty() && router.node_key.is_some());
    assert_control(&workload, router.control.as_ref().unwrap());
    for one in [&commands, &router] {
        assert_eq!((&one.fleet, &one.etcd), (&fleet.name, &fleet.etcd));
    }
    assert!(fleet.etcd.endpoints().iter().all(|url| url.starts_with("https://")), "{:?}", fleet.etcd);
}

#[test]
fn a_pod_that_ends_has_time_to_drain_and_says_so_in_a_command_that_is_understood() {
    let folder = Folder::new();
    for (workload, _) in workloads() {
        let stop = list(container(&workload), "/lifecycle/preStop/exec/command");
        let script = stop.last().and_then(Value::as_str).unwrap();
        let (command, sleep) = script.rsplit_once("sleep ").unwrap();
        let grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
        assert!(grace > sleep.parse::<u64>().unwrap() + DRAIN_S, "{script}");
        if workload["kind"] == "Deployment" {
            continue;
        }
        // Nothing listens there, so that the command comes as far as etcd.
        folder.write("fleet.toml", "[fleet]\nname = \"prod\"\netcd = [\"http://127.0.0.1:1\"]\n");
        let words = shlex::split(command.trim().strip_suffix("&&").unwrap()).unwrap();
        let of = |word: &String| match word.as_str() {
            "$NODE_NAME" => "n1".to_owned(),
            "/etc/poorwill/fleet.toml" => "fleet.toml".to_owned(),
            word => word.to_owned(),
        };
        let words: Vec<String> = words.iter().map(of).collect();
        let args: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
        assert!(words[0] == "poorwill" && args.contains(&"n1") && args.contains(&"fleet.toml"), "{words:?}");
        run(&folder, &args).failed(&["127.0.0.1:1"]);
    }
}

#[test]
fn an_endpoint_picker_reads_metrics_that_exist() {
    let picker = named("ConfigMap", "poorwill-epp");
    let config = documents(text(&picker, "/data/config.yaml")).remove(0);
    let engines = list(&config, "/plugins")
        .iter()
        .find_map(|plugin| plugin.pointer("/parameters/engineConfigs")?.as_array())
        .unwrap();
    for (workload, _) in workloads() {
        let labels = &workload["spec"]["template"]["metadata"]["labels"];
        let engine = engines.iter().find(|engine| engine["name"] == labels["llm-d.ai/engine-type"]);
        let engine = engine.unwrap_or_else(|| panic!("no engine for {labels}"));
        assert_eq!(engine["name"], labels["inference.networking.k8s.io/engine-type"]);
        let specs = engine.as_object().unwrap().iter().filter(|(name, _)| name.ends_with("Spec"));
        let names: Vec<&str> =
            specs.filter_map(|(_, spec)| spec.as_str()).filter(|spec| !spec.is_empty()).collect();
        assert!(!names.is_empty());
        for name in names {
            let is_there = match name.strip_prefix("poorwill_fleet_") {
                Some(rest) => ROUTER_METRICS.contains(&format!("registry.register(\"{rest}\", ")),
                // A gauge without labels.
                None => NODE_METRICS.contains(&format!("| `{name}` | gauge |  | ")),
            };
            assert!(is_there, "{name}");
        }
    }
    let used = list(&config, "/schedulingProfiles/0/plugins");
    let types: Vec<&Value> = list(&config, "/plugins").iter().map(|plugin| &plugin["type"]).collect();
    assert!(used.iter().all(|one| types.contains(&&one["pluginRef"])), "{used:?}");
    assert_eq!(named("InferencePool", "poorwill")["spec"]["endpointPickerRef"]["name"], "poorwill-epp");
}

#[test]
fn the_page_says_that_no_cluster_has_run_them() {
    let page = fs::read_to_string(folder().join("README.md")).unwrap();
    assert!(page.contains("No cluster has run them."), "{page}");
    assert!(page.contains(&format!("--from-file={CA} ")), "{page}");
    for file in ["namespace.yaml", "nodes.yaml", "routers.yaml", "endpoint-picker.yaml"] {
        assert!(page.contains(file), "{file}");
    }
}
