//! `poorwill rotate init`: engines that run are found, and what is written can be served.
//!
//! Other tests have engines, too: only those of unique names are looked at.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Child, Command};

use serde_json::{Value, json};

use super::fixture::{Fixture, ran, text_of, until};

/// Mock engines that no service started, which end with their test.
struct Engines {
    fixture: Fixture,
    running: Vec<(String, Child, u16)>,
}

impl Engines {
    fn new(names: &[&str]) -> Self {
        let fixture = Fixture::new("0", Vec::new());
        let mut engines = Self { fixture, running: Vec::new() };
        for name in names {
            let name = format!("{name}-{}", std::process::id());
            let (child, port) = engines.fixture.mock(&name, &["--seed", "7"]);
            engines.running.push((name, child, port));
        }
        engines
    }

    fn init(&self, more: &[&str]) -> Command {
        self.fixture.command(&[&["rotate", "init"], more].concat())
    }

    /// What is written, with these engines alone.
    fn only_these(&self, text: &str) -> String {
        let mut sections = text.split("\n[[model]]");
        let head = sections.next().unwrap().to_owned();
        let is_ours = |section: &&str| self.running.iter().any(|(name, ..)| section.contains(name.as_str()));
        sections.filter(is_ours).fold(head, |text, section| text + "\n[[model]]" + section)
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for (_, child, _) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn engines_that_run_are_found_and_can_be_served() {
    let engines = Engines::new(&["maple", "aspen"]);
    let ran_init = ran(&mut engines.init(&["--config", "rotate.toml"]));
    let summary = ran_init.succeeded();
    let text = fs::read_to_string(engines.fixture.folder.join("rotate.toml")).unwrap();
    for (name, _, port) in &engines.running {
        let url = format!("http://127.0.0.1:{port}");
        assert!(summary.contains(&format!("found {name}: a mock engine at {url}\n")), "{summary}");
        for words in
            [format!("name = \"{name}\""), format!("url = \"{url}\""), "\"--seed\", \"7\"".to_owned()]
        {
            assert!(text.contains(&words), "`{words}` is not in: {text}");
        }
    }
    assert!(summary.ends_with("next: poorwill rotate check --config rotate.toml\n"), "{summary}");

    // The rotation takes them over as they are.
    let memory = "\n[memory]\nmeasure = \"processes\"\ngpu = \"64MiB\"\n\n[[model]]";
    let text = engines.only_these(&text).replacen("\n[[model]]", memory, 1);
    let port_of = |header: &str| -> u16 {
        let section = text.split(header).nth(1).unwrap();
        let line = section.lines().find(|line| line.starts_with("listen = ")).unwrap();
        line.trim_end_matches('"').rsplit_once(':').unwrap().1.parse().unwrap()
    };
    // Those of the file may be another's meanwhile.
    let (front, control) = (super::fixture::free_port(), super::fixture::free_port());
    let text = text
        .replace(&format!("127.0.0.1:{}\"", port_of("[front]")), &format!("127.0.0.1:{front}\""))
        .replace(&format!("127.0.0.1:{}\"", port_of("[control]")), &format!("127.0.0.1:{control}\""));
    engines.fixture.folder.write("own.toml", text);
    let checked = engines.fixture.run(&["rotate", "check", "--config", "own.toml"]).succeeded();
    assert!(checked.ends_with("nothing is missing\n"), "{checked}");
    let mut fixture = Fixture::new("0", Vec::new());
    (fixture.front, fixture.control) = (front, control);
    let config = fs::read_to_string(engines.fixture.folder.join("own.toml")).unwrap();
    let rotator = fixture.start_with(&config, &["--keep-engines"]);
    for (name, ..) in &engines.running {
        text_of(&fixture.complete(name, "Who is there?"));
        until(&rotator, "it is ready", || fixture.now(name)["stage"] == "ready");
        assert_eq!(fixture.now(name)["starts"], 0);
    }
    rotator.end();
}

#[test]
fn the_configuration_goes_to_standard_output_without_a_file() {
    let engines = Engines::new(&["cherry"]);
    let text = ran(&mut engines.init(&[])).succeeded();
    let name = &engines.running[0].0;
    assert!(text.contains(&format!("name = \"{name}\"")) && text.contains("[control]"), "{text}");
    let report = ran(&mut engines.init(&["--json"])).json();
    crate::json::expect("poorwill rotate init", &report);
    let is_it = |model: &Value| model["name"] == name.as_str() && model["engine"] == "a mock engine";
    assert!(report["models"].as_array().unwrap().iter().any(is_it), "{report}");
    assert!(report["configuration"].as_str().unwrap().contains(name.as_str()), "{report}");
    let report = ran(&mut engines.init(&["--json", "--config", "new.toml"])).json();
    assert_eq!((&report["file"], &report["configuration"]), (&json!("new.toml"), &Value::Null));
}

#[test]
fn gpus_are_those_where_the_process_has_memory() {
    let engines = Engines::new(&["walnut"]);
    let (name, child, _) = &engines.running[0];
    let libraries = engines.fixture.folder.join("libraries");
    fs::create_dir(&libraries).unwrap();
    symlink(poorwill_fake_nvml::path(), libraries.join("libnvidia-ml.so.1")).unwrap();
    let uuid = |nth: u32| format!("GPU-00000000-0000-0000-0000-00000000000{nth}");
    let devices =
        format!("{}:total=80GiB,{}:total=24GiB:process={}/3GiB:process=1/9GiB", uuid(1), uuid(2), child.id());
    let mut init = engines.init(&[]);
    init.env("LD_LIBRARY_PATH", &libraries).env("POORWILL_FAKE_NVML_DEVICES", devices);
    let text = ran(&mut init).succeeded();
    assert!(text.contains("# GPU 0 has 80 GiB.\n# GPU 1 has 24 GiB.\n"), "{text}");
    let model = text.split("[[model]]").find(|model| model.contains(name.as_str())).unwrap();
    assert!(model.contains("gpus = [1]\nneed = \"3072MiB\"\n"), "{model}");
}

#[test]
fn nothing_is_overwritten() {
    let engines = Engines::new(&[]);
    let folder = &engines.fixture.folder;
    folder.write("rotate.toml", "mine");
    let words = ["cannot write rotate.toml", "it is not replaced: name another"];
    ran(&mut engines.init(&["--config", "rotate.toml"])).failed(&words);
    assert_eq!(fs::read_to_string(folder.join("rotate.toml")).unwrap(), "mine");
    ran(&mut engines.init(&["--config", "nowhere/rotate.toml"])).failed(&["make its folder first"]);
    let report = ran(&mut engines.init(&["--config", "rotate.toml", "--json"]));
    assert!(report.json()["error"].as_str().unwrap().contains("rotate.toml"), "{report:?}");
    let locked = folder.join("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, Permissions::from_mode(0o500)).unwrap();
    // Root may write everywhere.
    if fs::write(locked.join("probe"), "").is_err() {
        ran(&mut engines.init(&["--config", "locked/rotate.toml"])).failed(&["that this user may write"]);
    }
}

#[test]
fn a_port_that_another_engine_has_is_a_warning() {
    let engines = Engines::new(&["willow", "poplar"]);
    let [(willow, child, port), (poplar, _, other)] = &engines.running[..] else { panic!() };
    let config = |lines: &str| {
        format!(
            "[front]\nlisten = \"127.0.0.1:0\"\n[control]\nlisten = \"127.0.0.1:0\"\n[memory]\n\
             measure = \"processes\"\ngpu = \"1GiB\"\n[[model]]\nname = \"{willow}\"\n{lines}\n"
        )
    };
    let check = |lines: &str| {
        engines.fixture.folder.write("one.toml", config(lines));
        engines.fixture.run(&["rotate", "check", "--config", "one.toml"]).succeeded()
    };
    // Its own engine runs.
    let text = check(&format!("url = \"http://127.0.0.1:{port}\""));
    assert!(text.ends_with("nothing is missing\n"), "{text}");
    let text = check(&format!("url = \"http://localhost:{other}\""));
    let words = format!("serves `{poplar}`, and not `{willow}`");
    assert!(text.contains("warning: model") && text.contains(&words), "{text}");
    // It lists no models, and is not the command.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = taken.local_addr().unwrap();
    drop(std::thread::spawn(move || taken.incoming().for_each(drop)));
    let text = check(&format!("url = \"http://{silent}\"\ncommand = [\"sh\"]"));
    let words = format!("at http://{silent}, process {} (", std::process::id());
    assert!(text.contains(&words) && text.contains("which is not its command"), "{text}");
    assert!(text.contains("its engine could not listen there"), "{text}");
    assert_ne!(child.id(), std::process::id());
}

#[test]
fn gpus_that_are_missing_or_too_small_are_errors() {
    let engines = Engines::new(&[]);
    let libraries = engines.fixture.folder.join("libraries");
    fs::create_dir(&libraries).unwrap();
    symlink(poorwill_fake_nvml::path(), libraries.join("libnvidia-ml.so.1")).unwrap();
    let uuid = |nth: u32| format!("GPU-00000000-0000-0000-0000-00000000000{nth}");
    let devices = format!(
        "{}:total=24GiB,{}:total=80GiB:mig_mode=1,{}:total=8GiB:memory_error=4,{}:name=NVIDIA GB10",
        uuid(1),
        uuid(2),
        uuid(3),
        uuid(4)
    );
    let check = |lines: &str| {
        engines.fixture.folder.write(
            "one.toml",
            format!(
                "[front]\nlisten = \"127.0.0.1:0\"\n[control]\nlisten = \"127.0.0.1:0\"\n[[model]]\nname = \"one\"\n\
                 url = \"http://127.0.0.1:9\"\n{lines}\n"
            ),
        );
        let mut command = engines.fixture.command(&["rotate", "check", "--config", "one.toml"]);
        ran(command.env("LD_LIBRARY_PATH", &libraries).env("POORWILL_FAKE_NVML_DEVICES", &devices))
    };
    let text = check("gpus = [0]\nneed = \"24GiB\"").succeeded();
    assert!(text.ends_with("nothing is missing\n"), "{text}");
    let text = check("gpus = [3]").succeeded();
    let words = "warning: GPU 3 has no memory of its own by NVML, so the computer's memory is counted";
    assert!(text.contains(words), "{text}");
    for (lines, words) in [
        ("gpus = [0]\nneed = \"25GiB\"", "model `one` needs 25 GiB on GPU 0, which has 24 GiB"),
        (
            "gpus = [0, 4]",
            "model `one` cannot wake: cannot measure GPU 4: NVML shows 4 GPUs, counted from 0, and none at 4",
        ),
        (
            "gpus = [1]",
            "model `one` cannot wake: cannot measure GPU 1: GPU 1 is divided into instances (MIG)",
        ),
        (
            "gpus = [2]",
            "model `one` cannot wake: cannot measure GPU 2: NVML does not report the memory of GPU 2",
        ),
    ] {
        let report = check(lines);
        assert_eq!(report.code, 1, "{report:?}");
        assert!(report.stdout.contains(&format!("error: {words}")), "{report:?}");
        assert!(report.stderr.contains("this configuration cannot be served here"), "{report:?}");
    }
}
