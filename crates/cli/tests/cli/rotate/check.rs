//! `poorwill rotate check`: what would be served, and what is missing, without starting anything.

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;

use super::fixture::{Fixture, Model};
use crate::json::expect;

fn fixture() -> Fixture {
    Fixture::new("512MiB", vec![Model::new("amber")])
}

fn check(fixture: &Fixture, more: &[&str]) -> crate::support::Ran {
    fixture.write();
    fixture.run(&[&["rotate", "check", "--config", "rotation.toml"], more].concat())
}

#[test]
fn it_says_what_would_be_served_and_starts_nothing() {
    let mut fixture = fixture();
    fixture.has_keys = true;
    fixture.models[0].lines = "aliases = [\"resin\"]\nadapters = [\"bark\"]\n[[selector]]\nname = \"tree\"\n\
                               targets = [\"bark\", \"amber\"]\n"
        .to_owned();
    let text = check(&fixture, &[]).succeeded();
    let front = format!("clients:   http://127.0.0.1:{} (1 key)", fixture.front);
    for words in [
        &front,
        "operators: http",
        "model amber, resin, bark: vllm at http",
        "selector tree: one of bark, amber",
        "nothing is missing",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    assert!(!text.contains("a-key-of-this-test") && !text.contains("--listen"), "{text}");
    let report = check(&fixture, &["--json"]).json();
    expect("poorwill rotate check", &report);
    assert_eq!(report["models"][0]["aliases"], json!(["resin"]));
    assert_eq!(report["models"][0]["adapters"], json!(["bark"]));
    assert_eq!(report["selectors"], json!([{"name": "tree", "targets": ["bark", "amber"]}]));
    assert_eq!((&report["errors"], &report["warnings"]), (&json!([]), &json!([])));
    assert!(!fixture.folder.join("state").exists());
    fixture.assert_empty();
}

#[test]
fn it_reports_all_mistakes_of_the_file() {
    let fixture = fixture();
    let text = "[front]\nbody_max = 0\nhead_max = 0\n[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8000\"\n\
                level = 3\n[[model]]\nname = \"two\"\nurl = \"http://127.0.0.1:8001\"\nneed = 0\nserved_as = \"\"\n";
    fixture.folder.write("odd.toml", text);
    let ran = fixture.run(&["rotate", "check", "--config", "odd.toml", "--json"]);
    let mistakes = [
        "odd.toml: line 2, column 1: front: body_max is 0; leave it out or make it larger",
        "odd.toml: line 3, column 1: front: head_max is 0; leave it out or make it larger",
        "odd.toml: line 7, column 1: model `one`: level is 3; 1 keeps the weights in host memory, 2 drops them",
        "odd.toml: line 11, column 1: model `two`: need is 0; leave it out if it is unknown, and it is measured",
        "odd.toml: line 12, column 1: model `two`: served_as is empty; leave it out if the engine calls it as clients do",
    ];
    assert_eq!(ran.json()["error"], mistakes.join("\n"));
    // Below each is its line.
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(lines, mistakes.map(|line| format!("error: {line}")));
    for line in
        ["2 | body_max = 0", "3 | head_max = 0", "7 | level = 3", "11 | need = 0", "12 | served_as = \"\""]
    {
        assert!(ran.stderr.contains(&format!("\n{line}\n")), "{}", ran.stderr);
    }
}

#[test]
fn a_stop_command_that_is_missing_is_a_warning() {
    let mut fixture = fixture();
    fixture.models[0].lines = "engine = \"http\"\nstop_command = [\"no-such-stop\"]\n".to_owned();
    let text = check(&fixture, &[]).succeeded();
    for words in ["model amber: http at", "warning: model `amber`: no-such-stop is in no folder of PATH"] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
}

#[test]
fn it_says_what_is_missing() {
    let fixture = fixture();
    let plain = fixture.folder.join("plain");
    fs::write(&plain, "no program").unwrap();
    fs::set_permissions(&plain, Permissions::from_mode(0o644)).unwrap();
    let no_program = format!("command = [{plain:?}]");
    for (model, words) in [
        ("command = [\"no-such-engine\"]", "no-such-engine is in no folder of PATH"),
        (&no_program[..], "plain is no program"),
        ("command = [\"sh\"]\nfolder = \"nowhere\"", "its folder nowhere is not there"),
        ("command = [\"sh\"]\nenvironment = { PATH = \"/nowhere\" }", "sh is in no folder of PATH"),
        ("command = [\"sh\"]\nlog = \"nowhere/log\"", "the log nowhere/log cannot be written"),
    ] {
        fixture.folder.write(
            "odd.toml",
            format!(
                "[front]\nlisten = \"127.0.0.1:0\"\n[control]\nlisten = \"127.0.0.1:0\"\n[memory]\n\
                 measure = \"processes\"\ngpu = \"1GiB\"\n[[model]]\nname = \"one\"\n\
                 url = \"http://127.0.0.1:8000\"\n{model}\n"
            ),
        );
        let ran = fixture.run(&["rotate", "check", "--config", "odd.toml"]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.stdout.contains("error: model `one`: ") && ran.stdout.contains(words), "{ran:?}");
        assert!(ran.stderr.contains("cannot be served here"), "{ran:?}");
    }
    fixture.folder.write("state", "no folder");
    let ran = check(&fixture, &[]);
    assert!(ran.code == 1 && ran.stdout.contains("the state folder"), "{ran:?}");
    fs::remove_file(fixture.folder.join("state")).unwrap();

    // What may be there later, or is this very service, is no error.
    let _taken = TcpListener::bind(("127.0.0.1", fixture.front)).unwrap();
    let text = check(&fixture, &[]).succeeded();
    assert!(text.contains("warning: front: 127.0.0.1") && text.contains("is taken"), "{text}");
    fixture.assert_empty();
}

#[test]
fn where_nothing_can_wake_it_fails() {
    let mut fixture = fixture();
    fixture.models.push(Model::new("birch"));
    fixture.lacks_nvml = true;
    let ran = check(&fixture, &[]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let words = "error: models `amber`, `birch` cannot wake: cannot measure GPU 0: NVML is not available";
    assert!(ran.stdout.contains(words) && ran.stderr.contains("cannot be served here"), "{ran:?}");
}

#[test]
fn a_need_that_no_gpu_has_is_an_error_and_declared_memory_a_warning() {
    let fixture = fixture();
    fixture.write();
    let too_large = "error: model `amber` needs 600 MiB on GPU 0, which has 512 MiB";
    for (measure, need, code, words) in [
        ("declared", "300MiB", 0, "warning: memory: nothing is measured"),
        ("declared", "600MiB", 1, too_large),
        ("processes", "300MiB", 0, "nothing is missing"),
        ("processes", "600MiB", 1, too_large),
    ] {
        let config = fixture.config().replace("\"processes\"", &format!("{measure:?}"));
        let config = config.replace("\"80MiB\"", &format!("\"{need}\""));
        fixture.folder.write("rotation.toml", config);
        let ran = fixture.run(&["rotate", "check", "--config", "rotation.toml"]);
        assert!(ran.code == code && ran.stdout.contains(words), "{ran:?}");
    }
}
