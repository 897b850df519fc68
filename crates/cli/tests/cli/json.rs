//! What commands print with `--json` has the keys, types and texts of `docs/reference/json.md`, and all of them.

use std::collections::BTreeMap;
use std::fs;

use poorwill_testkit::engine::{HostEngine, run_as_child};
use serde_json::Value;

use crate::reference::root;
use crate::support::{Folder, run};

/// Key or text, and type, of each row of a table.
type Rows = Vec<(String, String)>;

/// The tables of commands by their names, those of objects by their anchors.
struct JsonPage(BTreeMap<String, Rows>);

impl JsonPage {
    fn read() -> Self {
        let text = fs::read_to_string(root().join("docs/reference/json.md")).unwrap();
        let mut tables = BTreeMap::<String, Rows>::new();
        let (mut command, mut of) = (String::new(), "error".to_owned());
        let between = |line: &str, from: &str| Some(line.strip_prefix(from)?.split('`').next()?.to_owned());
        for line in text.lines() {
            if let Some(name) = between(line, "## `") {
                (command, of) = (name.clone(), name);
            } else if let Some(given) = between(line, "With `").filter(|_| line.ends_with(':')) {
                of = format!("{command} {given}");
            } else if let Some(title) = line.strip_prefix("### ") {
                of = title.to_ascii_lowercase().replace(' ', "-");
            } else if let Some(printing) = between(line, "As [`") {
                tables.insert(of.clone(), tables[&printing].clone());
            } else if let Some(row) = line.strip_prefix("| `") {
                let (key, rest) = row.split_once("` | ").unwrap();
                let kind = rest.split(" | ").next().unwrap_or_default();
                tables.entry(of.clone()).or_default().push((key.to_owned(), kind.to_owned()));
            }
        }
        Self(tables)
    }

    fn expect(&self, of: &str, value: &Value) {
        let rows = self.0.get(of).unwrap_or_else(|| panic!("the page has no {of}"));
        let row = |key: &str| rows.iter().find(|(name, _)| name == key);
        let Some(object) = value.as_object() else {
            assert!(value.as_str().and_then(row).is_some(), "{of} has no text {value}");
            return;
        };
        for (key, value) in object {
            let (_, kind) = row(key).unwrap_or_else(|| panic!("the page has no {key} of {of}"));
            self.expect_kind(kind, value, &format!("{key} of {of}"));
        }
        for (key, kind) in rows {
            let may_lack = kind.contains("; ");
            assert!(may_lack || object.contains_key(key), "{key} of {of} is not in {value}");
        }
    }

    fn expect_kind(&self, kind: &str, value: &Value, at: &str) {
        let kind = kind.split("; ").next().unwrap_or_default();
        let (kind, may_be_null) = kind.strip_suffix(" or null").map_or((kind, false), |kind| (kind, true));
        if may_be_null && value.is_null() {
            return;
        }
        if let Some(kind) = kind.strip_prefix("list of ") {
            let list = value.as_array().unwrap_or_else(|| panic!("{at} is {value}"));
            list.iter().for_each(|value| self.expect_kind(kind, value, at));
        } else if let Some((kind, _)) =
            kind.strip_prefix("object of ").and_then(|kind| kind.split_once(" by "))
        {
            let object = value.as_object().unwrap_or_else(|| panic!("{at} is {value}"));
            object.values().for_each(|value| self.expect_kind(kind, value, at));
        } else if let Some((_, anchor)) = kind.split_once("](#") {
            self.expect(anchor.split(')').next().unwrap_or_default(), value);
        } else {
            let is_right = match kind.split(' ').next().unwrap_or_default() {
                "text" => value.is_string(),
                "bool" => value.is_boolean(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                _ => false,
            };
            assert!(is_right, "{at} is {value}, and should be {kind}");
        }
    }
}

/// What a command printed has all keys of its table, and no others.
pub(crate) fn expect(command: &str, value: &Value) {
    JsonPage::read().expect(command, value);
}

#[test]
fn commands_print_what_the_page_says() {
    let folder = Folder::new();
    folder.write_tensor("w.safetensors", "w", 4096);
    let host = "--device=host:64MiB";
    for (command, args) in [
        ("poorwill verify", &["w.safetensors", host, "--kv-cache=4MiB", "--cycles=2", "--prepare"][..]),
        ("poorwill verify", &["w.safetensors", host, "--kv-cache=4MiB", "--level=2"]),
        ("poorwill doctor", &["--device=host:8GiB", "--claim=weights=1GiB"]),
        ("poorwill bench sleep", &[host, "--size=8MiB", "--cycles=6", "--disk=."]),
        ("poorwill bench offload", &[host, "--size=8MiB", "--layers=2"]),
        ("poorwill bench load", &["w.safetensors", host]),
        ("poorwill bench churn", &["--load=dense", "--device=host:48GiB", "--limit=40GiB"]),
        ("poorwill replay", &["--case=dense"]),
    ] {
        let words: Vec<&str> =
            command.split(' ').skip(1).chain(args.iter().copied()).chain(["--json"]).collect();
        let printed = run(&folder, &words).json();
        assert!(printed.get("error").is_none(), "{command}: {printed}");
        expect(command, &printed);
    }
}

#[test]
fn hibernation_prints_what_the_page_says() {
    if run_as_child() {
        return;
    }
    let folder = Folder::new();
    let engine = HostEngine::start(&folder.join("engines"), 1 << 20);
    let pid = format!("--pid={}", engine.pid());
    for step in ["--inspect", "", "--state", "--recover", "--resume"] {
        let words = ["hibernate", "--json", "--processes=engines", "--journal=journal"].into_iter();
        let words =
            words.chain((step != "--recover").then_some(&*pid)).chain((!step.is_empty()).then_some(step));
        let printed = run(&folder, &words.collect::<Vec<_>>()).json();
        expect(format!("poorwill hibernate {step}").trim_end(), &printed);
    }
    let words = ["hibernate", "--json", "--processes=engines", "--journal=journal", "--resume", &pid];
    let printed = run(&folder, &words).json();
    assert_eq!(printed["kind"], "wrong_state", "{printed}");
    expect("error", &printed);
}
