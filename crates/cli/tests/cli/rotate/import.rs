//! `poorwill rotate import`: what a configuration of llama-swap becomes, and what is said of the rest.

use std::fs;
use std::time::Duration;

use poorwill_rotate::config::{CanaryKind, Config, EngineKind, Model};
use serde_json::{Value, json};

use super::fixture::{Fixture, ran};
use crate::support::Ran;

/// With a command that is no program, but may be split as one.
const FULL: &str = r#"
startPort: 9100
healthCheckTimeout: 90
globalTTL: 600
unloadTimeout: 20
logLevel: debug
macros:
  "server": >
    /opt/llama-server --port ${PORT}
    --ctx-size ${ctx}
  ctx: 4096
  folder: "${env.HOME}/models"
apiKeys:
  - sk-secret-one
  - "${env.TEAM_KEY}"
hooks: {on_startup: {preload: [small, "gone"]}}
routing:
  router:
    settings:
      groups:
        always: {persistent: true, swap: false, exclusive: false, members: [small]}
  scheduler: {use: fifo, settings: {fifo: {priority: {small: 5}}}}
profiles:
  night: {description: Less, pins: {coder: small, painter: ~, other: gone}}
selectors:
  any: {strategy: spillover, targets: [small, z, peer/x], settings: {spillover: 4}, name: Any}
models:
  zebra:
    cmd: |
      # a comment with ${no_macro}
      ${server} \
      -m '${folder}/a b.gguf' --host "0.0.0.0"
      # and another
      --alias ${MODEL_ID}
    macros: {ctx: 16384}
    aliases: [z, "${MODEL_ID}-chat"]
    env: ["CUDA_VISIBLE_DEVICES=1,0", "HF_TOKEN=hf_very_secret", "PLAIN=x=y ${env.MORE}"]
    ttl: 60
    unloadTimeout: 5
    concurrencyLimit: 4
    useModelName: org/zebra
    name: Zebra
    compat: {ignoreWebsockets: true}
  small:
    cmd: vllm serve org/small --port ${PORT} --api-key sk-secret-two
    ttl: 0
  sleeper:
    cmd: vllm serve org/sleeper --port 7001 --enable-sleep-mode
    proxy: http://127.0.0.1:7001
    env: [VLLM_SERVER_DEV_MODE=1]
  fixed:
    cmd: docker run --name ${MODEL_ID} -p ${PORT}:80 image sh -c 'echo "${X:-1}"'
    proxy: "http://127.0.0.1:${PORT}/base/"
    cmdStop: docker stop ${MODEL_ID}
    checkEndpoint: /ready
    filters:
      stripParams: "top_p, temperature, model, top_p, stream"
      setParams: {temperature: 0.5, model: no, stream: true, stop: ["a", 1], nothing: ~}
      setParamsByID:
        "${MODEL_ID}:high": {chat_template_kwargs: {effort: high}}
  remote:
    cmd: sh
    proxy: https://elsewhere.example
"#;

struct Imported {
    fixture: Fixture,
    ran: Ran,
}

impl Imported {
    fn new(yaml: &str, more: &[&str]) -> Self {
        let fixture = Fixture::new("0", Vec::new());
        fixture.folder.write("swap.yaml", yaml);
        let args = [&["rotate", "import", "swap.yaml"], more].concat();
        let ran = ran(fixture.command(&args).env("MINUTE", "60").env_remove("GONE"));
        Self { fixture, ran }
    }

    /// The configuration on standard output.
    fn config(&self) -> Config {
        assert_eq!(self.ran.code, 0, "{:?}", self.ran);
        let variable = |source: &str| Ok(format!("<{source}>"));
        Config::parse(&self.ran.stdout, &variable)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.ran.stdout))
    }

    fn warns(&self, words: &str) {
        let is_there = self
            .ran
            .stderr
            .lines()
            .any(|line| line.starts_with("warning: swap.yaml: line ") && line.contains(words));
        assert!(is_there, "`{words}` is not in: {}", self.ran.stderr);
        self.says(words);
    }

    /// In the new file. Comments have other ends of lines.
    fn says(&self, words: &str) {
        let text = |text: &str| text.replace('#', " ").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text(&self.ran.stdout).contains(&text(words)), "`{words}` is not in: {}", self.ran.stdout);
    }
}

fn model<'c>(config: &'c Config, name: &str) -> &'c Model {
    &config.models[config.model(name).unwrap_or_else(|| panic!("there is no {name}")).0]
}

fn command(model: &Model) -> Vec<&str> {
    model.start.as_ref().unwrap().command.iter().map(String::as_str).collect()
}

#[test]
fn models_keep_their_commands_ports_and_limits() {
    let imported = Imported::new(FULL, &[]);
    let config = imported.config();
    let zebra = model(&config, "zebra");
    // In the order of their names, among those whose commands have a port.
    assert_eq!(zebra.url, "http://localhost:9102");
    assert_eq!(
        command(zebra),
        [
            "/opt/llama-server",
            "--port",
            "9102",
            "--ctx-size",
            "16384",
            "-m",
            "<env:HOME>/models/a b.gguf",
            "--host",
            "0.0.0.0",
            "--alias",
            "zebra"
        ]
    );
    assert_eq!(
        (&zebra.aliases[..], zebra.served_as.as_str()),
        (&["z".to_owned(), "zebra-chat".to_owned()][..], "org/zebra")
    );
    let environment = &zebra.start.as_ref().unwrap().environment;
    assert_eq!(environment["PLAIN"], "x=y <env:MORE>");
    assert_eq!(environment["HF_TOKEN"], "<env:HF_TOKEN>");
    assert_eq!(zebra.rules.gpus.iter().map(|gpu| gpu.0).collect::<Vec<_>>(), [1, 0]);
    let rules = &zebra.rules;
    let seconds = |time: Duration| time.as_secs();
    assert_eq!((rules.idle_max.map(seconds), seconds(rules.limits.stop)), (Some(60), 5));
    assert_eq!((seconds(rules.limits.start), rules.running_max), (90, 4));
    assert!(!rules.can_sleep && !rules.preload && !rules.is_pinned);

    let small = model(&config, "small");
    assert_eq!(command(small), ["vllm", "serve", "org/small", "--port", "9101"]);
    assert_eq!((small.rules.idle_max, seconds(small.rules.limits.stop)), (None, 20));
    assert!(small.rules.preload && small.rules.is_pinned && !small.rules.can_sleep);
    let sleeper = model(&config, "sleeper");
    assert!(
        sleeper.rules.can_sleep
            && sleeper.engine == EngineKind::Vllm
            && sleeper.url == "http://127.0.0.1:7001"
    );
    assert_eq!(sleeper.rules.idle_max.map(seconds), Some(600));
    let fixed = model(&config, "fixed");
    assert_eq!(fixed.url, "http://127.0.0.1:9100");
    assert_eq!(command(fixed)[..6], ["docker", "run", "--name", "fixed", "-p", "9100:80"]);
    assert_eq!(command(fixed)[9], "echo \"${X:-1}\"");
    assert_eq!(config.model("remote"), None);
    assert!(
        config.front.keys[0].matches("<env:POORWILL_KEY_1>")
            && config.front.keys[1].matches("<env:TEAM_KEY>")
    );
}

#[test]
fn nothing_is_dropped_silently_and_no_secret_is_written() {
    let imported = Imported::new(FULL, &[]);
    for words in [
        "set the variable POORWILL_KEY_1 to this key of apiKeys",
        "logLevel is not carried over: the variable POORWILL_LOG sets the level",
        "preload names `gone`, which is no model here",
        "the group always: its models are pinned",
        "model `zebra`: set the variable HF_TOKEN",
        "model `zebra`: compat is not carried over",
        "model `small`: --api-key is left out of its command",
        "model `fixed`: its engine is asked without /base, the path of its proxy",
        "model `remote` is not carried over: its proxy does not begin with http://",
    ] {
        imported.warns(words);
    }
    // Of a model's place, the line of its key.
    let line = FULL.lines().position(|line| line.contains("compat:")).unwrap() + 1;
    imported.warns(&format!("line {line}, column 5: model `zebra`: compat"));
    for secret in ["sk-secret-one", "sk-secret-two", "hf_very_secret"] {
        assert!(!imported.ran.stdout.contains(secret) && !imported.ran.stderr.contains(secret), "{secret}");
    }
    for words in [
        "\"${PORT}\"",
        "\"${env.HOME}/models/a b.gguf\"",
        "which is much faster, add --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment",
    ] {
        imported.says(words);
    }
}

#[test]
fn keys_with_a_counterpart_are_carried_over() {
    let imported = Imported::new(FULL, &[]);
    for words in [
        "engine = \"http\"",
        "health = \"/ready\"",
        "stop_command = [\"docker\", \"stop\", \"fixed\"]",
        "display_name = \"Zebra\"",
        "temperature = 0.5",
        "strip = [\"top_p\"]",
        "[profile.night]\ncoder = \"small\"\npainter = \"\"\n",
        "targets = [\"small\", \"z\"]",
        "strategy = \"spillover\"\nrequests = 4",
        "priority = 5",
        "[model.variants.\"fixed:high\"]\n",
    ] {
        assert!(imported.ran.stdout.contains(words), "`{words}` is not in: {}", imported.ran.stdout);
    }
}

/// With a model in two sets, which is in the larger one here.
#[test]
fn sets_and_groups_without_swaps_stay_together() {
    let models = "
models:
  a: {cmd: 'x ${PORT}', aliases: [{id: first, name: First}]}
  b: {cmd: 'x ${PORT}'}
  c: {cmd: 'x ${PORT}'}
  d: {cmd: 'x ${PORT}'}
  e: {cmd: 'x ${PORT}'}
";
    let matrix = "
matrix:
  vars: {v: c}
  evict_costs: {v: 50, gone: 2}
  sets: {pair: a & e, many: +base & v, base: (a & b), rest: d & e, either: a | d, loop: +loop}
";
    let imported = Imported::new(&format!("{models}{matrix}"), &[]);
    let config = imported.config();
    let rules = |name: &str| {
        let rules = &model(&config, name).rules;
        (rules.together.as_deref().map(ToString::to_string), rules.keep_weight)
    };
    let many = || Some("many".to_owned());
    assert_eq!([rules("first"), rules("b"), rules("c")], [(many(), 1), (many(), 1), (many(), 50)]);
    assert_eq!([rules("d"), rules("e")], [1, 1].map(|weight| (Some("rest".to_owned()), weight)));
    for words in [
        "evict_costs names `gone`, which is no model here",
        "the set many: its models are `together`",
        "the set pair is not carried over: less than two of its models",
        "the set either is not carried over: it has alternatives",
        "the set loop is not carried over",
        "model `a`: name is not carried over: an alias is shown as its model is",
    ] {
        imported.warns(words);
    }

    let groups = "
groups:
  both: {swap: false, members: [a, first, b, gone]}
  turns: {members: [c, d]}
";
    let imported = Imported::new(&format!("{models}{groups}"), &[]);
    let config = imported.config();
    let together = |name: &str| model(&config, name).rules.together.is_some();
    assert_eq!(["a", "b", "c", "d", "e"].map(together), [true, true, false, false, false]);
    imported.warns("the group both lacks models that are not here, or in another: gone");
    imported.warns("the group turns is not carried over");
}

#[test]
fn a_file_is_written_once_and_is_ready_to_be_checked() {
    let yaml = "models:\n  one:\n    cmd: sh -c true ${PORT}\n";
    let imported = Imported::new(yaml, &["--config", "new.toml"]);
    let text = imported.ran.stdout.clone();
    assert_eq!(text, "wrote new.toml: 1 model\nnext: poorwill rotate check --config new.toml\n");
    assert_eq!((imported.ran.code, imported.ran.stderr.as_str()), (0, ""));
    let checked = imported.fixture.run(&["rotate", "check", "--config", "new.toml"]);
    assert!(
        checked.stdout.contains("model one: ") && checked.stdout.contains("http://localhost:5800"),
        "{checked:?}"
    );
    let again = ["rotate", "import", "swap.yaml", "--config", "new.toml"];
    imported.fixture.run(&again).failed(&["cannot write new.toml", "it is not replaced"]);
    let report = imported.fixture.run(&["rotate", "import", "swap.yaml", "--json"]).json();
    crate::json::expect("poorwill rotate import", &report);
    assert_eq!((&report["models"], &report["warnings"]), (&json!(["one"]), &json!([])));
    let written = fs::read_to_string(imported.fixture.folder.join("new.toml")).unwrap();
    assert_eq!(report["configuration"], Value::from(written));
    imported.fixture.run(&["rotate", "import", "gone.yaml"]).failed(&["cannot read gone.yaml"]);
}

#[test]
fn mistakes_are_named_with_their_place() {
    for (yaml, words) in [
        ("models:\n  a: [\n", "swap.yaml: line 2, column 6: it is no YAML"),
        ("", "the file is empty"),
        ("just a text", "line 1, column 1: this is no configuration of llama-swap: it has no keys"),
        ("a: 1", "this is no configuration of llama-swap: it has no models"),
        ("models:\n  a:\n    proxy: http://x:1\n", "line 2, column 3: model `a` has no cmd"),
        ("models:\n  a:\n    cmd: x ${gone} ${PORT}\n", "line 3, column 10: there is no macro `gone`"),
        (
            "macros:\n  a: ${b}\n  b: ${a}\nmodels:\n  m: {cmd: '${a}'}\n",
            "line 2, column 3: the macro `a` contains itself, by a, b",
        ),
        (
            "models:\n  a:\n    cmd: x 'y\n",
            "line 3, column 10: model `a`: a quotation in its command has no end",
        ),
        ("models:\n  a:\n    cmd: x\n", "none of its models can be carried over"),
        (
            "models:\n  a:\n    cmd: x ${PORT}\n    ttl: soon\n",
            "line 4, column 10: `soon` is no whole number",
        ),
        ("models:\n  a:\n    cmd: x ${PORT}\n    ttl: ${env.GONE}\n", "the variable GONE is not set"),
        ("startPort: 65535\nmodels:\n  a: {cmd: '${PORT}'}\n  b: {cmd: '${PORT}'}\n", "not enough ports"),
        ("startPort: 0\nmodels:\n  a: {cmd: '${PORT}'}\n", "line 1, column 12: startPort is `0`"),
        ("models:\n  a: {cmd: x}\n  a: {cmd: y}\n", "line 3, column 3: the key `a` is there twice"),
        ("models:\n  a: {cmd: x, proxy: 'https://a'}\n", "none of its models can be carried over"),
    ] {
        let ran = Imported::new(yaml, &[]).ran;
        let lines: Vec<&str> = ran.stderr.lines().collect();
        let last = lines.last().unwrap_or_else(|| panic!("{yaml}: {ran:?}"));
        assert!(ran.code == 1 && last.starts_with("error: ") && last.contains(words), "{yaml}: {ran:?}");
    }
}

#[test]
fn numbers_and_types_follow_llama_swaps_rules() {
    let yaml = "
globalTTL: 30
healthCheckTimeout: 1
models:
  a:
    cmd: x ${PORT}
    ttl: -1
  b:
    cmd: y ${PORT}
    ttl: ${env.MINUTE}
    unloadTimeout: 0
    concurrencyLimit: 0
    checkEndpoint: none
    aliases: []
    description: ~
";
    let imported = Imported::new(yaml, &[]);
    let config = imported.config();
    let idle = |name: &str| model(&config, name).rules.idle_max.map(|time| time.as_secs());
    assert_eq!((idle("a"), idle("b")), (Some(30), Some(60)));
    // Less than 15 s are 15 s there.
    assert_eq!(model(&config, "a").rules.limits.start.as_secs(), 15);
    assert_eq!(model(&config, "b").rules.limits.stop, Duration::from_secs(30));
    imported.warns("model `b` has no health check; /v1/models is asked instead");
    imported.warns("line 11, column 5: model `b`: unloadTimeout is 0, which is the file's");
    let imported = Imported::new("unloadTimeout: 0\nmodels: {a: {cmd: 'x ${PORT}'}}\n", &[]);
    imported.warns("line 1, column 1: unloadTimeout is not carried over: 0 stands for ten seconds there");
}

#[test]
fn engines_without_texts_are_asked_for_their_health_page() {
    let yaml = "
models:
  ears: {cmd: '/opt/whisper-server --port ${PORT}', checkEndpoint: /inference}
  eyes: {cmd: 'draw ${PORT}', capabilities: {out: [image]}}
  ranks: {cmd: 'order ${PORT}', capabilities: {reranker: true}}
  talks: {cmd: 'talk ${PORT} --draft-with-whisper', capabilities: {out: [text, audio]}}
  plain: {cmd: 'talk ${PORT}'}
";
    let config = Imported::new(yaml, &[]).config();
    let canary = |name: &str| {
        let canary = &model(&config, name).canary;
        (canary.kind, canary.path.clone())
    };
    assert_eq!(canary("ears"), (Some(CanaryKind::Get), Some("/inference".to_owned())));
    assert_eq!(canary("eyes"), (Some(CanaryKind::Get), Some("/health".to_owned())));
    assert_eq!(canary("ranks"), (Some(CanaryKind::Rerank), None));
    assert_eq!((canary("talks"), canary("plain")), ((None, None), (None, None)));
}

/// llama-swap runs one engine at a time, so that all may have one port.
#[test]
fn engines_with_one_port_get_their_own() {
    let yaml = "
models:
  a: {cmd: 'x --port 9999', proxy: 'http://127.0.0.1:9999'}
  b: {cmd: 'x --port=9999 --host 127.0.0.1:9999', proxy: 'http://127.0.0.1:9999'}
  c: {cmd: 'x --listen-port 9999'}
  d: {cmd: 'x', proxy: 'http://127.0.0.1:9999'}
  e: {cmd: 'x'}
  f: {cmd: 'x ${PORT}'}
  g: {cmd: 'x', proxy: 'http://127.0.0.1:8080'}
";
    let imported = Imported::new(yaml, &[]);
    let config = imported.config();
    let all: Vec<_> = config.models.iter().map(|model| (model.name.as_str(), model.url.as_str())).collect();
    assert_eq!(
        all,
        [
            ("a", "http://127.0.0.1:9999"),
            ("b", "http://127.0.0.1:5801"),
            ("c", "http://localhost:5802"),
            ("f", "http://localhost:5800"),
            ("g", "http://127.0.0.1:8080"),
        ]
    );
    assert_eq!(command(model(&config, "b")), ["x", "--port=5801", "--host", "127.0.0.1:5801"]);
    assert_eq!(command(model(&config, "c")), ["x", "--listen-port", "5802"]);
    assert_eq!((config.front.listen.port(), config.control.listen.port()), (8081, 8082));
    for words in [
        "line 4, column 3: model `b`: its address http://127.0.0.1:9999 is that of `a`; it has 5801 here, in its command, too",
        "model `c`: its proxy has no port; 9999 is that of its command",
        "model `d`: its address http://127.0.0.1:9999 is that of `a`, and its command does not say that port; it is not carried over",
        "model `e` is not carried over: its proxy has ${PORT}, and its cmd has neither",
    ] {
        imported.warns(words);
    }
}

/// What public files of other users have, in words of our own. Each model comes over, or a note says why not.
#[test]
fn every_model_comes_over_or_has_a_note() {
    let containers = "
models:
  chat: {cmd: docker compose up chat, proxy: 'http://chat:8080', cmdStop: docker compose stop chat}
  code: {cmd: docker compose up code, proxy: 'http://code:8080'}
  draw: {cmd: docker compose up draw, proxy: 'http://draw:8080/', checkEndpoint: none}
  same: {cmd: docker compose up same, proxy: 'http://CODE:8080'}
";
    let published = "
macros: {run: 'docker run --init --rm -v /m:/m'}
models:
  one: {cmd: '${run} -p 9000:8080 i --port 8080', proxy: 'http://localhost:9000'}
  two: {cmd: '${run} --name ${MODEL_ID} -p 9000:8080 i --port 8080', proxy: 'http://127.0.0.1:9000'}
  inside: {cmd: '${run} --network host i --port 9000', proxy: 'http://127.0.0.1:9000'}
";
    let shells = "
models:
  a: {cmd: 'bash -c \"exec serve -m a --port 9000\"', proxy: 'http://127.0.0.1:9000'}
  b: {cmd: \"bash -c 'source /opt/x/env.sh && exec serve -m b --port 9000'\", proxy: 'http://127.0.0.1:9000'}
  c:
    proxy: http://127.0.0.1:9000
    cmd: |
      sh -c '
        # ends with the service
        trap \"kill 0\" EXIT
        serve -m c --host 0.0.0.0 --port=9000'
    cmdStop: sh -c 'kill ${PID}; sleep 1'
  d: {cmd: 'sh -c \"serve --port ${PORT} -m d\"'}
  e: {cmd: 'bash -lc \"serve --port 9123\"'}
  f: {cmd: 'systemctl --user start f', proxy: 'http://127.0.0.1:9000'}
";
    let names = "
models:
  flash: {aliases: [flash, fast, fast, ' odd'], cmd: 'serve --port ${PORT} -m f'}
  large: {aliases: [flash, fast, slow], cmd: 'serve --port ${PORT} -m l'}
  slow-one:
    aliases: ['slow-one:think']
    cmd: serve --port ${PORT} -m s
    filters: {setParamsByID: {'${MODEL_ID}': {top_k: 1}, 'slow-one:think': {top_k: 2}, large: {top_k: 3}}}
selectors:
  any: {targets: [flash, large], unlisted: true, weights: [1, 2]}
  fast: {targets: [large]}
";
    let pairs = "
healthCheckTimeout: 300
macros: {bin: /opt/llama/llama-server, common: '--no-webui -ngl 99'}
models:
  architect:
    cmd: env CUDA_VISIBLE_DEVICES=0 ${bin} ${common} --port ${PORT} -m '/m/big model.gguf'
    env: [CUDA_VISIBLE_DEVICES=0]
    ttl: 0
  editor:
    cmd: |
      # two GPUs
      ${bin} ${common} \\
        --port ${PORT}
      -m /m/small.gguf
    env: ['CUDA_VISIBLE_DEVICES=1,2']
groups: {pair: {swap: false, exclusive: true, members: [architect, editor]}}
hooks: {on_startup: {preload: [editor]}}
";
    let imported = |yaml: &str, kept: &[&str]| {
        let imported = Imported::new(yaml, &[]);
        let config = imported.config();
        let found: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(found, kept, "{}", imported.ran.stderr);
        imported
    };
    let of = imported(containers, &["chat", "code", "draw"]);
    of.warns("line 6, column 3: model `same`: its address http://CODE:8080 is that of `code`");
    of.warns("it is not carried over: each engine has an address of its own here");

    let of = imported(published, &["one", "two", "inside"]);
    let (config, port) =
        (of.config(), |config: &Config, name: &str| model(config, name).url[17..].to_owned());
    let two = port(&config, "two");
    assert!(command(model(&config, "two")).contains(&format!("{two}:8080").as_str()), "{config:?}");
    assert!(command(model(&config, "two")).ends_with(&["i", "--port", "8080"]));
    assert!(command(model(&config, "inside")).ends_with(&["--port", &port(&config, "inside")]));

    let of = imported(shells, &["a", "b", "c", "d", "e"]);
    let config = of.config();
    for name in ["b", "c", "d"] {
        let model = model(&config, name);
        let (_, port) = model.url.rsplit_once(':').unwrap();
        let script = *command(model).last().unwrap();
        assert!(script.contains(port) && !script.contains("9000"), "{script}");
    }
    assert_eq!(model(&config, "e").url, "http://localhost:9123");
    of.warns("model `f`: its address http://127.0.0.1:9000 is that of `a`");

    let of = imported(names, &["flash", "large", "slow-one"]);
    let config = of.config();
    assert_eq!(model(&config, "flash").aliases, ["fast"]);
    assert_eq!(model(&config, "large").aliases, ["slow"]);
    for words in [
        "line 3, column 3: model `flash`: its alias \"flash\" is dropped: it is the model's own name",
        "model `flash`: its alias \"fast\" is dropped: it is a name already",
        "model `flash`: its alias \" odd\" is dropped: no request could say it",
        "model `large`: its alias \"flash\" is dropped: it is a name already",
        "model `slow-one`: its variant `large` is dropped: it is a name already",
        "selector `any`: weights is not carried over",
        "selector `fast` is not carried over: a model has its name",
    ] {
        of.warns(words);
    }
    assert!(config.selectors[0].card.is_hidden);

    let of = imported(pairs, &["architect", "editor"]);
    let config = of.config();
    assert_eq!(model(&config, "editor").rules.gpus.len(), 2);
    assert!(config.models.iter().all(|model| model.rules.together.is_some()));
}
