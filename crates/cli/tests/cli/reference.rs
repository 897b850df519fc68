//! `docs/reference/commands.md` is what the command prints, and lists every environment variable that is read. The
//! example of `recording.md` beside it is read.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Folder, run};

/// Parts of names of environment variables in the sources.
const VARIABLES: [&str; 5] = ["POORWILL_", "VLLM_", "CUDA_DEVICE_", "CUDA_MPS_", "_VISIBLE_DEVICES"];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    run(&Folder::new(), &["reference"]).succeeded()
}

#[test]
fn the_page_is_what_the_command_prints() {
    let path = root().join("docs/reference/commands.md");
    let page = page();
    if std::env::var_os("POORWILL_BLESS").is_some_and(|value| value == "1") {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &page).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    assert!(committed == page, "run POORWILL_BLESS=1 cargo test -p poorwill-cli --test cli reference");
    assert!(committed.lines().next().unwrap().contains("POORWILL_BLESS=1"));
}

#[test]
fn every_visible_command_and_option_is_on_the_page() {
    let folder = Folder::new();
    let page = page();
    let mut waiting: Vec<Vec<String>> = vec![Vec::new()];
    let mut commands = 0;
    while let Some(command) = waiting.pop() {
        let args: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let help = run(&folder, &args).succeeded();
        let name = ["poorwill".to_owned()].into_iter().chain(command.clone()).collect::<Vec<_>>().join(" ");
        assert!(command.is_empty() || page.contains(&format!("## `{name}`\n")), "{name}");
        let section = page.split(&format!("## `{name}`\n")).last().unwrap();
        let section = section.split("\n## ").next().unwrap();
        let list = help.split("Commands:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap();
        for line in list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   ")) {
            let name = line.split_whitespace().next().unwrap();
            if name != "help" {
                waiting.push([&command[..], &[name.to_owned()]].concat());
            }
        }
        for option in help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 2) {
            let option = option.split('[').next().unwrap_or_default();
            let option = option.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
            let is_own = help.lines().any(|line| line.trim_start().starts_with(option));
            if is_own && !command.is_empty() && !["--help", "--version"].contains(&option) {
                assert!(section.contains(&format!("`{option}")), "{name} {option}");
            }
        }
        commands += 1;
    }
    assert!(commands > 10, "{commands}");
    assert!(!page.contains("mock-engine"));
}

#[test]
fn every_environment_variable_in_the_sources_is_on_the_page() {
    let page = page();
    let mut found = 0;
    for name in ["bench", "cli", "core", "driver", "local", "poorwill", "rotate"] {
        let mut folders = vec![root().join("crates").join(name).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.file_stem().is_some_and(|name| name == "tests") {
                    continue;
                }
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let source = fs::read_to_string(&path).unwrap_or_default();
                // Clippy has a module of tests at the end.
                let source = source.split("\nmod tests {").next().unwrap_or_default();
                for text in source.split('"').skip(1).step_by(2) {
                    let is_name =
                        text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
                    let is_read = VARIABLES.iter().any(|part| text.contains(part)) && !text.ends_with('_');
                    if is_name && is_read && !text.contains("_TEST_") && !text.contains("_FAKE_") {
                        assert!(page.contains(&format!("`{text}`")), "{text} of {}", path.display());
                        found += 1;
                    }
                }
            }
        }
    }
    assert!(found >= 8, "{found}");
}

#[test]
fn the_small_program_knows_which_commands_it_lacks() {
    let folder = Folder::new();
    let help = run(&folder, &["--help"]).succeeded();
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    // Longer descriptions go on in lines that stand further in.
    let lines = list.lines().filter(|line| !line.starts_with("   "));
    let names: Vec<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
    let own = ["demo", "verify", "hibernate", "doctor", "bench", "help"];
    let hidden = ["mock-engine", "reference"];
    let mut services: Vec<&str> =
        names.into_iter().filter(|name| !own.contains(name)).chain(hidden).collect();
    let mut known = poorwill_local::SERVICES.to_vec();
    services.sort_unstable();
    known.sort_unstable();
    assert_eq!(services, known);
}

#[test]
fn the_example_of_a_recording_is_read() {
    let folder = Folder::new();
    let page = fs::read_to_string(root().join("docs/reference/recording.md")).unwrap();
    let example = page.split("```json\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    folder.write("example.jsonl", example);
    let report = run(&folder, &["replay", "example.jsonl", "--json"]).json();
    let trace = &report["traces"][0];
    assert_eq!(trace["verdict"], "fits", "{trace}");
    assert_eq!((&trace["total_bytes"], &trace["live_peak_bytes"]), (&(1 << 30).into(), &(6 << 20).into()));
    let row = trace["rows"].as_array().unwrap().iter().find(|row| row["setup"] == trace["setup"]).unwrap();
    assert_eq!((&row["peak_phase"], &row["live_bytes"]), (&"load".into(), &(4 << 20).into()), "{row}");
    assert_eq!(trace["recorded_peak_bytes"], 22 << 20, "{trace}");
}
