//! `poorwill replay`: its answer, what it writes, and what it refuses.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Folder, Ran, run};

const CASES: [(&str, [bool; 2]); 4] = [
    ("moe-block-layout", [false, true]),
    ("gpt-oss-swizzle", [false, true]),
    ("dense", [false, true]),
    ("graphs-on-a-slice", [false, false]),
];

fn replay(folder: &Folder, args: &[&str]) -> Ran {
    run(folder, &[&["replay"], args].concat())
}

fn image(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images").join(name)
}

#[test]
fn reported_loads_fail_as_they_did_and_poorwill_says_what_fits() {
    let folder = Folder::new();
    for (name, [first, poorwill]) in CASES {
        let ran = replay(&folder, &["--case", name, "--json"]);
        assert_eq!(ran.code, 1, "{ran:?}");
        let report = ran.json();
        let [trace] = report["traces"].as_array().unwrap().as_slice() else { panic!("{report}") };
        let rows = trace["rows"].as_array().unwrap();
        assert_eq!((&trace["fits"], &rows[0]["fits"]), (&json!(first), &json!(first)), "{name}");
        let ours = rows.iter().find(|row| row["setup"] == "poorwill").unwrap();
        assert_eq!(ours["fits"], poorwill, "{name}");
        let sentence = trace["sentence"].as_str().unwrap();
        assert!(sentence.starts_with("It does not fit: at step "), "{sentence}");
        assert_eq!(sentence.contains("`poorwill` ("), poorwill, "{sentence}");
        let notes = trace["notes"].to_string();
        assert!(notes.contains("the report: ") && notes.contains("guessed: "), "{notes}");
    }
}

#[test]
fn a_text_has_the_answer_first() {
    let folder = Folder::new();
    let ran = replay(&folder, &["--case", "graphs-on-a-slice"]);
    let message = ran.failed(&["it does not fit: graphs-on-a-slice"]);
    assert!(!message.is_empty());
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("graphs-on-a-slice: 4 steps, 22.7"), "{lines:?}");
    assert!(lines[1].contains("No allocator can help"), "{lines:?}");
    assert!(ran.stdout.contains("weights, int4"), "{lines:?}");
    // A card that is large enough.
    let ran = replay(&folder, &["--case", "graphs-on-a-slice", "--card", "24GiB"]);
    assert!(ran.succeeded().contains("It fits: `pytorch` maps 22.7"));
}

/// What others had of the recorder's card says nothing of another one.
#[test]
fn the_card_and_its_settings_are_the_recorders() {
    let folder = Folder::new();
    let head = r#"{"poorwill_record":1,"allocator":"pytorch expandable_segments:True","card":{"total_bytes":150323855360,"taken_bytes":64424509440}}"#;
    let path = folder.path().join("load.jsonl");
    fs::write(&path, format!("{head}\n{{\"t\":\"a\",\"k\":1,\"b\":1048576}}\n")).unwrap();
    let path = path.to_str().unwrap();
    let said = |args: &[&str]| {
        let report = replay(&folder, &[&[path, "--json"], args].concat()).json();
        let trace = &report["traces"][0];
        let sizes = ["total_bytes", "taken_bytes"].map(|key| trace[key].as_u64().unwrap() >> 30);
        (sizes, trace["rows"][1]["setup"].as_str().unwrap().to_owned())
    };
    let limited = "pytorch:max_split_size_mb:20,expandable_segments:True".to_owned();
    assert_eq!(said(&[]), ([140, 60], limited.clone()));
    assert_eq!(said(&["--card", "24GiB"]), ([24, 1], limited));
    replay(&folder, &[path, "--card", "24GiB", "--taken", "30GiB"])
        .failed(&["others have 30 GiB; say --taken"]);
}

/// The pictures of the documents are those of the trace beside them, and of the cases.
#[test]
fn pictures_in_the_tree_are_drawn_from_traces() {
    let folder = Folder::new();
    for case in ["moe-block-layout", "gpt-oss-swizzle", "dense"] {
        assert_eq!(replay(&folder, &["--case", case, "--svg", "drawn.svg"]).code, 1);
        let drawn = fs::read_to_string(folder.join("drawn.svg")).unwrap();
        let kept = fs::read_to_string(image(&format!("replay-{case}.svg"))).unwrap();
        assert!(kept == drawn, "{case}: run `cargo xtask picture`");
    }
    let trace = image("churn-moe.csv");
    let setups = ["--setup", "pytorch:max_split_size_mb:20", "--setup", "poorwill", "--card", "141GiB"];
    let words = [&[trace.to_str().unwrap(), "--svg", "drawn.svg"], &setups[..]].concat();
    let said = replay(&folder, &words).succeeded();
    assert!(said.contains("96.2"), "{said}");
    let drawn = fs::read_to_string(folder.join("drawn.svg")).unwrap();
    assert!(fs::read_to_string(image("churn-moe.svg")).unwrap() == drawn, "run `cargo xtask picture`");
}

#[test]
fn a_page_stands_by_itself_and_shows_claims() {
    let folder = Folder::new();
    let words = [
        "--case",
        "graphs-on-a-slice",
        "--html",
        "page.html",
        "--claim",
        "graphs=1.53GiB@capture",
        "--claim",
        "weights=15GiB",
    ];
    assert_eq!(replay(&folder, &words).code, 1);
    let page = fs::read_to_string(folder.join("page.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("default-src 'none'"));
    assert!(page.contains("\"graphs\"") && page.contains("No allocator can help"));
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
}

#[test]
fn what_was_recorded_is_asked_about_first() {
    let folder = Folder::new();
    let text = concat!(
        r#"{"poorwill_record":1,"allocator":"pytorch max_split_size_mb:128","card":{"total_bytes":8388608}}"#,
        "\n{\"t\":\"p\",\"n\":\"load\"}\n",
        "{\"t\":\"a\",\"k\":1,\"b\":3145728,\"f\":[\"model.py:7 load\"]}\n{\"t\":\"f\",\"k\":1}\n"
    );
    folder.write("load.jsonl", text);
    let ran = replay(&folder, &["load.jsonl", "--json"]);
    let report: Value = ran.json();
    let trace = &report["traces"][0];
    assert_eq!(trace["rows"][0]["setup"], "pytorch:max_split_size_mb:128");
    assert_eq!(
        (&trace["total_bytes"], &trace["fits"]),
        (&json!(8 << 20), &json!(false)),
        "segments of 20 MiB"
    );
    let poorwill = trace["rows"].as_array().unwrap().iter().find(|row| row["setup"] == "poorwill").unwrap();
    assert_eq!((&poorwill["fits"], &poorwill["peak_phase"]), (&json!(true), &json!("load")));
}

#[test]
fn what_cannot_be_replayed_is_refused_in_a_sentence() {
    let folder = Folder::new();
    folder.write("empty", "");
    folder.write("code.pickle", b"\x80\x04cos\nsystem\n(S'touch here'\ntR.".as_slice());
    let trace = image("churn-moe.csv");
    let trace = trace.to_str().unwrap();
    let two = Path::new(env!("CARGO_MANIFEST_DIR")).join("../replay/tests/fixtures/load-4.pickle");
    let two = two.to_str().unwrap();
    assert!(replay(&folder, &[two, "--device", "1", "--html", "page.html"]).succeeded().contains("device 1"));
    for (words, expected) in [
        (vec!["none.pickle"], &["none.pickle", "No such file"][..]),
        (vec!["empty"], &["empty"]),
        (vec!["code.pickle"], &["code.pickle", "GLOBAL", "nothing was run"]),
        (vec![trace, "--card", "1GiB", "--taken", "2GiB"], &["nothing is left"]),
        (vec![trace, "--budget", "0"], &["a budget of nothing"]),
        (vec![trace, "--card", "17179869183GiB"], &["no card has", "1 PiB"]),
        (vec![trace, trace, "--html", "page.html"], &["show one trace"]),
        (vec![two, "--html", "page.html"], &["show one trace", "--device"]),
        (vec![two, "--device", "7"], &["nothing was recorded on device 7; there is 0, 1"]),
        (vec![trace, "--device", "0"], &["no file says one"]),
        (vec![trace, "--svg", "no/such/folder.svg"], &["no/such/folder.svg"]),
        (
            vec!["--case", "dense", "--html", "page.html", "--claim", "graphs=1GiB@serve"],
            &["no phase `serve`", "load"],
        ),
    ] {
        replay(&folder, &words).failed(expected);
    }
    assert!(!folder.join("here").exists());
    for (words, expected) in [
        (vec![], "<FILE>"),
        (vec!["--case", "none"], "moe-block-layout"),
        (vec![trace, "--case", "dense"], "cannot be used with"),
        (vec![trace, "--setup", "malloc"], "there are pytorch, cumem"),
        (vec![trace, "--claim", "graphs"], "NAME=SIZE"),
    ] {
        let ran = replay(&folder, &words);
        assert!(ran.code == 2 && ran.stderr.contains(expected), "{expected}: {ran:?}");
    }
}

/// Each of these was once answered wrongly.
#[test]
fn small_traces_have_the_right_answers() {
    let folder = Folder::new();
    let head = "{\"poorwill_record\":1}\n";
    let mib = |key: u64, mib: u64| format!("{{\"t\":\"a\",\"k\":{key},\"b\":{}}}\n", mib << 20);
    let free = |key: u64| format!("{{\"t\":\"f\",\"k\":{key}}}\n");
    let answered = |name: &str, lines: String, words: &[&str]| {
        folder.write(name, format!("{head}{lines}"));
        let ran = replay(&folder, &[&[name, "--json"], words].concat());
        let report: Value = ran.json();
        (ran.code, report["traces"][0].clone())
    };
    // What could not be had was asked for.
    let refused = format!("{}{{\"t\":\"o\",\"b\":{}}}\n", mib(1, 6 << 10), 3_u64 << 30);
    let (code, trace) = answered("oom.jsonl", refused, &["--card", "8GiB", "--taken", "1GiB"]);
    assert_eq!(
        (code, &trace["fits"], &trace["rows"][0]["failed_step"]),
        (1, &json!(false), &json!(2)),
        "{trace}"
    );
    // The open end of a segment that grows is used last.
    let tail = [mib(1, 40), mib(2, 20), mib(3, 20), free(1), free(3), mib(4, 20), mib(5, 40)].concat();
    let (_, trace) = answered("tail.jsonl", tail, &["--setup", "pytorch:expandable_segments:True"]);
    assert_eq!(trace["rows"][0]["peak_bytes"], 100 << 20, "{trace}");
    // What is needed fits.
    let (_, trace) = answered(
        "needs.jsonl",
        [mib(1, 700), free(1), mib(2, 900)].concat(),
        &["--card", "800MiB", "--taken", "0", "--setup", "pytorch"],
    );
    let needs = trace["needs_bytes"].as_u64().unwrap();
    assert!((900 << 20..=964 << 20).contains(&needs), "{trace}");
    // A block that is too large for Poorwill's pool, and one that is for every device.
    let (code, trace) = answered("large.jsonl", mib(1, 3 << 20), &["--card", "10TiB", "--taken", "0"]);
    let rows = trace["rows"].as_array().unwrap();
    assert_eq!(
        (code, &rows[0]["fits"], &rows.last().unwrap()["fits"]),
        (0, &json!(true), &json!(false)),
        "{trace}"
    );
    let (_, trace) = answered("huge.jsonl", mib(1, 8 << 20), &["--setup", "pytorch"]);
    assert_eq!(trace["needs_bytes"], Value::Null, "{trace}");
    // Less than a granule.
    let (code, trace) =
        answered("small.jsonl", mib(1, 1), &["--card", "1MiB", "--taken", "0", "--setup", "poorwill"]);
    assert_eq!((code, &trace["holders"]), (1, &json!([])), "{trace}");
    // A setting that the model lacks is named.
    folder.write(
        "set.jsonl",
        format!(
            "{{\"poorwill_record\":1,\"allocator\":\"pytorch roundup_power2_divisions:4\"}}\n{}",
            mib(1, 1)
        ),
    );
    let notes = replay(&folder, &["set.jsonl", "--json"]).json()["traces"][0]["notes"].to_string();
    assert!(
        notes.contains("not modelled: roundup_power2_divisions:4") && notes.contains("say --card"),
        "{notes}"
    );
}
