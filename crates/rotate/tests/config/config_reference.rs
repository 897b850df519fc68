//! The reference page of the configuration: the keys that the parser knows, and the defaults that it fills in.

use std::fmt::Write as _;
use std::time::Duration;

use poorwill_rotate::config::{Config, Hibernate, Lend, MemorySource};
use poorwill_rotate::measure::DeviceDriver;

/// Key, type, default, meaning.
pub(super) type Key = (&'static str, &'static str, String, &'static str);

const DURATION: &str = "duration";
const SIZE: &str = "size";
const CALL: &str = "`\"METHOD /path\"`, or a table";

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, &|_| Ok("key".to_owned())).map_err(|error| error.to_string())
}

/// The keys of a section, from the error about one that does not exist.
fn known_keys(section: &str) -> Vec<String> {
    let error = parse(&format!("{section}\nno_such_key = 1\n")).unwrap_err();
    let known = error.split_once("expected").unwrap_or_else(|| panic!("{error}")).1;
    known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn duration(duration: Duration) -> String {
    format!("`{}`", humantime::format_duration(duration))
}

fn size(bytes: u64) -> String {
    let (unit, shift) = [("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes.is_multiple_of(1 << shift))
        .unwrap_or(("B", 0));
    format!("`{}{unit}`", bytes >> shift)
}

fn none() -> String {
    "none".to_owned()
}

fn plain(value: impl std::fmt::Display) -> String {
    format!("`{value}`")
}

/// The title of each table, the text before its first key, and its keys.
pub(super) fn sections() -> Vec<(&'static str, &'static str, Vec<Key>)> {
    let config = parse("[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n").unwrap();
    let (front, control, model) = (&config.front, &config.control, &config.models[0]);
    let (rules, limits, canary) = (&model.rules, &model.rules.limits, &model.canary);
    let of_fleet = "[fleet]\nname = \"f\"\nnode = \"n\"\netcd = [\"http://127.0.0.1:2379\"]\n";
    let fleet = parse(&format!("{of_fleet}[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n"));
    let fleet = fleet.unwrap().fleet.unwrap();
    let traced = "[traces]\nendpoint = \"http://127.0.0.1:4318/v1/traces\"\n";
    let traces = parse(&format!("{traced}[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n"));
    let traces = traces.unwrap().traces.unwrap();
    assert_eq!(
        (config.memory, limits.release),
        (MemorySource::Devices(DeviceDriver::Any), limits.find_memory)
    );
    let gpus: Vec<usize> = rules.gpus.iter().map(|gpu| gpu.0).collect();
    let hibernate = Hibernate::default();
    vec![
        (
            "Top level",
            "",
            vec![
                (
                    "macros",
                    "table of texts or numbers",
                    none(),
                    "texts for `${NAME}` in any text of the file; `${MODEL}` is the model's name, `${PORT}` the port of its `url`, `${env.NAME}` a variable of the environment, and `$${` stands for `${`",
                ),
                (
                    "state",
                    "path",
                    none(),
                    "folder for state that survives the service: which engines run, and each model's first answer",
                ),
                ("memory", "table", none(), "how GPU memory is measured"),
                ("hibernate", "table", none(), "how sleeping engines leave their GPUs; none does without it"),
                (
                    "lend",
                    "table",
                    none(),
                    "has engines [lend](../lend.md#in-a-rotation) what they hold while they sleep; none does without it",
                ),
                ("fleet", "table", none(), "the [fleet](../fleet.md) of which this rotation is a node"),
                ("front", "table", none(), "the listener for clients"),
                ("control", "table", none(), "the listener for operators"),
                ("traces", "table", none(), "the export of traces; none without it"),
                ("every_model", "table", none(), "rules of every model that does not set its own"),
                ("model", "array of tables", none(), "the models; at least one"),
                (
                    "selector",
                    "array of tables",
                    none(),
                    "names for several models, of which each request gets one",
                ),
                (
                    "profile",
                    "table of tables",
                    none(),
                    "profiles by name, such as `[profile.coding]` with `coder = \"qwen\"`: while an operator has chosen it, `coder` stands for `qwen` in requests, before all other names; `\"\"` stands for no model",
                ),
            ],
        ),
        (
            "[front]",
            "[front]",
            vec![
                (
                    "listen",
                    "address and port",
                    plain(front.listen),
                    "one that other machines can reach needs `keys`",
                ),
                (
                    "certificate",
                    "path",
                    none(),
                    "PEM file of the listener's certificate, with those between it and its CA; with it, the listener speaks only TLS. Changed files are read again for the next connection",
                ),
                ("certificate_key", "path", none(), "PEM file of its key, without a passphrase"),
                (
                    "clients_ca",
                    "path",
                    none(),
                    "PEM file of CAs; each client then needs a certificate of one of them, for `clientAuth`",
                ),
                (
                    "keys",
                    "array of `env:NAME` or `file:PATH`, or of tables",
                    none(),
                    "where accepted API keys are stored; a table has `source`, `name` (for logs; keys of one name count together) `requests_max` (most requests at a time) and `priority` (added to the models')",
                ),
                (
                    "origins",
                    "array of texts",
                    none(),
                    "origins of pages that may use the front, such as `https://chat.example`, or `*` for all",
                ),
                (
                    "paths",
                    "array of texts",
                    none(),
                    "paths that are forwarded besides the usual ones, such as `/generate`; a prefix ends in `/`. Administration of engines stays closed",
                ),
                ("body_max", SIZE, size(front.body_max_bytes), "longest request body"),
                (
                    "body_time_max",
                    DURATION,
                    duration(front.body_time_max),
                    "longest time for a request body; one that takes more than a second takes one of half of the places of `requests_max`",
                ),
                (
                    "bodies_max",
                    SIZE,
                    size(front.bodies_max_bytes),
                    "most bytes of all request bodies at a time, until they are sent to their engines",
                ),
                ("head_max", SIZE, size(front.head_max_bytes), "longest request head"),
                (
                    "requests_max",
                    "number",
                    plain(front.requests_max),
                    "most requests at a time, including waiting ones",
                ),
                (
                    "connections_max",
                    "number",
                    "half of the file descriptors, after a reserve".to_owned(),
                    "most connections at a time; where all are taken, those without a request are closed for new ones, first those of an address with over a sixteenth",
                ),
                ("keep_alive", DURATION, none(), "interval of comments to clients that wait for a stream"),
                (
                    "websocket_idle_max",
                    DURATION,
                    duration(front.websocket_idle_max),
                    "longest time of a WebSocket without data; pings are none",
                ),
                (
                    "passthrough",
                    "boolean",
                    plain(front.passthrough),
                    "whether `/engines/NAME/PATH` reaches all paths of engines, for their own pages; among them are those that stop an engine or put it to sleep",
                ),
            ],
        ),
        (
            "[fleet]",
            "[fleet]",
            vec![
                ("name", "text", "required".to_owned(), "the fleet"),
                ("node", "text", "the machine's name".to_owned(), "this node; no other one has its name"),
                ("etcd", "array of URLs", "required".to_owned(), "etcd's members"),
                ("etcd_ca", "path", none(), "PEM file of the CAs of members at `https://`"),
                (
                    "etcd_certificate",
                    "path",
                    none(),
                    "PEM file of this node's certificate, where etcd asks for one (`--client-cert-auth`)",
                ),
                ("etcd_certificate_key", "path", none(), "PEM file of its key"),
                ("etcd_user", "text", none(), "the user of this node, where etcd has users (`auth enable`)"),
                ("etcd_password", "`env:NAME` or `file:PATH`", none(), "where its password is stored"),
                (
                    "lease",
                    DURATION,
                    duration(fleet.lease),
                    "how long the node counts as alive behind its last sign of life; whole seconds",
                ),
                ("domain", "text", "`\"\"`".to_owned(), "what fails together with it, such as a rack"),
                (
                    "front_url",
                    "URL",
                    "`listen` of `[front]`".to_owned(),
                    "where routers reach the front; `https://` where that has a certificate",
                ),
                ("control_url", "URL", "`listen` of `[control]`".to_owned(), "where operators reach control"),
                (
                    "prepare",
                    "boolean",
                    plain(fleet.prepare),
                    "whether cold engines of warm models are started before a request comes",
                ),
            ],
        ),
        (
            "[control]",
            "[control]",
            vec![
                (
                    "listen",
                    "address and port",
                    plain(control.listen),
                    "one that other machines can reach needs `keys`",
                ),
                ("keys", "array of `env:NAME` or `file:PATH`", none(), "where accepted API keys are stored"),
                (
                    "open_metrics",
                    "boolean",
                    plain(control.metrics_are_open),
                    "whether `/metrics` needs no key; it has the names of models",
                ),
            ],
        ),
        (
            "[traces]",
            "[traces]",
            vec![
                (
                    "endpoint",
                    "`http://HOST:PORT/PATH`",
                    "required".to_owned(),
                    "OTLP collector, such as `http://127.0.0.1:4318/v1/traces`; gets JSON",
                ),
                (
                    "sample",
                    "number from 0 to 1",
                    plain(traces.sample),
                    "share of requests with a trace; where a client has one, it decides",
                ),
                ("service", "text", plain(&traces.service), "the name of this service in traces"),
                (
                    "headers",
                    "table of `env:NAME` or `file:PATH`",
                    none(),
                    "additional headers, by where their values are stored",
                ),
            ],
        ),
        (
            "[memory]",
            "[memory]",
            vec![
                (
                    "measure",
                    "`devices`, `nvml`, `amdgpu`, `intel`, `unified`, `declared` or `processes`",
                    plain("devices"),
                    "whose figures are read: the first of NVML, amdgpu and Intel's drivers that has a GPU, or one by \
                     name; `unified` is the computer's memory, which its GPU shares; with `declared` nothing is \
                     measured, and needs are believed; `processes` are the engines', on simulated GPUs",
                ),
                (
                    "gpu",
                    SIZE,
                    none(),
                    "size of each GPU; required for `declared` and `processes`, and for `intel` where its driver \
                     does not report it",
                ),
                (
                    "folder",
                    "path",
                    none(),
                    "where simulated GPUs lend: GPU 0's engines share the folder `gpu0` in it as their host device",
                ),
            ],
        ),
        (
            "[hibernate]",
            "[hibernate]",
            vec![
                (
                    "after",
                    DURATION,
                    none(),
                    "how long an engine sleeps before it is taken off its GPUs, once no other model is waited for there; without it, only where memory is short",
                ),
                (
                    "residue_max",
                    SIZE,
                    none(),
                    "most that sleeping engines may hold on a GPU together; beyond it, the longest idle ones hibernate, once no other model is waited for there",
                ),
                (
                    "host_max",
                    SIZE,
                    none(),
                    "most host memory that hibernating engines may take for what they held",
                ),
                (
                    "wait_max",
                    DURATION,
                    duration(hibernate.wait_max),
                    "how long an engine's work on its GPUs may take to end before it hibernates; less than `sleep_max`",
                ),
                (
                    "helper",
                    "array of texts",
                    "`poorwill hibernate --serve`".to_owned(),
                    "program and arguments of the helper process that does it; the default has `--journal STATE/hibernate` with a `state` folder",
                ),
            ],
        ),
        (
            "[lend]",
            "[lend]",
            vec![
                (
                    "broker",
                    "path",
                    "this user's: `poorwill/broker-v1.sock` in `$XDG_RUNTIME_DIR`, or else `/tmp/poorwill-UID/broker-v1.sock`".to_owned(),
                    "whole path of the broker's socket; the service serves it, unless another process does",
                ),
                (
                    "peer_copies",
                    "boolean",
                    plain(Lend::default().peer_copies),
                    "whether engines keep copies in the idle memory of the other GPUs that they see ([how](../lend.md#copies-on-neighbours))",
                ),
            ],
        ),
        (
            "[[model]]",
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"",
            vec![
                ("name", "text", "required".to_owned(), "the name in requests"),
                ("aliases", "array of texts", none(), "other names in requests"),
                (
                    "adapters",
                    "array of texts",
                    none(),
                    "names of adapters (LoRA), which the engine knows by the same names; requests for one go to the model",
                ),
                ("served_as", "text", "`name`".to_owned(), "the name that the engine uses"),
                (
                    "parameters",
                    "table",
                    none(),
                    "fields that JSON bodies get, each instead of the client's whole field; any but `model` and `stream`; forms stay as they are",
                ),
                (
                    "strip",
                    "array of texts",
                    none(),
                    "fields that are removed from JSON bodies, such as `temperature`; any but `model` and `stream`",
                ),
                (
                    "variants",
                    "table of tables",
                    none(),
                    "more parameters for requests by one name, which come before those of `parameters`; a new name becomes one of `aliases`",
                ),
                ("display_name", "text", none(), "`name` in the list of models"),
                ("description", "text", none(), "`description` in the list of models"),
                (
                    "metadata",
                    "table",
                    none(),
                    "more fields of its entries in the list of models, such as `max_model_len`",
                ),
                (
                    "listed",
                    "boolean",
                    plain(!model.card.is_hidden),
                    "whether the list of models has its names",
                ),
                (
                    "engine",
                    "`vllm`, `sglang` or `http`",
                    plain(model.engine.as_str()),
                    "the kind of engine; `http` is any other, asked as `[model.http]` says",
                ),
                ("url", "`http://HOST:PORT`", "required".to_owned(), "the engine's address"),
                (
                    "level",
                    "1 or 2",
                    plain(model.level),
                    "sleep level: 1 keeps the weights in host memory, 2 drops them; not for `http`",
                ),
                (
                    "command",
                    "array of texts",
                    none(),
                    "program and arguments that start the engine; without it, the service never starts or stops it",
                ),
                (
                    "stop_command",
                    "array of texts",
                    none(),
                    "program and arguments that end the engine, such as `docker stop`, within half of `stop_max`; signals follow; `${PID}` is the id of its first process",
                ),
                (
                    "environment",
                    "table of texts",
                    none(),
                    "additional environment variables of both commands; those that hold the service's keys are not inherited",
                ),
                ("folder", "path", none(), "working directory of both commands"),
                ("log", "path", none(), "file for the engine's output"),
                ("gpus", "array of numbers", plain(format!("{gpus:?}")), "NVML positions of its GPUs"),
                (
                    "need",
                    SIZE,
                    none(),
                    "least that it needs of each GPU; more is learnt, and another value has it learnt anew",
                ),
                ("http", "table", none(), "see below"),
                ("rules", "table", none(), "see below"),
                ("canary", "table", none(), "see below"),
                (
                    "log_max",
                    SIZE,
                    size(64 << 20),
                    "size at which it is renamed to end in `.1`, over the one before, or else cut",
                ),
            ],
        ),
        (
            "[model.http]",
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n[model.http]",
            vec![
                (
                    "health",
                    "path",
                    plain(&model.http.health),
                    "path that answers 2xx once the engine serves, awake or asleep",
                ),
                (
                    "sleep",
                    CALL,
                    none(),
                    "releases the GPU memory; 2xx means done; without it, the engine is stopped and started",
                ),
                ("wake", CALL, none(), "takes the memory again; required with `sleep`"),
                ("asleep", CALL, none(), "reports whether it sleeps; required with `sleep`"),
            ],
        ),
        (
            "[model.http.sleep] and [model.http.wake]",
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n[model.http.sleep]",
            vec![
                ("call", "method and path", "required".to_owned(), "such as `POST /api/generate`"),
                ("body", "table", none(), "JSON body, such as `{ model = \"one\", keep_alive = 0 }`"),
            ],
        ),
        (
            "[model.http.asleep]",
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n[model.http.asleep]",
            vec![
                ("call", "method and path", "required".to_owned(), "such as `GET /api/ps`"),
                ("body", "table", none(), "JSON body"),
                ("at", "JSON pointer", "`/is_sleeping`".to_owned(), "where the answer has the state"),
                ("is", "any value", "`true`".to_owned(), "what is there while it sleeps"),
            ],
        ),
        (
            "[[selector]]",
            "[[selector]]\nname = \"any\"",
            vec![
                ("name", "text", "required".to_owned(), "the name in requests"),
                (
                    "targets",
                    "array of texts",
                    "required".to_owned(),
                    "names of models, aliases or adapters, the preferred ones first; a quarantined one is passed over if another is not",
                ),
                (
                    "strategy",
                    "`ready`, `first` or `spillover`",
                    plain("ready"),
                    "takes the first target that is ready, else the first on its way, else the first; or always the first; or the first with fewer than `requests`, else the one with the fewest",
                ),
                (
                    "requests",
                    "number",
                    none(),
                    "waiting and running requests of a target before the next one gets any; required for `spillover`",
                ),
                ("display_name", "text", none(), "`name` in the list of models"),
                ("description", "text", none(), "`description` in the list of models"),
                ("metadata", "table", none(), "more fields of its entry in the list of models"),
                ("listed", "boolean", plain(true), "whether the list of models has it"),
            ],
        ),
        (
            "[model.canary]",
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n[model.canary]",
            vec![
                (
                    "kind",
                    "`completion`, `chat`, `embedding`, `rerank`, `get` or `none`",
                    none(),
                    "test request before others are admitted; without it, the first of completion, chat, embedding and rerank that the engine serves, and from then on no other; `none` admits requests to an engine that came back wrong",
                ),
                (
                    "prompt",
                    "text",
                    plain(&canary.prompt),
                    "text to complete, answer, embed, or rank documents for",
                ),
                (
                    "tokens",
                    "number",
                    plain(canary.tokens),
                    "length of a completion or a chat's answer, in tokens",
                ),
                (
                    "when",
                    "`before` or `beside`",
                    "`beside` where the engine has Poorwill's sleep mode".to_owned(),
                    "before the first requests after a plain wake at level 1, or beside them, for texts that are compared with the first one: streams wait for its first token then, whole answers for its end, and what a wrong one has begun breaks off; after starts and all other wakes it comes before; Poorwill's sleep mode is seen by `POORWILL_SLEEP_MODE` in `environment`, or by `--sleep-mode-backend poorwill`",
                ),
                (
                    "expect",
                    "text",
                    none(),
                    "text that the answer has to contain; otherwise a text has to equal the first one, an embedding to have a cosine of 0.99 with it, and scores to be as near as 0.02; after an upgrade that changes answers, remove the kept one from `state` and start the service again, or change `prompt`",
                ),
                ("path", "path", none(), "path that `get` asks for; it has to answer 200"),
            ],
        ),
        (
            "[every_model] and [model.rules]",
            "[every_model]",
            vec![
                (
                    "sleeps",
                    "boolean",
                    plain(rules.can_sleep),
                    "whether the engine can sleep; otherwise it is stopped and started, and only has to be healthy; one of the kind `http` sleeps only with calls for it",
                ),
                (
                    "hibernates",
                    "boolean",
                    plain(true),
                    "with `[hibernate]`, whether an engine that sleeps and has a `command` is taken off its GPUs",
                ),
                ("hibernate_after", DURATION, "`after`".to_owned(), "instead of `after` of `[hibernate]`"),
                (
                    "pinned",
                    "boolean",
                    plain(rules.is_pinned),
                    "keeps the model awake while idle and while others wait",
                ),
                (
                    "preload",
                    "boolean",
                    "`pinned`".to_owned(),
                    "wakes or starts the model with the service, and after others for which it left, if memory is free; no other model leaves for it",
                ),
                (
                    "together",
                    "text",
                    none(),
                    "name of a set: while one of it is in use, the others leave last, and when one comes up, the others do where memory is free",
                ),
                (
                    "keep_weight",
                    "number",
                    plain(rules.keep_weight),
                    "how much rather it stays when one has to leave: multiplies what it takes to have it back, and its requests; 0 leaves first",
                ),
                (
                    "priority",
                    "number",
                    plain(rules.priority),
                    "of its requests, added to that of their key; a point counts like a second of waiting, for the next model and within a queue; from -3600 to 3600",
                ),
                ("idle_max", DURATION, none(), "sleeps after this time without requests"),
                ("residence_min", DURATION, duration(rules.residence_min), "shortest time awake"),
                (
                    "turn_per_swap",
                    "number",
                    plain(rules.turn_per_swap),
                    "shortest time awake while it has requests, in multiples of its measured swap and the end of its last requests; at most `turn_max`; 0: turns and evictions follow time alone",
                ),
                (
                    "grace",
                    DURATION,
                    duration(rules.grace),
                    "while others wait, how long this one may be idle if its pauses are usually shorter; at most until its turn is over",
                ),
                (
                    "turn_max",
                    DURATION,
                    duration(rules.turn_max),
                    "longest turn while others wait; it ends earlier when more requests wait for them than this one has",
                ),
                (
                    "slice_max",
                    DURATION,
                    "`2s` with Poorwill's sleep mode, else none".to_owned(),
                    "longest turn of a vLLM at level 1 while others wait, after which its requests are kept in its sleep, and go on in its next turn; nine swaps, and at least `turn_per_swap`; 0: they end first",
                ),
                ("queue_max", "number", plain(rules.queue_max), "most waiting requests"),
                ("wait_max", DURATION, duration(rules.wait_max), "longest wait of a request"),
                ("running_max", "number", plain(rules.running_max), "most running requests"),
                ("look_every", DURATION, duration(rules.look_every), "interval of health checks while ready"),
                (
                    "looks_max",
                    "number",
                    plain(rules.looks_max),
                    "failed health checks in sequence before the engine is stopped; 0: they do not count",
                ),
                (
                    "slack",
                    SIZE,
                    size(rules.slack_bytes),
                    "by how much a sleep may release less than expected, on each GPU",
                ),
                (
                    "pause_min",
                    DURATION,
                    duration(rules.pause_min),
                    "first quarantine, or pause after a failed hibernation; doubles with each consecutive failure of the engine",
                ),
                ("pause_max", DURATION, duration(rules.pause_max), "longest quarantine"),
                (
                    "drain_max",
                    DURATION,
                    duration(limits.drain),
                    "how long running requests may take before they are aborted",
                ),
                (
                    "sleep_max",
                    DURATION,
                    duration(limits.sleep),
                    "timeout of the engine's sleep, and of its hibernation",
                ),
                ("release_max", DURATION, duration(limits.release), "how long memory may take to come back"),
                (
                    "wake_max",
                    DURATION,
                    duration(limits.wake),
                    "timeout of the engine's wake, and of its return from hibernation",
                ),
                ("canary_max", DURATION, duration(limits.canary), "timeout of the canary"),
                ("start_max", DURATION, duration(limits.start), "timeout of starting the engine"),
                ("stop_max", DURATION, duration(limits.stop), "timeout of stopping the engine"),
                (
                    "first_byte_max",
                    DURATION,
                    none(),
                    "how long the engine may send no byte of an answer's body; then the request gets 504, and the engine is looked at",
                ),
            ],
        ),
    ]
}

fn page() -> String {
    let mut text = super::reference::head("config_reference");
    text += "# Configuration of a rotation\n\nOne TOML file. An unknown key is an error that names the nearest known key.\n\n\
             - A duration is a text such as `\"90s\"`, `\"1m 30s\"` or `\"250ms\"`, at most a year.\n\
             - A size is a text such as `\"40GiB\"`, or a number of bytes.\n";
    for (title, section, keys) in sections() {
        let mut known = known_keys(section);
        let mut listed: Vec<String> = keys.iter().map(|(name, ..)| (*name).to_owned()).collect();
        known.sort();
        listed.sort();
        assert_eq!(listed, known, "the keys of {title}");
        let title =
            if section.is_empty() { title.to_owned() } else { title.replace('[', "`[").replace(']', "]`") };
        let title = title.replace("`[`[", "`[[").replace("]`]`", "]]`");
        write!(text, "\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n").unwrap();
        for (name, kind, default, meaning) in keys {
            writeln!(text, "| `{name}` | {kind} | {default} | {meaning} |").unwrap();
        }
    }
    text
}

#[test]
fn config_reference() {
    super::reference::check("rotation-config.md", &page());
}
