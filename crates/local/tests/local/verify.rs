//! `poorwill verify` with intact checkpoints.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use poorwill::checkpoint::Checkpoint;

use crate::report::Expected;
use crate::support::{Folder, Ran, assert_clean, command, entry, file, folder_with_model, run};

const MIB: u64 = 1 << 20;

/// The expected report for the checkpoint at `paths` with default arguments.
fn expected(folder: &Folder, paths: &[&str]) -> Expected {
    let paths: Vec<_> = paths.iter().map(|path| folder.join(path)).collect();
    let checkpoint = Checkpoint::open(&paths).unwrap();
    Expected {
        device: "host:32GiB",
        capacity_bytes: 32 << 30,
        files: checkpoint.files().len(),
        tensors: checkpoint.tensors().len(),
        bytes: checkpoint.bytes(),
        kv_cache_bytes: 0,
        level: 1,
        cycles: 3,
        prepare: false,
    }
}

/// Runs with `--json`, and compares the report with `expected`.
fn check(folder: &Folder, args: &[&str], expected: &Expected) {
    let ran = run(folder, &[&["verify", "--json"], args].concat());
    let report = ran.json();
    ran.succeeded();
    expected.check(&report);
}

#[test]
fn a_folder_with_an_index() {
    let folder = folder_with_model();
    let whole = expected(&folder, &["model"]);
    assert_eq!((whole.files, whole.tensors > 100), (3, true));
    check(&folder, &["model"], &whole);
}

#[test]
fn a_single_file() {
    let folder = folder_with_model();
    let shard = "model/model-00002-of-00003.safetensors";
    let expected = Expected { cycles: 1, ..expected(&folder, &[shard]) };
    check(&folder, &["--cycles", "1", shard], &expected);
}

#[test]
fn several_arguments_by_several_paths() {
    let folder = folder_with_model();
    folder.write_tensor("adapter.safetensors", "lora", 100_000);
    let index = "model/model.safetensors.index.json";
    let expected = Expected { cycles: 2, ..expected(&folder, &["model", "adapter.safetensors"]) };
    assert_eq!(expected.files, 4);
    check(&folder, &[index, "adapter.safetensors", "./model", "--cycles=2"], &expected);
}

#[test]
fn level_2_reads_the_weights_again() {
    let folder = folder_with_model();
    let expected = Expected { level: 2, cycles: 2, ..expected(&folder, &["model"]) };
    check(&folder, &["model", "--level", "2", "--cycles", "2"], &expected);
}

#[test]
fn only_the_first_of_five_sleeps_copies_and_none_that_was_prepared() {
    let folder = folder_with_model();
    let expected = Expected { cycles: 5, ..expected(&folder, &["model"]) };
    check(&folder, &["model", "--cycles", "5"], &expected);
    let expected = Expected { prepare: true, kv_cache_bytes: 4 * MIB, ..expected };
    check(&folder, &["model", "--cycles", "5", "--prepare", "--kv-cache", "4MiB"], &expected);
    let expected = Expected { level: 2, ..expected };
    check(&folder, &["model", "--cycles", "5", "--prepare", "--kv-cache", "4MiB", "--level=2"], &expected);
    let table = run(&folder, &["verify", "model", "--cycles", "1", "--prepare"]).succeeded();
    let flat = flat(&table);
    assert!(flat.contains("backed up in the background") && !flat.contains("copied to the host"), "{table}");
    let table = run(&folder, &["verify", "model", "--cycles", "1", "--prepare", "--level=2"]).succeeded();
    assert!(self::flat(&table).contains("nothing to back up"), "{table}");
}

#[test]
fn host_memory_is_bounded_and_may_be_left_pageable() {
    let folder = folder_with_model();
    let expected = Expected { cycles: 2, ..expected(&folder, &["model"]) };
    for host_memory in [&["--host-budget", "64MiB"][..], &["--pageable"], &["--pageable", "--host-budget=1g"]]
    {
        check(&folder, &[&["model", "--cycles", "2"], host_memory].concat(), &expected);
    }
    let low = ["verify", "model", "--host-budget", "1KiB"];
    run(&folder, &low).failed(&["host memory", "the limit", "1 KiB", "raise"]);
    let size = ["verify", "model", "--host-budget", "-1GiB"];
    let ran = run(&folder, &size);
    assert!(ran.code == 2 && ran.stderr.contains("`-1GiB` is not a size"), "{ran:?}");
}

#[test]
fn a_key_value_cache_is_dropped_and_comes_back_as_zeros() {
    let folder = folder_with_model();
    for (level, size, kv_cache_bytes) in
        [(1, "24MiB", 24 * MIB), (2, "0.5KiB", 512), (1, "9000001", 9_000_001)]
    {
        let expected = Expected { level, kv_cache_bytes, cycles: 2, ..expected(&folder, &["model"]) };
        let level = level.to_string();
        check(&folder, &["model", "--kv-cache", size, "--level", &level, "--cycles", "2"], &expected);
    }
}

#[test]
fn a_device_of_a_size() {
    let folder = folder_with_model();
    let expected = Expected {
        device: "host:64MiB",
        capacity_bytes: 64 * MIB,
        cycles: 1,
        ..expected(&folder, &["model"])
    };
    check(&folder, &["model", "--device", "host:64MiB", "--cycles", "1"], &expected);
}

#[test]
fn a_limit_that_is_just_enough() {
    let folder = folder_with_model();
    let expected = Expected { cycles: 1, ..expected(&folder, &["model"]) };
    let granules = expected.bytes.div_ceil(2 * MIB);
    // Blocks are rounded up to 512 bytes, which may take a granule more.
    let enough = format!("{}MiB", 2 * (granules + 1));
    check(&folder, &["model", "--limit", &enough, "--cycles", "1"], &expected);
    let too_little = format!("{}MiB", 2 * (granules - 1));
    run(&folder, &["verify", "model", "--limit", &too_little]).failed(&["tensor \"", "raise the limit"]);
}

#[test]
fn tensors_of_every_size_from_nothing_on() {
    let folder = Folder::new();
    let entries = [
        entry("none", "[0]", 0, 0),
        entry("no rows", "[0,7]", 0, 0),
        entry("scalar", "[]", 0, 1),
        entry("pair", "[2]", 1, 3),
        entry("page", "[4096]", 3, 4099),
        entry("granule", "[1,2097152]", 4099, 2_101_251),
        entry("nothing more", "[3,0]", 2_101_251, 2_101_251),
    ];
    let header = format!("{{{}}}", entries.join(","));
    let payload: Vec<u8> = (0..=250).cycle().take(2_101_251).collect();
    folder.write("sizes.safetensors", file(&header, &payload));
    for level in [1, 2] {
        let expected = Expected { level, ..expected(&folder, &["sizes.safetensors"]) };
        assert_eq!(expected.tensors, 7);
        check(&folder, &["sizes.safetensors", "--level", &level.to_string()], &expected);
    }
}

#[test]
fn a_checkpoint_without_a_byte_is_verified() {
    let folder = Folder::new();
    let path = "no bytes.safetensors";
    folder.write(path, file(&format!("{{{}}}", entry("none", "[0]", 0, 0)), b""));
    let ran = run(&folder, &["verify", path, "--json"]);
    let report = ran.json();
    assert_eq!((&report["verified"], &report["bytes"]), (&true.into(), &0.into()));
    ran.succeeded();
    run(&folder, &["verify", path]).succeeded();
}

#[test]
fn the_table_for_people() {
    let folder = folder_with_model();
    let table = run(&folder, &["verify", "model", "--kv-cache", "4MiB", "--cycles", "2"]).succeeded();
    assert_clean(&table);
    for step in ["load", "sleep 1", "wake 1", "sleep 2", "wake 2"] {
        assert_eq!(table.lines().filter(|line| line.contains(&format!("│ {step} "))).count(), 1, "{table}");
    }
    for words in ["host:32GiB", "released (confirmed)", "4 MiB dropped", "not copied again", "4 MiB zeroed"] {
        let flat = flat(&table);
        assert!(flat.contains(words), "`{words}` is not in:\n{table}\n{flat}");
    }
    assert!(table.lines().last().unwrap().starts_with("Verified after "), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 120), "{table}");

    let table = run(&folder, &["verify", "model", "--level", "2", "--cycles", "1"]).succeeded();
    assert!(flat(&table).contains("weights read from the files again; same as the files"), "{table}");
    assert!(!table.contains("sleep 2"), "{table}");
}

/// The last column of a table in one line.
fn flat(table: &str) -> String {
    let cells = table.lines().filter_map(|line| line.trim_end_matches('│').rsplit('┆').next());
    let words: Vec<&str> =
        table.lines().next().into_iter().chain(cells).flat_map(str::split_whitespace).collect();
    words.join(" ")
}

#[test]
fn names_from_outside_reach_no_output_raw() {
    let folder = Folder::new();
    let escapes = "\u{1b}[31m \u{7}";
    let file_name = format!("{escapes}.safetensors");
    folder.write_tensor(&file_name, r"\u001b]0;owned\u0007", 100);
    for json in [false, true] {
        let mut args = vec!["verify", &file_name, "--cycles", "1"];
        args.extend(json.then_some("--json"));
        assert_clean(&run(&folder, &args).succeeded());
    }
}

#[test]
fn files_that_change_during_verify_are_found() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 3_000_000);
    let last = fs::metadata(folder.join("x.safetensors")).unwrap().len() - 1;
    let args = ["verify", "x.safetensors", "--cycles", "4000000000", "--json"];
    let child = command(folder.path(), args).spawn().unwrap();
    // Read meanwhile, so that a long report does not keep it from ending.
    let ended = thread::spawn(move || child.wait_with_output());
    let file = OpenOptions::new().write(true).open(folder.join("x.safetensors")).unwrap();
    // Whenever the file was loaded, the last byte is another one soon.
    for value in (0..=u8::MAX).cycle() {
        if ended.is_finished() {
            break;
        }
        file.write_all_at(&[value], last).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    let ran = Ran::from(ended.join().unwrap().unwrap());
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.starts_with("error: not verified: tensor \"w\""), "{}", ran.stderr);
    let report = ran.json();
    assert_eq!(report["verified"], false);
    let mismatch = report["mismatch"].as_str().unwrap();
    for part in ["x.safetensors", "\"w\"", "2999999", "3000000"] {
        assert!(mismatch.contains(part), "{mismatch}");
    }
    // The run ended there: every cycle but the last was verified.
    let cycles = report["cycles"].as_array().unwrap();
    let verified = cycles.iter().take_while(|cycle| cycle["verified"] == true).count();
    assert!(verified + 1 >= cycles.len(), "{verified} of {}", cycles.len());
}

#[test]
fn a_file_cut_during_verify_is_an_error() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 3_000_000);
    let child =
        command(folder.path(), ["verify", "x.safetensors", "--cycles", "4000000000"]).spawn().unwrap();
    // A run that starts later finds the file cut already, which is the same error.
    thread::sleep(Duration::from_millis(200));
    let file = OpenOptions::new().write(true).open(folder.join("x.safetensors")).unwrap();
    file.set_len(1_000_000).unwrap();
    let ran = Ran::from(child.wait_with_output().unwrap());
    ran.failed(&["x.safetensors", "\"w\"", "000"]);
    // A read during the cut may see zeros where the end was: then the bytes differ.
    assert!(ran.stdout.is_empty() || ran.stderr.contains("differs from the file"), "{ran:?}");
}
