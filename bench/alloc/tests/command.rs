//! What the benchmark prints and which exit codes it gives. No test looks at a time.

use std::process::{Command, Output};

use serde_json::Value;

#[test]
fn json_has_every_figure() {
    let output = bench(&["--live", "200", "--rounds", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    assert_eq!(report["live_blocks"], 200);
    assert_eq!(report["rounds"], 2);
    assert_eq!(report["peer"], "offset-allocator");
    let positive = |name: &str| {
        let figure = report[name].as_f64().unwrap_or_else(|| panic!("{name} in {report}"));
        assert!(figure.is_finite() && figure > 0.0, "{name} in {report}");
        figure
    };
    for name in ["poorwill_ns_per_pair", "poorwill_p99_ns", "peer_ns_per_pair", "peer_p99_ns", "ratio"] {
        positive(name);
    }
    assert!(positive("poorwill_best_ns_per_pair") <= positive("poorwill_ns_per_pair"));
    assert!(positive("peer_best_ns_per_pair") <= positive("peer_ns_per_pair"));
    let live = positive("live_bytes");
    assert!(live > 200.0 * 512.0 && live < 200.0 * 1024.0 * 1024.0);
    assert!(positive("poorwill_extent_bytes") >= live && positive("peer_extent_bytes") >= live);
}

#[test]
fn a_table_names_both() {
    let output = bench(&["--live=1", "--rounds=1"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    for row in ["1 live blocks", "  poorwill ", "  offset-allocator "] {
        assert!(said.lines().any(|line| line.starts_with(row)), "{said}");
    }
}

#[test]
fn wrong_usage_exits_with_2_and_the_usage() {
    for args in
        [&["--live"][..], &["--live", "0"], &["--live", "5000000"], &["--rounds", "0"], &["--dead"], &["7"]]
    {
        let output = bench(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("Usage: "), "{args:?}: {said}");
    }
}

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_poorwill-bench-alloc"))
        .args(args)
        .output()
        .expect("the benchmark starts")
}
