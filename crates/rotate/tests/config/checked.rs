//! Valid configurations, and the errors of invalid ones.

use std::time::Duration;

use poorwill_rotate::config::{
    CanaryKind, Config, ConfigError, EngineKind, Hibernate, KeyShare, MemorySource,
};
use poorwill_rotate::measure::DeviceDriver;
use poorwill_rotation_policy::{Gpu, ModelId};

const TWO: &str = r#"
[front]
listen = "127.0.0.1:9000"
keys = ["env:FRONT"]
body_max = "1MiB"

[every_model.rules]
"#;

fn secret(place: &str) -> Result<String, String> {
    match place {
        "env:FRONT" => Ok(" s3cret\n".to_owned()),
        "env:EMPTY" => Ok(String::new()),
        other => Err(format!("there is no {other}")),
    }
}

fn parsed(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, &secret)
}

/// The error of an invalid configuration.
fn refused(text: &str) -> String {
    parsed(text).expect_err(text).to_string()
}

/// A model with these lines.
fn model(lines: &str) -> String {
    format!("[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n{lines}\n")
}

const COLLECTOR: &str = "http://127.0.0.1:4318/v1/traces";

/// With traces to this address, and with these lines.
fn traced(endpoint: &str, lines: &str) -> String {
    format!("[traces]\nendpoint = \"{endpoint}\"\n{lines}\n{}", model(""))
}

#[test]
fn a_minimal_configuration_is_valid() {
    let config = parsed(&model("")).unwrap();
    let one = &config.models[0];
    assert_eq!((one.served_as.as_str(), one.engine, one.level), ("one", EngineKind::Vllm, 1));
    assert_eq!(one.rules.gpus, [Gpu(0)]);
    assert!(one.start.is_none() && !one.rules.can_restart && one.rules.can_sleep);
    assert_eq!((config.memory, config.state), (MemorySource::Devices(DeviceDriver::Any), None));
    assert!(config.front.listen.ip().is_loopback() && config.control.listen.ip().is_loopback());
    assert_ne!(config.front.listen, config.control.listen);
}

#[test]
fn every_key_can_be_set() {
    let text = r#"
        state = "/var/lib/rotate"

        [memory]
        measure = "processes"
        gpu = "8GiB"

        [front]
        listen = "0.0.0.0:9000"
        keys = ["env:FRONT"]
        body_max = "1MiB"
        head_max = 16384
        requests_max = 10
        keep_alive = "15s"

        [control]
        listen = "[::1]:9001"

        [traces]
        endpoint = "http://collector:4318/v1/traces?tenant=1"
        sample = 0.25
        service = "gpu-7"
        headers = { X-Tenant = "env:FRONT" }

        [every_model]
        residence_min = "5s"
        idle_max = "1h"

        [[model]]
        name = "large"
        aliases = ["gpt-large", "l"]
        served_as = "Org/Large-70B"
        engine = "sglang"
        url = "http://localhost:30000/"
        level = 2
        gpus = [1, 0]
        need = "70.5GiB"
        command = ["python3", "-m", "sglang.launch_server"]
        environment = { CUDA_VISIBLE_DEVICES = "0,1" }
        folder = "/srv"
        log = "/var/log/large.log"
        [model.rules]
        residence_min = "250ms"
        pinned = true
        sleeps = false
        queue_max = 3
        look_every = "20s"
        sleep_max = "2m"
        [model.canary]
        prompt = "2 + 2 ="
        tokens = 4
        expect = "4"

        [[model]]
        name = "small"
        url = "http://127.0.0.1:8001"
    "#;
    let config = parsed(text).unwrap();
    assert_eq!((config.front.body_max_bytes, config.front.head_max_bytes), (1 << 20, 16384));
    assert!(config.front.keys[0].matches("s3cret") && !config.front.keys[0].matches("s3creT"));
    assert_eq!(config.memory, MemorySource::Processes { gpu_bytes: 8 << 30, folder: None });
    assert_eq!(config.state.as_deref(), Some(std::path::Path::new("/var/lib/rotate")));
    let traces = config.traces.as_ref().unwrap();
    assert_eq!(
        (traces.endpoint.as_str(), traces.service.as_str()),
        ("http://collector:4318/v1/traces?tenant=1", "gpu-7")
    );
    assert!((traces.sample - 0.25).abs() < f64::EPSILON);
    assert!(!format!("{config:?}").contains("s3cret"));
    let large = &config.models[0];
    assert_eq!(large.url, "http://localhost:30000");
    assert_eq!(large.rules.need_bytes, Some(141 << 29));
    assert_eq!(large.rules.residence_min, Duration::from_millis(250));
    assert_eq!(large.rules.idle_max, Some(Duration::from_secs(3600)));
    assert_eq!(large.rules.limits.sleep, Duration::from_secs(120));
    let looks = config.models.iter().map(|model| model.rules.look_every.as_secs());
    assert_eq!(looks.collect::<Vec<_>>(), [20, 5]);
    assert!(
        large.rules.preload && large.rules.can_restart && !large.rules.can_sleep && large.rules.is_pinned
    );
    assert_eq!(large.start.as_ref().unwrap().command.len(), 3);
    assert_eq!(config.models[1].rules.residence_min, Duration::from_secs(5));
    for (name, expected) in
        [("large", Some(0)), ("l", Some(0)), ("small", Some(1)), ("Large", None), ("", None)]
    {
        assert_eq!(config.model(name), expected.map(ModelId), "{name}");
    }
}

#[test]
fn keys_are_never_shown() {
    let config = parsed(&format!("[front]\nkeys = [\"env:FRONT\"]\n{}", model(""))).unwrap();
    let key = &config.front.keys[0];
    assert!(!format!("{config:?}").contains("s3cret"));
    for wrong in ["", "s", "s3cre", "s3cret ", "s3crets", "S3CRET"] {
        assert!(!key.matches(wrong), "{wrong}");
    }
    // Nor a key written where its source belongs.
    let written = format!("[front]\nkeys = [\"sk-12345\"]\n{}", model(""));
    let error = Config::parse(&written, &|place| Err(format!("no {}", place.len()))).unwrap_err().to_string();
    assert!(!error.contains("sk-12345"), "{error}");
    // Nor where a list of sources belongs.
    for keys in ["\"sk-12345\"", "{ a = \"sk-12345\" }", "[[\"sk-12345\"]]"] {
        let error = refused(&format!("[front]\nkeys = {keys}\n{}", model("")));
        assert!(error.starts_with("line 2, column 8: ") && error.contains("env:NAME"), "{error}");
        assert!(!error.contains("sk-12345"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rotate.toml");
    std::fs::write(&path, &written).unwrap();
    let error = Config::read(&path).unwrap_err().to_string();
    assert!(error.contains("env:NAME or file:PATH") && !error.contains("sk-12345"), "{error}");
}

#[test]
fn keys_may_have_names_and_shares() {
    let with = |keys: &str| format!("[front]\nkeys = [{keys}]\n{}", model(""));
    let config = parsed(&with(
        "\"env:FRONT\", { source = \"env:FRONT\", name = \"team\", requests_max = 64, priority = -5 }",
    ))
    .unwrap();
    let shares: Vec<_> = config.front.keys.iter().map(|key| key.share().cloned()).collect();
    assert_eq!(
        shares,
        [None, Some(KeyShare { name: "team".to_owned(), requests_max: Some(64), priority: -5 })]
    );
    for wrong in [
        "{ source = \"env:FRONT\" }",
        "{ name = \"team\" }",
        "{ source = \"env:FRONT\", name = \" \" }",
        "{ source = \"env:FRONT\", name = \"team\", requests_max = 0 }",
        "{ source = \"env:FRONT\", name = \"team\", requests_max = \"sk-12345\" }",
        "{ source = \"env:FRONT\", name = \"team\", request_max = 1 }",
        "{ source = \"env:FRONT\", name = \"team\", priority = 3601 }",
        "{ source = \"env:FRONT\", name = \"team\", priority = \"high\" }",
    ] {
        let error = refused(&with(wrong));
        assert!(error.contains("`source` and `name` are required") && !error.contains("sk-12345"), "{error}");
    }
    let control = "[control]\nkeys = [{ source = \"env:FRONT\", name = \"team\", requests_max = 1 }]\n";
    assert!(refused(&format!("{control}{}", model(""))).contains("leave them out here"));
    let rules = "\n[model.rules]\ntogether = \" \"\n";
    assert!(refused(&model(rules)).contains("together is empty; give the set a name"));
    let rules = "\n[model.rules]\npriority = 3601\n";
    assert!(refused(&model(rules)).contains("priority is 3601; say one from -3600 to 3600"));
}

#[test]
fn keys_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let (key, path) = (folder.path().join("key"), folder.path().join("rotate.toml"));
    std::fs::write(&key, "abc\n").unwrap();
    std::fs::write(&path, format!("[control]\nkeys = [\"file:{}\"]\n{}", key.display(), model(""))).unwrap();
    assert!(Config::read(&path).unwrap().control.keys[0].matches("abc"));
    std::fs::remove_file(&key).unwrap();
    let error = Config::read(&path).unwrap_err().to_string();
    assert!(error.starts_with("line 2, column 1: control: key 1 of 1:"), "{error}");
    let error = Config::read(&folder.path().join("none.toml")).unwrap_err().to_string();
    assert!(error.contains("none.toml"), "{error}");
}

#[test]
fn unknown_keys_are_errors_with_the_nearest_key() {
    for (text, line, nearest) in [
        (model("alias = [\"x\"]"), 4, "`aliases`"),
        (model("ulr = \"x\""), 4, "`url`"),
        (model("[model.rules]\npined = true"), 5, "`pinned`"),
        (model("[model.canary]\npromt = \"x\""), 5, "`prompt`"),
        (model("engine = \"vlm\""), 4, "`vllm`"),
        (format!("[memory]\nmeasure = \"device\"\n{}", model("")), 2, "`devices`"),
        (format!("[memory]\nmeasur = \"devices\"\n{}", model("")), 2, "`measure`"),
        (format!("stat = \"x\"\n{}", model("")), 1, "`state`"),
        (format!("[fornt]\n{}", model("")), 1, "`front`"),
    ] {
        let error = refused(&text);
        assert!(
            error.starts_with(&format!("line {line}, column ")) && error.contains(": unknown"),
            "{error}"
        );
        assert!(error.ends_with(&format!("did you mean {nearest}?")), "{error}");
    }
    let error = refused(&model("quite_something_else = 1"));
    assert!(error.contains("expected one of") && !error.contains("did you mean"), "{error}");
}

#[test]
fn engines_hibernate_that_sleep_and_are_started_here() {
    let command = "command = [\"engine\"]";
    let parse = |table: &str, lines: &str| parsed(&format!("{table}\n{}", model(lines)));
    let rules = |table: &str, lines: &str| parse(table, lines).unwrap().models[0].rules.clone();
    assert!(!rules("", command).can_hibernate);
    let config =
        parse("[hibernate]\nhelper = [\"a\", \"b\"]\nwait_max = \"1s\"\nhost_max = \"1GiB\"", command);
    let hibernate = Hibernate {
        helper: vec!["a".to_owned(), "b".to_owned()],
        wait_max: Duration::from_secs(1),
        host_max_bytes: Some(1 << 30),
    };
    assert_eq!(config.unwrap().hibernate, Some(hibernate));
    let table = "[hibernate]\nafter = \"5m\"\nresidue_max = \"8GiB\"";
    let all = rules(table, command);
    let after = Some(Duration::from_secs(300));
    assert_eq!((all.can_hibernate, all.hibernate_after), (true, after));
    assert_eq!(all.residue_max_bytes, Some(8 << 30));
    let own = rules(table, &format!("{command}\n[model.rules]\nhibernate_after = \"0s\""));
    assert_eq!((own.can_hibernate, own.hibernate_after), (true, Some(Duration::ZERO)));
    for lines in [
        "",
        &format!("{command}\n[model.rules]\nhibernates = false"),
        &format!("{command}\n[model.rules]\nsleeps = false"),
    ] {
        let none = rules(table, lines);
        assert_eq!((none.can_hibernate, none.hibernate_after), (false, None), "{lines}");
    }
    for (text, words) in [
        (model("[model.rules]\nhibernates = true"), "need the table [hibernate]"),
        (format!("[every_model]\nhibernate_after = \"1s\"\n{}", model("")), "need the table [hibernate]"),
        (format!("{table}\n{}", model("[model.rules]\nhibernate_after = \"1s\"")), "say command"),
        (
            format!(
                "{table}\n{}",
                model(&format!("{command}\n[model.rules]\nhibernates = true\nsleeps = false"))
            ),
            "does not sleep",
        ),
        (
            format!("{table}\n{}", model("[model.rules]\nhibernates = false\nhibernate_after = \"1s\"")),
            "leave one of them out",
        ),
        (format!("[hibernate]\nwait_max = \"0s\"\n{}", model("")), "wait_max is 0"),
        (format!("[hibernate]\nhost_max = 0\n{}", model("")), "host_max is 0"),
        (format!("[hibernate]\nhelper = [\"\"]\n{}", model("")), "empty word"),
    ] {
        let error = refused(&text);
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn an_invalid_value_is_an_error_that_says_what_is_valid() {
    for (text, words) in [
        (String::new(), &["no model", "[[model]]"][..]),
        ("[[model]]\nname = \"one\"".to_owned(), &["line 1", "url"]),
        ("[[model".to_owned(), &["line 1"]),
        (model("level = 3"), &["model `one`", "level is 3", "2 drops"]),
        (model("level = \"1\""), &["line 4"]),
        (model("gpus = []"), &["gpus are []"]),
        (model("gpus = [0, 0]"), &["once"]),
        (model("gpus = [-1]"), &["line 4"]),
        (model("gpus = [999999999]"), &["999999999"]),
        (model("need = \"70 apples\""), &["line 4", "70 apples", "24GiB"]),
        (model("need = -1"), &["line 4", "-1"]),
        (model("[model.rules]\nidle_max = \"soon\""), &["line 5", "soon", "90s"]),
        (model("[model.rules]\nidle_max = 90"), &["line 5", "90", "quotes"]),
        (model("[model.rules]\nsleeps = false"), &["never leave"]),
        (model("[model.rules]\nqueue_max = 0"), &["1 or more"]),
        (model("[model.rules]\npause_min = \"1h\""), &["pause_min"]),
        (model("[model.rules]\nlook_every = \"0s\""), &["look_every is 0"]),
        (model("log = \"x\""), &["no"]),
        (model("stop_command = [\"a\"]"), &["stop_command", "say command"]),
        (model("command = [\"a\"]\nstop_command = [\"\"]"), &["stop_command", "empty word"]),
        (model("command = [\"a\"]\nstop_command = [\"a\\u0000\"]"), &["stop_command", "NUL"]),
        (model("command = [\"a\"]\nstop_command = \"docker stop a\""), &["line 5", "a list in brackets"]),
        (model("command = [\"\"]"), &["empty word"]),
        (model("aliases = [\"\"]"), &["empty"]),
        (model("aliases = [\"one\"]"), &["model `one`", "`one` as well"]),
        (model("[model.canary]\ntokens = 0"), &["one token"]),
        (format!("{}{}", model(""), model("")), &["model `one`"]),
        (
            format!("{}{}", model(""), model("").replace("\"one\"", "\"two\"")),
            &["http://127.0.0.1:8000", "`one`"],
        ),
        (format!("[front]\nlisten = \"0.0.0.0:80\"\n{}", model("")), &["front", "no keys", "env:NAME"]),
        (format!("[front]\nlisten = \"somewhere\"\n{}", model("")), &["line 2"]),
        (
            format!("[control]\nlisten = \"127.0.0.1:8080\"\n{}", model("")),
            &["the same port; give listen another"],
        ),
        (format!("[front]\nkeys = [\"env:EMPTY\"]\n{}", model("")), &["front: key 1 of 1", "printable"]),
        (format!("[front]\nkeys = [\"env:FRONT\", \"env:NONE\"]\n{}", model("")), &["key 2 of 2"]),
        (format!("[front]\nrequests_max = 0\n{}", model("")), &["requests_max"]),
        (
            format!("[front]\nlisten = \"0.0.0.0:8081\"\nkeys = [\"env:FRONT\"]\n{}", model("")),
            &["127.0.0.1:8081", "give listen another one"],
        ),
        (format!("[front]\nbody_max = 0\n{}", model("")), &["front", "body_max"]),
        (format!("[front]\nhead_max = \"0\"\n{}", model("")), &["front", "head_max"]),
        (
            format!("[front]\norigins = [\"https://a.example/\"]\n{}", model("")),
            &["front", "origins", "a.example/"],
        ),
        (format!("[front]\npaths = [\"/sleep\"]\n{}", model("")), &["front", "paths", "/sleep"]),
        (format!("[front]\nkeep_alive = \"0s\"\n{}", model("")), &["front", "keep_alive"]),
        (format!("[front]\nwebsocket_idle_max = \"0s\"\n{}", model("")), &["front", "websocket_idle_max"]),
        (model("aliases = [\" two\"]"), &["\" two\"", "blanks"]),
        (model("aliases = [\"t\\nwo\"]"), &["control characters"]),
        (model("served_as = \"\""), &["served_as is empty"]),
        (model("[model.rules]\nfirst_byte_max = \"0s\""), &["first_byte_max is 0"]),
        (model("need = 0"), &["need is 0"]),
        (model("command = [\"a\", \"b\\u0000\"]"), &["NUL"]),
        (model("command = [\"a\"]\nenvironment = { \"A=B\" = \"x\" }"), &["\"A=B\"", "variable"]),
        (model("command = [\"a\"]\nenvironment = { \"\" = \"x\" }"), &["\"\"", "variable"]),
        (model("command = [\"a\"]\nenvironment = { A = \"\\u0000\" }"), &["variable A", "NUL"]),
        (model("[model.canary]\nexpect = \" \""), &["every answer"]),
        (model("[model.canary]\nkind = \"embedding\"\nexpect = \"x\""), &["expect is for texts"]),
        (model("[model.canary]\nkind = \"none\"\nexpect = \"x\""), &["expect is for texts"]),
        (model("[model.canary]\nkind = \"get\""), &["has a path"]),
        (model("[model.canary]\nkind = \"get\"\npath = \"health\""), &["\"health\"", "begins with one /"]),
        (model("[model.canary]\nkind = \"get\"\npath = \"/a b\""), &["\"/a b\"", "no blanks"]),
        (model("[model.canary]\npath = \"/health\""), &["kind = \"get\""]),
        (model("[model.canary]\nkind = \"poem\""), &["line 5", "poem", "embedding"]),
        (model("[model.rules]\nwait_max = \"0s\""), &["wait_max is 0"]),
        (model("[model.rules]\npause_min = \"0s\""), &["pause_min is 0"]),
        (model("[model.rules]\nsleep_max = \"0s\""), &["sleep_max is 0"]),
        (model("[model.rules]\nrelease_max = \"0s\""), &["release_max is 0"]),
        (model("[model.rules]\nwake_max = \"0s\""), &["wake_max is 0"]),
        (model("[model.rules]\ncanary_max = \"0s\""), &["canary_max is 0"]),
        (model("[model.rules]\nstart_max = \"0s\""), &["start_max is 0"]),
        (model("[model.rules]\nstop_max = \"0s\""), &["stop_max is 0"]),
        (model("[model.rules]\nidle_max = \"2years\""), &["line 5", "2years", "a year"]),
        (format!("[memory]\nmeasure = \"processes\"\n{}", model("")), &["memory", "gpu = \"8GiB\""]),
        (format!("[memory]\nmeasure = \"processes\"\ngpu = 0\n{}", model("")), &["memory", "gpu is 0"]),
        (format!("[memory]\nmeasure = \"processes\"\ngpu = \"lots\"\n{}", model("")), &["line 3", "lots"]),
        (format!("[memory]\nmeasure = \"devices\"\ngpu = \"8GiB\"\n{}", model("")), &["leave it out"]),
        (format!("[memory]\ngpu = \"8GiB\"\n{}", model("")), &["memory", "measure = \"processes\""]),
        (format!("[memory]\nmeasure = \"unified\"\ngpu = \"8GiB\"\n{}", model("")), &["leave it out"]),
        (format!("[memory]\nmeasure = \"intel\"\ngpu = 0\n{}", model("")), &["memory", "gpu is 0"]),
        (format!("[memory]\nmeasure = \"declared\"\n{}", model("")), &["memory", "gpu = \"24GiB\""]),
        (
            format!("[memory]\nmeasure = \"declared\"\ngpu = \"8GiB\"\n{}", model("")),
            &["memory", "cannot do without a need"],
        ),
        (format!("[traces]\n{}", model("")), &["line 1", "endpoint is missing", "4318/v1/traces"]),
        (
            traced("https://127.0.0.1:4318/v1/traces", ""),
            &["line 2", "traces: endpoint", "begin with http://"],
        ),
        (traced("http://127.0.0.1/v1/traces", ""), &["a port"]),
        (traced("http://127.0.0.1:4318", ""), &["no path"]),
        (traced("http://a:b@127.0.0.1:4318/v1/traces", ""), &["no password"]),
        (traced(COLLECTOR, "sample = 1.5"), &["line 3", "sample is 1.5", "from 0 to 1"]),
        (traced(COLLECTOR, "sample = nan"), &["sample is NaN"]),
        (traced(COLLECTOR, "service = \"\""), &["service is empty"]),
        (traced(COLLECTOR, "headers = { \"a b\" = \"env:FRONT\" }"), &["line 3", "\"a b\"", "no valid name"]),
        (traced(COLLECTOR, "headers = { a = \"env:NONE\" }"), &["\"a\"", "there is no env:NONE"]),
        (traced(COLLECTOR, "headers = { Host = \"env:FRONT\" }"), &["set by the exporter"]),
        (format!("state = \"\"\n{}", model("")), &["state", "name a folder"]),
        (format!("state = 1\n{}", model("")), &["line 1"]),
        (TWO.to_owned(), &["unknown field `rules`"]),
    ] {
        let error = refused(&text);
        for word in words {
            assert!(error.contains(word), "{error:?} of\n{text}");
        }
    }
}

/// The errors of names, parameters and entries in the list of models.
#[test]
fn names_and_parameters_are_checked() {
    let two = |lines: &str| {
        format!("{}[[model]]\nname = \"two\"\nurl = \"http://127.0.0.1:8001\"\n{lines}\n", model(""))
    };
    let selector =
        |lines: &str| format!("{}[[selector]]\nname = \"any\"\n{lines}\n", model("adapters = [\"lora\"]"));
    let profile = |lines: &str| format!("{}[profile.p]\n{lines}\n", model("").trim_end().to_owned() + "\n");
    for (text, words) in [
        (model("adapters = [\"\"]"), &["line 4, column 1", "one of adapters"][..]),
        (model("adapters = [\" x\"]"), &["\" x\"", "blanks"]),
        (model("adapters = [\"one\"]"), &["model `one`", "has the name `one` as well"]),
        (two("adapters = [\"one\"]"), &["model `two`: model `one` has the name `one` as well"]),
        (two("[model.variants.one]\nx = 1"), &["model `two`: model `one` has the name `one` as well"]),
        (model("[model.variants.\"\"]\nx = 1"), &["one of variants has no name"]),
        (model("[model.variants.\"\u{7f}\"]\nx = 1"), &["line 4"]),
        (model("[model.variants.x]\nmodel = \"y\""), &["variants cannot have `model`", "leave it out"]),
        (model("variants = { x = 1 }"), &["line 4"]),
        (model("[model.parameters]\nmodel = \"x\""), &["line 4", "parameters cannot have `model`"]),
        (model("[model.parameters]\nstream = true"), &["parameters cannot have `stream`"]),
        (model("[model.parameters]\nx = nan"), &["parameters: `x` is NaN", "JSON has no such number"]),
        (model("[model.parameters]\nx.y = [2026-01-01]"), &["`x` is the date 2026-01-01", "in quotes"]),
        (model("[model.parameters]\n\"\" = 1"), &["without a name"]),
        (model("strip = [\"model\"]"), &["line 4, column 1", "strip cannot have `model`"]),
        (model("strip = [\"x\", \"x\"]"), &["strip has `x` twice"]),
        (model("strip = [\"\"]"), &["strip has a field without a name"]),
        (model("strip = [\"x\"]\nparameters = { x = 1 }"), &["strip removes `x`, and parameters set it"]),
        (model("display_name = \" \""), &["display_name is empty"]),
        (model("metadata = { id = \"x\" }"), &["metadata has `id`", "leave it out"]),
        (model("metadata = { name = \"x\" }"), &["metadata has `name`", "display_name instead"]),
        (model("metadata = { x = 2026-01-01 }"), &["metadata: `x` is the date"]),
        (model("metadata = 1"), &["line 4"]),
        (selector(""), &["line 6", "selector `any`: targets is empty"]),
        (selector("targets = []"), &["line 7, column 1", "targets is empty"]),
        (selector("targets = [\"onne\"]"), &["line 7, column 1", "`onne`", "did you mean `one`?"]),
        (selector("targets = [\"something\"]"), &["`something`, which is no name of a model\n"]),
        (selector("targets = [\"one\", \"one\"]"), &["targets has `one` twice"]),
        (selector("targets = [\"any\"]"), &["targets has `any`, which is a selector"]),
        (selector("targets = \"one\""), &["line 7"]),
        (selector("targets = [\"one\"]\nstrategy = \"warm\""), &["line 8", "warm", "spillover"]),
        (selector("targets = [\"one\"]\nstrategy = \"spillover\""), &["requests is missing"]),
        (
            selector("targets = [\"one\"]\nstrategy = \"spillover\"\nrequests = 0"),
            &["line 9", "requests is 0"],
        ),
        (selector("targets = [\"one\"]\nrequests = 4"), &["requests is for strategy"]),
        (
            selector("targets = [\"one\"]\nmetadata = { object = 1 }"),
            &["selector `any`: metadata has `object`"],
        ),
        (selector("").replace("\"any\"", "\"\""), &["its name is empty"]),
        (selector("").replace("\"any\"", "\"a \""), &["\"a \"", "blanks"]),
        (profile(""), &["line 4, column 1", "profile `p`: it is empty"]),
        (profile("a = \"onne\""), &["`a` stands for `onne`", "model or selector; did you mean `one`?"]),
        (profile("\"\" = \"one\""), &["one of its names is empty"]),
        (profile("\" a\" = \"one\""), &["\" a\"", "blanks"]),
        (profile("a = 1"), &["line 5"]),
        (
            selector("targets = [\"one\"]").replace("\"any\"", "\"lora\""),
            &["selector `lora`: model `one` has the name `lora` as well"],
        ),
        (
            format!("{}[[selector]]\nname = \"any\"\ntargets = [\"one\"]\n", selector("targets = [\"one\"]")),
            &["line 9", "selector `any`: selector `any` has the name `any` as well"],
        ),
    ] {
        // A word may be the end of the message.
        let error = refused(&text) + "\n";
        for word in words {
            assert!(error.contains(word), "{error:?} of\n{text}");
        }
    }
}

#[test]
fn a_name_may_have_parameters_of_its_own() {
    let text = model(
        "adapters = [\"lora\"]\nserved_as = \"Org/One\"\nstrip = [\"seed\", \"top_p\"]\n\
         [model.parameters]\ntop_k = 1\nx = { y = [1.5, \"z\", true] }\n\
         [model.variants.one]\ntop_k = 2\n[model.variants.\"one:high\"]\nseed = 3\n[model.variants.lora]\n",
    );
    let config = parsed(&text).unwrap();
    let one = &config.models[0];
    assert_eq!(
        (one.aliases.as_slice(), one.adapters.as_slice()),
        (&["one:high".to_owned()][..], &["lora".to_owned()][..])
    );
    let x = serde_json::json!({"y": [1.5, "z", true]});
    for (name, served_as, set) in [
        ("one", "Org/One", serde_json::json!({"top_k": 2, "x": x})),
        ("one:high", "Org/One", serde_json::json!({"top_k": 1, "x": x, "seed": 3})),
        ("lora", "lora", serde_json::json!({"top_k": 1, "x": x})),
    ] {
        let parameters = one.parameters_of(name);
        assert_eq!(
            (one.served_as(name), serde_json::Value::Object(parameters.set)),
            (served_as, set),
            "{name}"
        );
        assert_eq!(parameters.strip.into_iter().collect::<Vec<_>>(), ["seed", "top_p"]);
        assert_eq!(config.model(name), Some(ModelId(0)));
    }
    assert!(parsed(&model("")).unwrap().models[0].parameters_of("one").is_empty());
}

/// The place of the mistake, and the excerpt.
fn place(text: &str) -> (usize, usize, Option<String>) {
    let error = parsed(text).expect_err(text);
    let place = error.place().unwrap_or_else(|| panic!("{error} has no place"));
    (place.line, place.column, place.excerpt.clone())
}

#[test]
fn a_mistake_has_a_place_and_an_excerpt() {
    let excerpt = |shown: &str, column: usize, carets: usize| {
        Some(format!("  |\n4 | {shown}\n  | {}{}", " ".repeat(column - 1), "^".repeat(carets)))
    };
    for (lines, shown, column, carets) in [
        ("alias = [\"x\"]", "alias = [\"*\"]", 1, 5),
        ("level = 3", "level = 3", 1, 9),
        ("level = \"1\"", "level = \"1\"", 9, 3),
        ("  need = \"70 äpples\"", "  need = \"70 äpples\"", 10, 11),
        ("need = 0 # not known", "need = 0 #**********", 1, 8),
        ("gpus = [0, 0]", "gpus = [0, 0]", 1, 13),
        ("rules = { queue_max = 0 }", "rules = { queue_max = 0 }", 11, 13),
        ("aliases = [\"\"]", "aliases = [\"\"]", 1, 14),
        ("command = [\"\"]", "command = [\"\"]", 1, 14),
    ] {
        assert_eq!(place(&model(lines)), (4, column, excerpt(shown, column, carets)), "{lines}");
    }
    // A table without a header of its own begins somewhere on its line.
    assert_eq!(place(&model("canary.tokens = 0")).0, 4);
    for (text, line) in [
        (model("[model.rules]\npause_min = \"1h\""), 5),
        (format!("[every_model]\nwake_max = \"0s\"\n{}", model("")), 2),
        (format!("{}{}", model(""), model("")), 6),
        (format!("{}{}", model(""), model("").replace("\"one\"", "\"two\"")), 7),
        (format!("[front]\nlisten = \"0.0.0.0:80\"\n{}", model("")), 2),
        (format!("[front]\nbody_max = 0\n{}", model("")), 2),
        (format!("state = \"\"\n{}", model("")), 1),
        ("[[model".to_owned(), 1),
        ("[[model]]\r\nname = \"one\"\r\nurl = 1\r\n".to_owned(), 3),
    ] {
        let (at, _, excerpt) = place(&text);
        assert!(at == line && excerpt.is_some(), "{at}: {excerpt:?} of\n{text}");
    }
    assert_eq!(place(""), (1, 1, None));
}

#[test]
fn excerpts_show_all_but_secrets() {
    let excerpt = |text: &str| place(text).2.unwrap_or_else(|| panic!("{text}"));
    for (lines, shown) in [
        ("url = \"ftp://host:1\"", "url = \"ftp://host:1\""),
        ("gpus = \"*\"", "gpus = \"*\""),
        ("level = 3 # sk-12345", "level = 3 #*********"),
        ("aliases = [\"sk-12345\", 7]", "aliases = [\"********\", 7]"),
    ] {
        let text = match lines.strip_prefix("url") {
            Some(_) => format!("[[model]]\nname = \"one\"\n{lines}\n"),
            None => model(lines),
        };
        assert!(excerpt(&text).contains(&format!("| {shown}\n")), "{}", excerpt(&text));
    }
    // Also where the mistake is another one, and where the name of the key is wrong.
    for text in [
        format!("[front]\nkeys = [\"very-secret\", 1]\n{}", model("")),
        format!("[front]\nkays = [\"very-secret\"]\n{}", model("")),
        format!("[front]\nkeys = [\n  \"very-secret\", 1]\n{}", model("")),
        model("environment = { \"\" = \"very-secret\" }\ncommand = [\"x\"]"),
        model("command = [\"\", \"--api-key\", \"very-secret\"]"),
        traced(COLLECTOR, "headers = { \"\" = \"very-secret\" }"),
        "[[model]]\nname = \"one\"\nurl = \"ftp://user:very-secret@host:1\"\n".to_owned(),
        "[front]\nkeys = [\"very-secret\n".to_owned(),
    ] {
        let error = parsed(&text).expect_err(&text);
        for mistake in error.mistakes() {
            let excerpt = mistake.place().and_then(|place| place.excerpt.clone()).unwrap_or_default();
            assert!(!excerpt.contains("very-secret"), "{excerpt}");
        }
    }
}

/// Mistakes that users make: each has its line and column, and what would be right.
#[test]
fn usual_mistakes_have_a_place_and_a_remedy() {
    let two = |second: &str| format!("{}[[model]]\n{second}", model(""));
    let selectors =
        "[[selector]]\nname = \"a\"\ntargets = [\"b\"]\n[[selector]]\nname = \"b\"\ntargets = [\"a\"]\n";
    for (text, at, words) in [
        (model("idle_max = \"10m\""), (4, 1), &["`idle_max`", "[model.rules] or [every_model]"][..]),
        (model("pinnd = true"), (4, 1), &["did you mean `pinned` of [model.rules]?"]),
        (format!("[control]\npassthrough = true\n{}", model("")), (2, 1), &["belongs to [front]"]),
        (model("[model.rules]\nneed = \"4GiB\""), (5, 1), &["belongs to [[model]]"]),
        (format!("[front]\nstate = \"x\"\n{}", model("")), (2, 1), &["the top of the file"]),
        (model("[model.rules]\nsleep_max = 90"), (5, 13), &["a length of time in quotes", "\"90s\""]),
        (model("[model.rules]\nsleep_max = \"90\""), (5, 13), &["`90`", "90s or 250ms"]),
        (model("[model.rules]\nidle_max = \"-5m\""), (5, 12), &["`-5m`", "90s or 250ms"]),
        (model("need = \"40 gigs\""), (4, 8), &["40 gigs", "GiB"]),
        (model("need = -1"), (4, 8), &["-1 is not a size", "\"40GiB\""]),
        (model("gpus = [-1]"), (4, 9), &["`-1`", "a whole number from 0 on"]),
        (model("gpus = [5000]"), (4, 1), &["gpus are [5000]", "from 0 on"]),
        (model("gpus = 0"), (4, 8), &["a list in brackets", "[0, 1]"]),
        (
            two("name = \"two\"\nurl = \"127.0.0.1:8001\"\n"),
            (7, 1),
            &["url is `127.0.0.1:8001`", "begin with http://"],
        ),
        (two("name = \"two\"\nurl = \"http://127.0.0.1\"\n"), (7, 1), &["no port", "http://127.0.0.1:8000"]),
        (
            two("name = \"one\"\nurl = \"http://127.0.0.1:8001\"\n"),
            (6, 1),
            &["`one` as well", "each name is for one"],
        ),
        (two("url = \"http://127.0.0.1:8001\"\n"), (5, 1), &["missing field `name`; add name = …"]),
        (format!("{}[profile.day]\ncoder = \"onne\"\n", model("")), (5, 1), &["did you mean `one`?"]),
        (format!("{}{selectors}", model("")), (7, 1), &["is a selector", "name the models themselves"]),
        (
            format!(
                "[front]\nlisten = \"127.0.0.1:9000\"\n[control]\nlisten = \"127.0.0.1:9000\"\n{}",
                model("")
            ),
            (4, 1),
            &["the same port", "give listen another"],
        ),
        (format!("[front]\nlisten = \"9000\"\n{}", model("")), (2, 10), &["127.0.0.1:8080"]),
        (format!("[front]\nlisten = \"localhost:9000\"\n{}", model("")), (2, 10), &["127.0.0.1:8080"]),
        (
            format!("[front]\nkeys = [\"env:GONE\"]\n{}", model("")),
            (2, 1),
            &["key 1 of 1: there is no env:GONE"],
        ),
        (model("command = \"vllm serve m\""), (4, 11), &["a list in brackets"]),
        (model("log_max = \"1MiB\"\ncommand = [\"x\"]"), (4, 1), &["say log as well"]),
        (model("command = [\"x\"]\nlog = \"x.log\"\nlog_max = 0"), (6, 1), &["make it larger"]),
        ("# nothing\n".to_owned(), (2, 1), &["no model", "[[model]]"]),
    ] {
        let error = parsed(&text).expect_err(&text);
        let found = error.place().map(|place| (place.line, place.column));
        assert_eq!(found, Some(at), "{error}\n{text}");
        for words in words {
            assert!(error.to_string().contains(words), "`{words}` is not in: {error}\n{text}");
        }
    }
}

#[test]
fn operators_commands_need_only_their_listener() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rotate.toml");
    let key = folder.path().join("key");
    std::fs::write(&key, "operator").unwrap();
    let text = format!(
        "[front]\nkeys = [\"env:POORWILL_TEST_UNSET\"]\n[control]\nlisten = \"127.0.0.1:9001\"\n\
         keys = [\"file:{}\"]\n{}",
        key.display(),
        model("command = [\"x\", \"${env.POORWILL_TEST_UNSET}\"]")
    );
    std::fs::write(&path, &text).unwrap();
    assert!(Config::read(&path).is_err());
    let control = Config::read_control(&path).unwrap();
    assert!(control.listen.port() == 9001 && control.keys[0].matches("operator"));
    std::fs::write(&path, text.replace("file:", "env:")).unwrap();
    let error = Config::read_control(&path).unwrap_err();
    assert_eq!(error.place().map(|place| place.line), Some(5), "{error}");
}

#[test]
fn variables_of_keys_and_headers_are_known() {
    let text = format!(
        "[front]\nkeys = [\"env:A\", {{ source = \"env:B\", name = \"b\" }}]\n[control]\nkeys = [\"env:C\", \"file:x\"]\n{}",
        traced(COLLECTOR, "headers = { X = \"env:D\" }").replace("name = \"one\"", "name = \"${env.NAME}\"")
    );
    let config = Config::parse(&text, &|_| Ok("text".to_owned())).unwrap();
    assert_eq!(config.secret_variables.iter().collect::<Vec<_>>(), ["A", "B", "C", "D"]);
}

#[test]
fn an_engine_for_embeddings_is_asked_for_them_first() {
    let hint = |command: &str| {
        parsed(&model(&format!("command = [\"x\", \"{command}\"]"))).unwrap().models[0].canary.hint
    };
    assert_eq!(hint("--embedding"), Some(CanaryKind::Embedding));
    assert_eq!(hint("--reranking"), Some(CanaryKind::Rerank));
    assert_eq!(hint("--embeddings-of-sorts"), None);
}

/// The mistakes of a file, as a line each.
fn mistakes(text: &str) -> Vec<String> {
    let error = parsed(text).expect_err(text);
    let all: Vec<String> = error.mistakes().iter().map(ToString::to_string).collect();
    assert_eq!(error.to_string(), all.join("\n"));
    assert!(error.mistakes().iter().all(|one| one.mistakes().len() == 1), "{error:?}");
    all
}

/// Each as if it were the only one, in the order of the file, and with its line.
#[test]
fn all_mistakes_are_reported_at_once() {
    let text = r#"
[front]
body_max = 0
[memory]
gpu = "8GiB"
[traces]
endpoint = "http://127.0.0.1/v1/traces"
sample = 2
headers = { a = "env:NONE", "b c" = "env:FRONT" }
[[model]]
name = "one"
url = "http://127.0.0.1:8000"
level = 3
environment = { "A=B" = "x" }
canary = { tokens = 0 }
rules = { queue_max = 0, wake_max = "0s", stop_max = "0s" }
metadata = { id = 1, name = "x" }
strip = ["model", "stream"]
[[model]]
name = "two"
url = "8001"
gpus = []
aliases = ["one", " x", "y "]
http = { health = "up" }
[[selector]]
name = "any"
targets = ["gone", "any"]
[profile.p]
a = "gone"
"#;
    let all = mistakes(text);
    let line = |number: usize| text.lines().nth(number - 1).unwrap();
    for (number, words) in [
        (3, "front: body_max is 0;"),
        (5, "memory: gpu is for"),
        (7, "traces: endpoint has to have a host and a port"),
        (8, "traces: sample is 2;"),
        (9, "traces: the header \"a\" of headers has no value"),
        (9, "traces: the header \"b c\" of headers has no valid name"),
        (13, "model `one`: level is 3;"),
        (14, "model `one`: environment, folder and log are for a command"),
        (14, "model `one`: environment has \"A=B\""),
        (15, "model `one`: a canary has a prompt"),
        (16, "model `one`: running_max and queue_max are 1 or more"),
        (16, "model `one`: wake_max is 0"),
        (16, "model `one`: stop_max is 0"),
        (17, "model `one`: metadata has `id`"),
        (17, "model `one`: metadata has `name`"),
        (18, "model `one`: strip cannot have `model`"),
        (18, "model `one`: strip cannot have `stream`"),
        (20, "model `two`: model `one` has the name `one` as well"),
        (21, "model `two`: url is `8001`"),
        (22, "model `two`: gpus are []"),
        (24, "model `two`: http is for engines without an adapter"),
        (27, "selector `any`: targets has `gone`"),
        (27, "selector `any`: targets has `any`, which is a selector"),
        (29, "profile `p`: `a` stands for `gone`"),
    ] {
        let is_reported = |one: &&String| {
            one.starts_with(&format!("line {number}, ")) && one.contains(&format!(": {words}"))
        };
        assert_eq!(all.iter().filter(is_reported).count(), 1, "{words}, of `{}`: {all:#?}", line(number));
    }
    let odd = |name: &str| all.iter().any(|one| one.contains(&format!("model `two`: {name:?} has blanks")));
    assert!(odd(" x") && odd("y "), "{all:#?}");
    assert_eq!(all.len(), 26, "{all:#?}");
    let number = |one: &String| one[5..].split(',').next().unwrap().parse::<usize>().unwrap();
    assert!(all.is_sorted_by_key(number), "{all:#?}");
}

/// One mistake has one message: what depends on it has none.
#[test]
fn what_follows_from_a_mistake_is_none() {
    let every = "[every_model]\nwake_max = \"0s\"\n";
    let other = model("").replace("\"one\"", "\"two\"").replace("8000", "8001");
    let table = "[hibernate]\n";
    for text in [
        // A rule of every model is reported once.
        format!("{every}{}{other}", model("")),
        model("[model.rules]\nwake_max = \"0s\""),
        model("").replace("\"one\"", "\"\""),
        model("aliases = [\" \"]"),
        model("adapters = [\"\"]"),
        // What is no address is compared with none.
        format!("{}{}", model("").replace("http://127.0.0.1:8000", ""), other),
        // It is not known whether it sleeps.
        model("engine = \"http\"\n[model.http]\nsleep = \"POST /s\""),
        model("engine = \"http\"\n[model.rules]\nsleeps = true"),
        format!("{table}{}", model("[model.rules]\nhibernates = false\nhibernate_after = \"1s\"")),
        format!("{table}{}", model("command = [\"a\"]\n[model.rules]\nsleep_max = \"0s\"")),
        model("strip = [\"\"]"),
        format!("{}[[selector]]\nname = \"\"\ntargets = [\"one\"]\n", model("")),
    ] {
        assert_eq!(mistakes(&text).len(), 1, "{:#?} of\n{text}", mistakes(&text));
    }
    // What cannot be read is reported first, and alone.
    let error = refused(&format!("[front]\nbody_max = 0\n{}", model("levl = 3")));
    assert!(error.contains("did you mean `level`?") && !error.contains('\n'), "{error}");
}

#[test]
fn no_error_shows_a_secret() {
    for (text, line) in [
        (format!("[front]\nkeys = [\"sk-12345\"]\n{}", model("")), 2),
        (format!("[front]\nkays = [\"sk-12345\"]\n{}", model("")), 2),
        (format!("[front]\nkeys = [sk-12345]\n{}", model("")), 2),
        (format!("[front]\nkeys = [sk-12345==]\n{}", model("")), 2),
        (format!("[front]\nkeys = [\n\"sk-12345\" \"sk-12345\"]\n{}", model("")), 3),
        (format!("front = {{ keys = [\"sk-12345\"], other = 1 }}\n{}", model("")), 1),
        (model("command = [\"a\"]\nenvironment = { A = \"sk-12345\\u0000\" }"), 5),
        (model("command = [\"a\"]\nenvironment = \"sk-12345\""), 5),
        (model("enviroment = { A = \"sk-12345\" }"), 4),
        (model("command = [\"a\"]\n[model.environment]\nA = \"sk-12345"), 6),
        (model("command = [\"a\", \"--api-key\",\n\"sk-12345\" 1]"), 5),
        (model("comand = [\"sh\", \"-c\", \"TOKEN=sk-12345 a\"]"), 4),
        (model("").replace("http://127.0.0.1", "http://me:sk-12345@127.0.0.1"), 3),
        (traced(COLLECTOR, "headers = { authorization = \"sk-12345\" }"), 3),
        (traced("http://a:sk-12345@127.0.0.1:4318/v1/traces", ""), 2),
    ] {
        let (at, _, excerpt) = place(&text);
        assert_eq!(at, line, "{text}");
        let error = Config::parse(&text, &|_| Err("not written here".to_owned())).unwrap_err().to_string();
        let all = format!("{error}{excerpt:?}");
        assert!(!all.contains("sk-12345") && !all.contains("12345"), "{all}");
    }
}

#[test]
fn engines_are_at_a_host_and_a_port() {
    for url in [
        "",
        "127.0.0.1:8000",
        "https://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://:8000",
        "http://127.0.0.1:0",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:8000/v1",
        "http://me@127.0.0.1:8000",
        "http://127.0.0.1:8000?x=1",
        "http://127.0.0.1 :8000",
        "http://127.0.0.1:+80",
        "http://::1:8000",
        "http://[::1:8000",
        "http://[one]:8000",
    ] {
        let text = model("").replace("http://127.0.0.1:8000", url);
        let error = refused(&text);
        let shown = url.replace("http://me@", "…@");
        assert!(error.starts_with(&format!("line 3, column 1: model `one`: url is `{shown}`")), "{error}");
    }
    for url in ["http://127.0.0.1:1", "http://[::1]:8000", "http://engine.local:65535/"] {
        parsed(&model("").replace("http://127.0.0.1:8000", url)).unwrap();
    }
}

#[test]
fn both_may_listen_on_any_free_port() {
    let listeners = "[front]\nlisten = \"127.0.0.1:0\"\n[control]\nlisten = \"127.0.0.1:0\"\n";
    parsed(&format!("{listeners}{}", model(""))).unwrap();
}

/// The configuration in the operators' guide is valid, including its commented lines.
#[test]
fn the_guides_configuration_is_one() {
    let guide = include_str!("../../../../docs/rotate.md");
    let text = guide.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let secret = |_: &str| Ok("a-key".to_owned());
    let plain = Config::parse(text, &secret).unwrap();
    assert_eq!(plain.models.len(), 2);
    assert_eq!(plain.models[1].canary.expect.as_deref(), Some("Paris"));
    let all = text.replace("\n# keys", "\nkeys").replace("\n# body_max", "\nbody_max");
    let all = ["head_max", "requests_max", "keep_alive", "idle_max", "look_every"]
        .iter()
        .fold(all, |all, key| all.replace(&format!("\n# {key}"), &format!("\n{key}")));
    assert!(!all.lines().any(|line| line.starts_with("# ") && line.contains(" = ")), "{all}");
    let all = Config::parse(&all, &secret).unwrap();
    assert_eq!((all.front.keys.len(), all.control.keys.len()), (2, 1));
    assert!(all.models.iter().all(|model| model.rules.idle_max.is_some()));
}

#[test]
fn origins_and_paths_are_written_as_in_requests() {
    let front = |key: &str, value: &str| parsed(&format!("[front]\n{key} = [{value:?}]\n{}", model("")));
    for origin in ["*", "https://a.example", "http://localhost:3000", "http://[::1]:8080", "app://notes"] {
        assert_eq!(front("origins", origin).unwrap().front.origins, [origin]);
    }
    for origin in [
        "",
        "null",
        "a.example",
        "https://",
        "https://a/",
        "https://*.a",
        "https://a:443",
        "http://a:80",
        "://a",
    ] {
        assert!(front("origins", origin).is_err(), "{origin}");
    }
    for path in ["/v1/tokenize", "/v1/a/b", "/v1/a/", "/infill", "/a/", "/sdapi/v2/x"] {
        assert_eq!(front("paths", path).unwrap().front.paths, [path]);
    }
    for path in [
        "",
        "/",
        "/v1/",
        "/v1//a",
        "/v1/../a",
        "/v1/%61",
        "/v1/a?b",
        "v1/a",
        "/v1/a b",
        "/sleep",
        "/Wake_Up",
        "/slots/",
        "/api/pull",
        "/rotate/",
        "/engines/one/x",
    ] {
        assert!(front("paths", path).is_err(), "{path}");
    }
    let lines = "sleep = \"POST /nap\"\nwake = \"POST /up\"\nasleep = \"GET /state?x=1\"";
    for path in ["/nap", "/up", "/state"] {
        let text = format!("[front]\npaths = [\"/ner\", \"{path}\"]\n{}", http_model(lines));
        let error = parsed(&text).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains(path) && error.contains("`one`"), "{error}");
    }
}

/// A model of the kind `http` with these lines under `[model.http]`.
fn http_model(lines: &str) -> String {
    model(&format!("engine = \"http\"\ncommand = [\"a\"]\n[model.http]\n{lines}"))
}

#[test]
fn engines_of_the_kind_http_sleep_if_they_have_calls_for_it() {
    let sleeps = |text: &str| parsed(text).unwrap().models[0].rules.can_sleep;
    let calls = "sleep = \"POST /s\"\nwake = \"POST /w\"\nasleep = \"GET /a\"";
    assert!(!sleeps(&http_model("")));
    assert!(!sleeps(&model("engine = \"http\"\ncommand = [\"a\"]")));
    assert!(sleeps(&http_model(calls)));
    assert!(!sleeps(&http_model(&format!("{calls}\n[model.rules]\nsleeps = false"))));
    // A rule of every model is none of this one's.
    assert!(!sleeps(&format!("[every_model]\nsleeps = true\n{}", http_model(""))));
    // It may run without a command, as a service of the machine.
    assert!(sleeps(&model(&format!("engine = \"http\"\n[model.http]\n{calls}"))));
    let written = parsed(&http_model(&format!("health = \"/api/version\"\n{calls}"))).unwrap();
    assert_eq!(written.models[0].engine, EngineKind::Http);
    assert_eq!(written.models[0].http.health, "/api/version");
}

#[test]
fn a_wrong_key_of_an_engine_of_the_kind_http_is_an_error_that_says_what_is_right() {
    let with = |key: &str, value: &str| {
        let others = ["sleep", "wake", "asleep"].into_iter().filter(|other| *other != key);
        let others: String = others.map(|other| format!("{other} = \"GET /x\"\n")).collect();
        http_model(&format!("{others}{key} = {value}"))
    };
    for (text, line, words) in [
        (http_model("health = \"up\""), 7, &["health is \"up\"", "begins with one /"][..]),
        (http_model("health = \"/a b\""), 7, &["health", "no blanks"]),
        (http_model("health = 1"), 7, &["a text in quotes"]),
        (http_model("halth = \"/\""), 7, &["did you mean `health`?"]),
        (http_model("sleep = \"POST /s\""), 7, &["needed together", "wake = \"POST /wake\""]),
        (http_model("sleep = \"POST /s\"\nwake = \"POST /w\""), 7, &["asleep = \"GET /is_sleeping\""]),
        (http_model("asleep = \"GET /s\""), 7, &["sleep = \"POST /sleep\""]),
        (with("sleep", "\"SLEEP /s\""), 9, &["sleep is \"SLEEP /s\"", "POST, PUT", "\"POST /sleep\""]),
        (with("sleep", "\"post /s\""), 9, &["say GET, POST"]),
        (with("sleep", "\"/s\""), 9, &["say GET, POST"]),
        (with("sleep", "\"POST\""), 9, &["the path of sleep", "begins with one /"]),
        (with("sleep", "\"POST s\""), 9, &["the path of sleep is \"s\""]),
        (with("wake", "\"POST /s x\""), 9, &["the path of wake", "no blanks"]),
        (with("wake", "\"POST http://x/y\""), 9, &["the path of wake"]),
        (with("wake", "3"), 9, &["expected a method and a path in quotes"]),
        (with("wake", "[\"POST\"]"), 9, &["expected a method and a path in quotes"]),
        (with("wake", "{ body = {} }"), 9, &["missing field `call`"]),
        (with("wake", "{ call = \"POST /w\", bdy = {} }"), 9, &["did you mean `body`?"]),
        (with("wake", "{ call = \"POST /w\", at = \"/x\" }"), 9, &["unknown field `at`"]),
        (with("wake", "{ call = \"GET /w\", body = {} }"), 9, &["wake is a GET", "leave body out"]),
        (with("wake", "{ call = \"POST /w\", body = \"x\" }"), 9, &["wake has a body", "body = { model"]),
        (with("wake", "{ call = \"POST /w\", body = { a = nan } }"), 9, &["wake has NaN", "leave it out"]),
        (
            with("wake", "{ call = \"POST /w\", body = { a = 2026-01-01 } }"),
            9,
            &["wake has 2026", "in quotes"],
        ),
        (
            with("asleep", "{ call = \"GET /a\", at = \"x\" }"),
            9,
            &["asleep has at = \"x\"", "begins with a /"],
        ),
        (with("asleep", "{ call = \"GET /a\", is = 2026-01-01 }"), 9, &["asleep has 2026", "in quotes"]),
        (with("asleep", "{ call = \"SEE /a\" }"), 9, &["asleep is \"SEE /a\""]),
        (model("http = {}"), 4, &["engine = \"http\""]),
        (model("engine = \"sglang\"\n[model.http]\nhealth = \"/\""), 5, &["engine = \"http\""]),
        (model("engine = \"http\""), 1, &["could never leave", "say command"]),
        (model("engine = \"http\"\nlevel = 2\ncommand = [\"a\"]"), 5, &["level is for vllm and sglang"]),
        (http_model("[model.rules]\nsleeps = true"), 8, &["sleeps is true", "under [model.http]"]),
    ] {
        let error = refused(&text);
        assert!(error.starts_with(&format!("line {line}, ")), "{error:?} of\n{text}");
        for word in words {
            assert!(error.contains(word), "{error:?} of\n{text}");
        }
    }
}

#[test]
fn engines_lend_where_gpus_are_measured_by_nvml_or_have_a_folder() {
    let model = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n";
    assert_eq!(parsed(model).unwrap().lend, None);
    let lend = parsed(&format!("[lend]\n{model}")).unwrap().lend.unwrap();
    assert_eq!(lend.path(), poorwill::broker::default_path());
    assert!(
        !lend.peer_copies
            && parsed(&format!("[lend]\npeer_copies = true\n{model}")).unwrap().lend.unwrap().peer_copies
    );
    let named = parsed(&format!("[lend]\nbroker = \"/run/b.sock\"\n[memory]\nmeasure = \"nvml\"\n{model}"));
    assert_eq!(named.unwrap().lend.unwrap().path(), std::path::Path::new("/run/b.sock"));
    let simulated = "[memory]\nmeasure = \"processes\"\ngpu = \"8GiB\"\n";
    let with_folder = format!("{simulated}folder = \"gpus\"\n[lend]\n{model}");
    let folder = Some("gpus".into());
    assert_eq!(parsed(&with_folder).unwrap().memory, MemorySource::Processes { gpu_bytes: 8 << 30, folder });
    let long = format!("[lend]\nbroker = \"/{}\"\n", "b".repeat(107));
    for (lines, words) in [
        ("[lend]\nbroker = \"b.sock\"\n", "broker is `b.sock`; give the whole path"),
        ("[lend]\nbroker = \"\"\n", "give the whole path"),
        (&long, "broker has 108 bytes"),
        (&format!("{simulated}[lend]\n"), "say folder = "),
        (&format!("{simulated}folder = \"\"\n"), "folder is empty"),
        ("[memory]\nfolder = \"gpus\"\n", "folder is where simulated GPUs lend"),
        ("[memory]\nmeasure = \"amdgpu\"\n[lend]\n", "for GPUs that NVML measures"),
        ("[lend]\nsocket = \"/run/b.sock\"\n", "unknown field `socket`"),
    ] {
        let reason = refused(&format!("{lines}{model}"));
        assert!(reason.contains(words), "{reason}");
    }
    let engine =
        |environment: &str| format!("{model}command = [\"true\"]\nenvironment = {{ {environment} }}\n");
    let lends = refused(&engine("POORWILL_LEND = \"1\""));
    assert!(lends.contains("POORWILL_LEND without a [lend]"), "{lends}");
    assert!(parsed(&engine("POORWILL_LEND = \"0\"")).is_ok());
    let copies = engine("POORWILL_PEER_COPIES = \"1\"");
    assert!(parsed(&format!("[lend]\n{copies}")).is_ok());
    let off = engine("POORWILL_LEND = \"0\", POORWILL_PEER_COPIES = \"1\"");
    for refusal in [refused(&copies), refused(&format!("[lend]\n{off}"))] {
        assert!(refusal.contains("POORWILL_PEER_COPIES and no lending"), "{refusal}");
    }
    let other = refused(&format!("[lend]\n{}", engine("POORWILL_BROKER = \"/other\"")));
    assert!(other.contains("another POORWILL_BROKER"), "{other}");
}

#[test]
fn turns_are_cut_where_an_engine_keeps_requests_and_is_tested_beside_them() {
    let two = Some(Duration::from_secs(2));
    let ours = "command = [\"true\"]\nenvironment = { POORWILL_SLEEP_MODE = \"1\" }\n";
    let own = "[model.rules]\nslice_max = \"2s\"\n";
    let before = "[model.canary]\nwhen = \"before\"\n";
    for (lines, slice, is_beside) in [
        (String::new(), None, false),
        (ours.to_owned(), two, true),
        (own.to_owned(), two, true),
        (format!("{ours}[model.rules]\nslice_max = \"0s\""), None, true),
        (format!("level = 2\n{ours}"), None, false),
        (format!("{ours}{before}"), None, false),
        (format!("{own}{before}expect = \"3\""), two, false),
    ] {
        let config = parsed(&model(&lines)).unwrap();
        let model = &config.models[0];
        assert_eq!((model.rules.slice_max, model.canary.is_beside), (slice, is_beside), "{lines}");
    }
    for lines in
        [format!("level = 2\n{own}"), format!("engine = \"sglang\"\n{own}"), format!("{own}{before}")]
    {
        let error = parsed(&model(&lines)).unwrap_err().to_string();
        assert!(error.contains("slice_max is for a vllm"), "{lines}: {error}");
    }
}

#[test]
fn a_canary_runs_beside_requests_where_wakes_compare_bytes() {
    let is_beside = |lines: &str| parsed(&model(lines)).unwrap().models[0].canary.is_beside;
    let ours = "command = [\"vllm\"]\nenvironment = { POORWILL_SLEEP_MODE = \"1\" }\n";
    for (lines, expected) in [
        (String::new(), false),
        (ours.to_owned(), true),
        (ours.replace("\"1\"", "\"0\""), false),
        ("command = [\"vllm\", \"--sleep-mode-backend\", \"poorwill\"]".to_owned(), true),
        ("command = [\"vllm\", \"--sleep-mode-backend=poorwill\"]".to_owned(), true),
        ("command = [\"vllm\", \"--sleep-mode-backend\", \"other\"]".to_owned(), false),
        (format!("{ours}level = 2"), false),
        (format!("{ours}[model.canary]\nwhen = \"before\""), false),
        (format!("{ours}[model.canary]\nexpect = \"3\""), false),
        (format!("{ours}[model.canary]\nkind = \"embedding\""), false),
        ("[model.canary]\nwhen = \"beside\"".to_owned(), true),
    ] {
        assert_eq!(is_beside(&lines), expected, "{lines}");
    }
    for (lines, reason) in [
        ("level = 2\n[model.canary]\nwhen = \"beside\"", "no wake of it compares its bytes"),
        ("[model.canary]\nwhen = \"beside\"\nexpect = \"3\"", "compared with the first one"),
        ("[model.canary]\nwhen = \"during\"", "before"),
    ] {
        let error = refused(&model(lines));
        assert!(error.contains(reason), "{error}");
    }
}
