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

/// The one trace of a report, and the exit code.
fn answered(folder: &Folder, words: &[&str]) -> (i32, Value) {
    let ran = replay(folder, &[words, &["--json"]].concat());
    let report = ran.json();
    let [trace] = report["traces"].as_array().unwrap().as_slice() else { panic!("{report}") };
    (ran.code, trace.clone())
}

fn row<'t>(trace: &'t Value, setup: &str) -> &'t Value {
    let rows = trace["rows"].as_array().unwrap();
    rows.iter().find(|row| row["setup"] == setup).unwrap_or_else(|| panic!("{setup}: {rows:?}"))
}

fn fits(row: &Value) -> bool {
    row["verdict"] == "fits"
}

fn image(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/images").join(name)
}

#[test]
fn reported_loads_fail_as_they_did_and_poorwill_says_what_fits() {
    let folder = Folder::new();
    for (name, [first, poorwill]) in CASES {
        let (code, trace) = answered(&folder, &["--case", name]);
        assert_eq!(code, 1, "{trace}");
        let asked = row(&trace, trace["setup"].as_str().unwrap());
        assert_eq!((fits(&trace), fits(asked)), (first, first), "{name}");
        assert_eq!(fits(row(&trace, "poorwill")), poorwill, "{name}");
        let sentence = trace["sentence"].as_str().unwrap();
        assert!(sentence.starts_with("It does not fit: at step "), "{sentence}");
        assert_eq!(sentence.contains("`poorwill` ("), poorwill, "{sentence}");
        let notes = trace["notes"].to_string();
        assert!(notes.contains("the report: ") && notes.contains("guessed: "), "{notes}");
        // What needs least comes first. Advised is what changes only a setting, if that fits.
        let rows = trace["rows"].as_array().unwrap();
        let needs = |row: &Value| (!fits(row), row["needs_bytes"].as_u64().unwrap());
        assert!(rows.is_sorted_by_key(needs), "{rows:?}");
        let kind = |row: &Value| row["setup"].as_str().unwrap().split(':').next().unwrap().to_owned();
        let fitting = rows.iter().filter(|row| fits(row));
        let advised = fitting.min_by_key(|row| kind(row) != kind(asked));
        let advice = trace["advice"][0].as_str().unwrap();
        assert!(advised.is_none_or(|row| advice.contains(row["typed"].as_str().unwrap())), "{advice}");
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
    // 22.70 GiB of 22.56: each of these alone has as much.
    let advice = "It fits with 140.06 MiB less of one of these: weights, int4 (14.5 GiB), key-value cache, fp8 (4.67 GiB), \
                  workspaces and activations (2 GiB).";
    assert_eq!(lines[2].replace('\u{a0}', " "), advice);
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
    let limited = "pytorch:max_split_size_mb:20,expandable_segments:True";
    let said = |args: &[&str]| {
        let report = replay(&folder, &[&[path, "--json"], args].concat()).json();
        let trace = &report["traces"][0];
        let sizes = ["total_bytes", "taken_bytes"].map(|key| trace[key].as_u64().unwrap() >> 30);
        let rows = trace["rows"].as_array().unwrap();
        (sizes, rows.iter().any(|row| row["setup"] == limited))
    };
    assert_eq!(said(&[]), ([140, 60], true));
    assert_eq!(said(&["--card", "24GiB"]), ([24, 1], true));
    let ran = replay(&folder, &[path, "--card", "24GiB", "--taken", "30GiB"]);
    assert!(ran.code == 2 && ran.stderr.contains("others have 30 GiB; say --taken"), "{ran:?}");
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
    assert_eq!(trace["setup"], "pytorch:max_split_size_mb:128");
    assert_eq!(
        (&trace["total_bytes"], &trace["verdict"]),
        (&json!(8 << 20), &json!("does_not_fit")),
        "segments of 20 MiB"
    );
    let poorwill = row(trace, "poorwill");
    assert_eq!((&poorwill["verdict"], &poorwill["peak_phase"]), (&json!("fits"), &json!("load")));
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
        (vec![trace, trace, "--svg", "page.svg"], &["a picture shows one trace"]),
        (vec![two, "--svg", "page.svg"], &["a picture shows one trace", "--device"]),
        (vec!["/dev/zero"], &["/dev/zero", "this is no pickle"]),
        (vec!["/dev"], &["/dev", "directory"]),
        (vec![two, "--device", "7"], &["nothing was recorded on device 7; there is 0, 1"]),
        (vec![trace, "--device", "0"], &["no file says one"]),
        // Before anything is read: the answer is not lost.
        (vec!["none.pickle", "--svg", "no/such/folder.svg"], &["no/such/folder.svg"]),
        (vec!["none.pickle", "--html", "/dev"], &["/dev", "directory"]),
        (
            vec!["--case", "dense", "--html", "page.html", "--claim", "graphs=1GiB@serve"],
            &["no phase `serve`", "load"],
        ),
    ] {
        let ran = replay(&folder, &words);
        assert!(ran.code == 2 && ran.stdout.is_empty(), "{ran:?}");
        assert!(expected.iter().all(|text| ran.stderr.contains(text)), "{expected:?}: {ran:?}");
        let json = replay(&folder, &[&words[..], &["--json"]].concat());
        assert!(json.code == 2 && json.json()["error"].is_string(), "{json:?}");
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
        answered(&folder, &[&[name], words].concat())
    };
    // What could not be had was asked for.
    let refused = format!("{}{{\"t\":\"o\",\"b\":{}}}\n", mib(1, 6 << 10), 3_u64 << 30);
    let (code, trace) = answered("oom.jsonl", refused, &["--card", "8GiB", "--taken", "1GiB"]);
    assert_eq!(
        (code, &trace["verdict"], &row(&trace, "pytorch")["failed_step"]),
        (1, &json!("does_not_fit"), &json!(2)),
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
    assert_eq!(
        (code, fits(row(&trace, "pytorch")), fits(row(&trace, "poorwill"))),
        (0, true, false),
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

fn gib(count: u64) -> u64 {
    count << 30
}

/// A snapshot of 20 blocks of 1 GiB, five of them freed, that ends at a request with 2.1 GiB free.
fn out_of_memory(asked_bytes: u64, after: &str) -> String {
    let entry = |action: &str, number: u64| {
        let (addr, size) = (gib(1000 + number), gib(1));
        format!(r#"{{"action":"{action}","addr":{addr},"size":{size},"stream":0,"frames":[]}}"#)
    };
    let mut entries = Vec::new();
    let mut segments = Vec::new();
    for number in 0..20 {
        entries.extend([entry("segment_alloc", number), entry("alloc", number)]);
        let (addr, size) = (gib(1000 + number), gib(1));
        let state = if number % 4 == 0 { "inactive" } else { "active_allocated" };
        segments.push(format!(
            r#"{{"address":{addr},"total_size":{size},"blocks":[{{"address":{addr},"size":{size},"state":"{state}"}}]}}"#
        ));
    }
    entries.extend((0..20).step_by(4).map(|number| entry("free_completed", number)));
    entries.push(format!(r#"{{"action":"oom","size":{asked_bytes},"device_free":2254857830,"stream":0}}"#));
    let (segments, entries) = (segments.join(","), entries.join(","));
    format!(r#"{{"segments":[{segments}],"device_traces":[[{entries}{after}]]}}"#)
}

/// 22.1 GiB were there. 15 GiB are live, so 8 more fit no allocator, and 6 fit behind what PyTorch gives back.
#[test]
fn a_load_that_ran_out_of_memory_is_never_said_to_fit() {
    let folder = Folder::new();
    let usable = gib(20) + 2_254_857_830;
    folder.write("oom.json", out_of_memory(gib(8), ""));
    let (code, trace) = answered(&folder, &["oom.json"]);
    assert_eq!(
        (code, &trace["verdict"], &trace["usable_bytes"]),
        (1, &json!("does_not_fit"), &json!(usable))
    );
    assert!(
        trace["sentence"].as_str().unwrap().contains("No allocator can help: 23 GiB are live"),
        "{trace}"
    );
    let notes = trace["notes"].to_string();
    assert!(
        notes.contains("20 GiB were mapped and 2.1 GiB were free") && !notes.contains("assumed"),
        "{notes}"
    );
    assert!(
        trace["advice"][0].as_str().unwrap().starts_with("It fits with 921.6 MiB less of one of these: "),
        "{trace}"
    );

    folder.write("less.json", out_of_memory(gib(6), ""));
    let (code, trace) = answered(&folder, &["less.json", "--setup", "pytorch"]);
    assert_eq!((code, &trace["verdict"]), (3, &json!("fits_so_far")), "{trace}");
    let sentence = trace["sentence"].as_str().unwrap();
    assert!(
        sentence.starts_with("Fits so far: ") && sentence.contains("what came after step 26 is not known"),
        "{sentence}"
    );
    assert!(sentence.contains("tries again once"), "{sentence}");
    let pytorch = row(&trace, "pytorch");
    assert_eq!((&pytorch["verdict"], &pytorch["retries"]), (&json!("fits_so_far"), &json!(1)));
    let ran = replay(&folder, &["less.json", "--html", "page.html"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.stdout.contains("so far") && !ran.stdout.contains("It fits"), "{ran:?}");
    let page = fs::read_to_string(folder.join("page.html")).unwrap();
    assert!(page.contains("Fits so far: ") && page.contains("\"ended\":26"), "{page}");

    // Another card, a program that caught the error and went on, and one that printed a line.
    let (code, trace) = answered(&folder, &["oom.json", "--card", "80GiB"]);
    assert_eq!(
        (code, &trace["verdict"], &trace["usable_bytes"]),
        (3, &json!("fits_so_far"), &json!(gib(79)))
    );
    for (name, size, expected) in [("on.json", gib(6), 0), ("line.json", 512, 3)] {
        let after = format!(r#",{{"action":"alloc","addr":4096,"size":{size},"stream":0}}"#);
        folder.write(name, out_of_memory(gib(6), &after));
        assert_eq!(answered(&folder, &[name]).0, expected, "{name}");
    }
    // What could not be had, and was not needed, is not live.
    let after = format!(r#",{{"action":"alloc","addr":4096,"size":{},"stream":0}}"#, gib(7));
    let freed = r#",{"action":"free_completed","addr":4096,"size":0,"stream":0}"#;
    folder.write("caught.json", out_of_memory(gib(8), &[&after, freed, &after].concat()));
    let (code, trace) = answered(&folder, &["caught.json"]);
    assert_eq!((code, &trace["live_peak_bytes"]), (0, &json!(gib(22))), "{trace}");
    assert!(trace["notes"].to_string().contains("step 26, and the program went on"), "{trace}");
}

/// A recording says what was mapped and free, and has the card of its head otherwise.
#[test]
fn a_recording_that_ends_without_memory_fits_so_far() {
    let folder = Folder::new();
    let load = "{\"t\":\"a\",\"k\":1,\"b\":1073741824}\n{\"t\":\"m\",\"b\":1073741824}\n";
    for (name, card, free, usable) in [
        ("seen", r#","card":{"total_bytes":8589934592,"taken_bytes":0}"#, r#","d":1073741824"#, gib(2)),
        ("head", r#","card":{"total_bytes":8589934592,"taken_bytes":1073741824}"#, "", gib(7)),
        ("none", "", r#","d":1073741824"#, gib(2)),
    ] {
        let end = format!("{{\"t\":\"o\",\"b\":536870912{free}}}\n");
        folder.write(name, format!("{{\"poorwill_record\":1{card}}}\n{load}{end}"));
        let (code, trace) = answered(&folder, &[name]);
        assert_eq!(
            (code, &trace["verdict"], &trace["usable_bytes"]),
            (3, &json!("fits_so_far"), &json!(usable)),
            "{name}"
        );
    }
}

/// What is claimed is not there for the allocator, from its phase on.
#[test]
fn claims_count_without_a_page() {
    let folder = Folder::new();
    let mib = |key: u64, mib: u64| format!("{{\"t\":\"a\",\"k\":{key},\"b\":{}}}\n", mib << 20);
    let lines = [mib(1, 600), mib(2, 400), "{\"t\":\"f\",\"k\":2}\n".to_owned()].concat();
    let serve = "{\"t\":\"p\",\"n\":\"serve\"}\n";
    let empties = "{\"t\":\"e\"}\n";
    folder.write("cached.jsonl", format!("{{\"poorwill_record\":1}}\n{lines}{serve}{}", mib(3, 100)));
    folder
        .write("graphs.jsonl", format!("{{\"poorwill_record\":1}}\n{lines}{serve}{empties}{}", mib(3, 100)));
    let lines = format!("{lines}{empties}");
    folder.write("load.jsonl", format!("{{\"poorwill_record\":1}}\n{lines}{serve}{}", mib(3, 100)));
    folder.write("end.jsonl", format!("{{\"poorwill_record\":1}}\n{lines}{serve}"));
    for setup in ["pytorch", "pytorch:expandable_segments:True", "poorwill"] {
        let card = ["--card", "1100MiB", "--taken", "0", "--setup", setup];
        let claimed =
            |file: &str, claim: &str| answered(&folder, &[&[file, "--claim", claim], &card[..]].concat());
        // 1000 MiB and 100 fit exactly; one more does not.
        assert_eq!(claimed("load.jsonl", "graphs=60MiB").0, 0, "{setup}");
        let (code, trace) = claimed("load.jsonl", "graphs=140MiB");
        assert_eq!((code, row(&trace, setup)["failed_step"].as_u64()), (1, Some(2)), "{trace}");
        // 700 MiB are live in the phase, and nothing is cached there, unless the program keeps it.
        let (code, trace) = claimed("cached.jsonl", "graphs=380MiB@serve");
        assert!(code == 1 && trace["sentence"].to_string().contains("back, which suffices."), "{trace}");
        let (code, trace) = claimed("load.jsonl", "graphs=380MiB@serve");
        assert_eq!(code, 0, "{trace}");
        assert_eq!(trace["live_peak_bytes"], 1080 << 20);
        let needs = trace["needs_bytes"].as_u64().unwrap();
        assert!((1080 << 20..=1102 << 20).contains(&needs), "{setup}: {trace}");
        let (code, trace) = claimed("load.jsonl", "graphs=420MiB@serve");
        assert_eq!(code, 1, "{trace}");
        assert!(trace["advice"].to_string().contains("the claim graphs (420 MiB)"), "{trace}");
        let sentence = trace["sentence"].as_str().unwrap();
        assert!(setup != "pytorch" || sentence.contains("of 1.07 GiB beside claims of 420 MiB;"), "{trace}");
        // Graphs empty the cache before they are captured.
        let (code, trace) = claimed("graphs.jsonl", "graphs=380MiB@serve");
        assert_eq!(code, 0, "{trace}");
        // The claim itself has no memory, behind the last step, too.
        for file in ["load.jsonl", "end.jsonl"] {
            let (code, trace) = claimed(file, "graphs=600MiB@serve");
            assert_eq!((code, row(&trace, setup)["failed_step"].as_u64()), (1, Some(5)), "{trace}");
            assert!(
                trace["sentence"].as_str().unwrap().contains("has no 600 MiB for claims left"),
                "{trace}"
            );
        }
    }
}

/// A card that is said to be the recorder's is that one, and another verdict on another card is noted.
#[test]
fn no_card_changes_a_verdict_without_a_note() {
    let folder = Folder::new();
    let line = "{\"t\":\"a\",\"k\":1,\"b\":1073741824}\n{\"t\":\"m\",\"b\":1073741824}\n";
    let end = "{\"t\":\"o\",\"b\":1610612736,\"d\":1073741824}\n";
    folder.write("seen", format!("{{\"poorwill_record\":1}}\n{line}{end}"));
    let asked = |words: &[&str]| {
        let (code, trace) = answered(&folder, &[&["seen", "--setup", "pytorch"], words].concat());
        (code, trace["usable_bytes"].as_u64().unwrap() >> 20, trace["notes"].to_string())
    };
    for words in [&[][..], &["--card", "2GiB"]] {
        let (code, usable_mib, notes) = asked(words);
        assert_eq!((code, usable_mib, notes.contains("this answer is for")), (1, 2 << 10, false), "{notes}");
    }
    let (code, usable_mib, notes) = asked(&["--card", "4GiB"]);
    assert_eq!((code, usable_mib), (3, 3 << 10), "{notes}");
    let expected = "had 2 GiB usable, and this answer is for 3 GiB. On 2 GiB it does not fit.";
    assert!(notes.contains(expected) && notes.contains("1 GiB of this card; say --taken"), "{notes}");
    // Sold as such: the driver and others have the rest.
    let (code, usable_mib, notes) = asked(&["--card", "2200MiB"]);
    assert_eq!((code, usable_mib), (1, 2 << 10), "{notes}");
    assert!(notes.contains("is taken for the card that was seen, of which 2 GiB were usable"), "{notes}");
    let refused = replay(&folder, &["seen", "--taken", "1GiB"]);
    assert!(refused.code == 2 && refused.stderr.contains("only 2 GiB is known"), "{refused:?}");
    let (_, _, notes) = asked(&["--card", "4GiB", "--taken", "2GiB"]);
    assert!(!notes.contains("this answer is for") && !notes.contains("say --taken"), "{notes}");
}

/// What a file says is text, and moves nothing on the terminal.
#[test]
fn a_file_has_no_power_over_the_terminal() {
    let folder = Folder::new();
    let evil = r"a\u001b[31m\u001b]0;T\u0007\nFAKE: It fits.\r\u009b31m\u202e";
    let lines = [
        format!(r#"{{"poorwill_record":1,"allocator":"pytorch {evil}:1"}}"#),
        format!(r#"{{"t":"p","n":"{evil}"}}"#),
        format!(r#"{{"t":"a","k":1,"b":1073741824,"f":["{evil}.py:1 f"]}}"#),
        r#"{"t":"o","b":214748364800}"#.to_owned(),
    ];
    folder.write("evil.jsonl", lines.join("\n"));
    let ran = replay(&folder, &["evil.jsonl"]);
    let shown = ran.stdout.replace('\n', "");
    assert!(!shown.contains(|letter: char| letter.is_control() || letter == '\u{202e}'), "{shown:?}");
    assert!(ran.code == 1 && !ran.stdout.lines().any(|line| line.starts_with("FAKE")), "{ran:?}");
    assert!(shown.contains(r"a\u{1b}[31m") && shown.contains(r"\n"), "{shown:?}");
}

/// Eight ranks: one answer, that of the worst.
#[test]
fn several_devices_have_one_answer_and_one_page() {
    let folder = Folder::new();
    let entry = |mib: u64| format!(r#"[{{"action":"alloc","addr":4096,"size":{},"stream":0}}]"#, mib << 20);
    let ranks: Vec<String> = (0..8).map(|rank| entry(if rank == 3 { 900 } else { 500 })).collect();
    folder.write("ranks.json", format!(r#"{{"device_traces":[{}]}}"#, ranks.join(",")));
    let words = ["ranks.json", "--card", "800MiB", "--taken", "0", "--html", "page.html"];
    let ran = replay(&folder, &words);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stdout.starts_with("8 devices, worst is ranks.json, device 3:\n"), "{ran:?}");
    assert_eq!(ran.stdout.matches("what to type:").count(), 1, "{ran:?}");
    let json = replay(&folder, &[&words[..], &["--json"]].concat()).json();
    assert_eq!(
        (json["traces"].as_array().unwrap().len(), &json["worst"]),
        (8, &json!("ranks.json, device 3"))
    );
    let page = fs::read_to_string(folder.join("page.html")).unwrap();
    assert!((0..8).all(|rank| page.contains(&format!("\"name\":\"ranks.json, device {rank}\""))));
}

/// One rank ran out of memory, and the others have cards of its size.
#[test]
fn a_rank_is_judged_on_the_card_that_another_one_showed() {
    let folder = Folder::new();
    let alloc = format!(r#"{{"action":"alloc","addr":4096,"size":{},"stream":0}}"#, gib(30));
    let segment = alloc.replace("\"alloc", "\"segment_alloc");
    let snapshot = out_of_memory(gib(8), "");
    let ranks = snapshot.strip_suffix("]}").unwrap();
    folder.write("ranks.json", format!("{ranks},[{segment},{alloc}]]}}"));
    let report = replay(&folder, &["ranks.json", "--json"]).json();
    let traces = report["traces"].as_array().unwrap();
    let usable = json!(gib(20) + 2_254_857_830);
    assert_eq!([&traces[0]["usable_bytes"], &traces[1]["usable_bytes"]], [&usable, &usable]);
    assert_eq!(traces[1]["verdict"], "does_not_fit");
    let notes = traces[1]["notes"].to_string();
    assert!(
        notes.contains("From that of device 0, 22.1 GiB are assumed to be usable")
            && !notes.contains("80 GiB"),
        "{notes}"
    );
}

/// At 100 columns, as in a pipe.
#[test]
fn settings_are_whole_in_tables_and_to_be_typed() {
    let folder = Folder::new();
    let long = "pytorch:max_split_size_mb:20,expandable_segments:True,garbage_collection_threshold:0.8";
    let words =
        ["--case", "dense", "--setup", "pytorch", "--setup", long, "--setup", "cumem:max_split_size_mb:20"];
    let said = replay(&folder, &words).stdout;
    for text in ["  max_split_size_mb:20", "  expandable_segments:True", "  garbage_collection_threshold:0.8"]
    {
        assert!(said.lines().any(|line| line.starts_with(&format!("│ {text} "))), "{text}: {said}");
    }
    for text in [
        "unset PYTORCH_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF=max_split_size_mb:20,expandable_segments:True,garbage_collection_threshold:0.8",
        "PYTORCH_ALLOC_CONF=max_split_size_mb:20 vllm serve MODEL --enable-sleep-mode",
    ] {
        assert!(said.contains(&format!("\n    {text}")), "{text}: {said}");
    }
    // When it fits, what would save memory.
    let said = replay(&folder, &["--case", "dense", "--card", "80GiB"]).succeeded();
    assert!(said.contains(" less: "), "{said}");
}
