//! What `poorwill verify` and `demo` refuse with exit code 1: bad files, and missing memory.

use std::fs;

use crate::support::{Folder, entry, file, run};

/// A file, and what the message about it must say beside its name.
type BadFile = (&'static str, Vec<u8>, &'static [&'static str]);

/// Runs with a bad checkpoint, as people and as programs do. Both get the same message.
fn refused(folder: &Folder, args: &[&str], words: &[&str]) {
    let ran = run(folder, &[&["verify"], args].concat());
    let message = ran.failed(words);
    assert_eq!(ran.stdout, "");
    let ran = run(folder, &[&["verify", "--json"], args].concat());
    assert_eq!(ran.failed(words), message);
    assert_eq!(ran.json(), serde_json::json!({ "error": message }));
}

#[test]
fn bad_files() {
    let one = |fields: &str| file(&format!(r#"{{"w":{{{fields}}}}}"#), &[0; 4]);
    let two = |first: String, second: String| file(&format!("{{{first},{second}}}"), &[0; 6]);
    let shape = |shape: &str| one(&format!(r#""dtype":"F32","shape":{shape},"data_offsets":[0,4]"#));
    let a = || entry("a", "[4]", 0, 4);
    let bad: Vec<BadFile> = vec![
        ("nothing", vec![], &["0 bytes"]),
        ("three bytes", vec![1, 2, 3], &["3 bytes"]),
        ("torn header", file(r#"{"w":{"dtype":"F32","sh"#, b""), &["\"w\"", "EOF"]),
        ("torn name", file(r#"{"w"#, b""), &["malformed header"]),
        (
            "header longer than file",
            [&1000_u64.to_le_bytes()[..], b"{}"].concat(),
            &["1000 bytes", "only 10"],
        ),
        (
            "hostile length",
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
            &["18446744073709551615", "100000000"],
        ),
        ("picture", b"\x89PNG\r\n\x1a\n and so on".to_vec(), &["safetensors file?"]),
        ("pointer", b"version https://git-lfs.github.com/spec/v1\n".to_vec(), &["git lfs pull"]),
        ("no text", file("{\"\u{0}", b"\xff"), &["malformed header"]),
        ("list", file("[]", b""), &["malformed header"]),
        ("deep", file(&"[".repeat(1 << 16), b""), &["malformed header"]),
        ("overlap", two(a(), entry("b", "[4]", 2, 6)), &["\"a\"", "\"b\"", "overlap"]),
        ("hole", two(a(), entry("b", "[1]", 5, 6)), &["\"b\"", "belong to no tensor"]),
        ("trailing", two(a(), entry("b", "[1]", 4, 5)), &["the last tensor ends"]),
        ("twice", two(a(), a()), &["\"a\" twice"]),
        ("negative shape", shape("[-1]"), &["\"w\"", "dimension 0", "-1"]),
        ("fraction", shape("[1,0.5]"), &["\"w\"", "dimension 1", "0.5"]),
        (
            "overflow",
            shape("[4294967296,4294967296]"),
            &["\"w\"", "F32 [4294967296, 4294967296]", "overflows"],
        ),
        ("too large a shape", shape("[2]"), &["\"w\"", "span 4 bytes", "needs 8"]),
        ("unknown dtype", one(r#""dtype":"F33","shape":[1],"data_offsets":[0,4]"#), &["\"w\"", "\"F33\""]),
        ("reversed", one(r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#), &["\"w\"", "[4, 0]"]),
        ("negative offset", one(r#""dtype":"F32","shape":[1],"data_offsets":[0,-4]"#), &["\"w\"", "-4"]),
        (
            "beyond file",
            one(r#""dtype":"F32","shape":[9],"data_offsets":[0,36]"#),
            &["\"w\"", "ends at byte"],
        ),
        (
            "far beyond file",
            one(r#""dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]"#),
            &["\"w\"", "18446744073709551615"],
        ),
    ];
    let folder = Folder::new();
    for (name, contents, words) in bad {
        let path = format!("{name}.safetensors");
        folder.write(&path, contents);
        refused(&folder, &[&path], &[&[path.as_str()], words].concat());
    }
}

#[test]
fn paths_without_a_checkpoint() {
    let folder = Folder::new();
    fs::create_dir(folder.join("empty")).unwrap();
    fs::create_dir(folder.join("no shards")).unwrap();
    folder.write("no shards/readme.txt", "nothing here");
    folder.write_tensor("good.safetensors", "w", 10);
    refused(&folder, &["nowhere.safetensors"], &["nowhere.safetensors", "no such file"]);
    refused(&folder, &["good.safetensors", "nowhere/at/all"], &["nowhere/at/all", "no such file"]);
    refused(&folder, &["good.safetensors/below"], &["good.safetensors/below"]);
    refused(&folder, &["empty"], &["empty", ".safetensors"]);
    refused(&folder, &["no shards"], &["no shards", ".safetensors"]);
    refused(&folder, &["/dev/null"], &["/dev/null", "regular file"]);
}

#[test]
fn files_without_a_tensor() {
    let folder = Folder::new();
    for name in ["a.safetensors", "b.safetensors"] {
        folder.write(name, file("{}", b""));
    }
    refused(&folder, &["a.safetensors"], &["nothing to verify", "no tensor in 1 file, \"a.safetensors\""]);
    refused(&folder, &["a.safetensors", "b.safetensors"], &["no tensor in 2 files", "b.safetensors"]);
    folder.write_tensor("c.safetensors", "w", 10);
    run(&folder, &["verify", "a.safetensors", "c.safetensors"]).succeeded();
}

#[test]
fn indexes_that_cannot_be_followed() {
    let folder = Folder::new();
    folder.write_tensor("a.safetensors", "a", 10);
    let index = "model.safetensors.index.json";
    for (weight_map, words) in [
        (
            r#"{"a":"a.safetensors","q":"gone.safetensors"}"#,
            &["\"gone.safetensors\"", "missing", "\"q\""][..],
        ),
        (r#"{"a":"a.safetensors","q":"a.safetensors"}"#, &["\"a.safetensors\"", "\"q\""]),
        (r#"{"a":"../a.safetensors"}"#, &["\"../a.safetensors\"", "\"a\""]),
        (r#"{"a":"/etc/passwd"}"#, &["\"/etc/passwd\"", "\"a\""]),
        ("{}", &["no tensor"]),
        ("7", &["malformed index"]),
    ] {
        folder.write(index, format!(r#"{{"metadata":{{}},"weight_map":{weight_map}}}"#));
        refused(&folder, &["."], &[&[index], words].concat());
        refused(&folder, &[index], &[&[index], words].concat());
    }
}

#[test]
fn two_shards_with_one_name_are_refused() {
    let folder = Folder::new();
    fs::create_dir(folder.join("model")).unwrap();
    folder.write_tensor("model/a.safetensors", "w", 10);
    folder.write_tensor("model/b.safetensors", "w", 10);
    refused(&folder, &["model"], &["\"w\"", "a.safetensors", "b.safetensors"]);
}

#[test]
fn a_limit_or_device_below_the_model_names_the_tensor() {
    let folder = Folder::new();
    let entries = [entry("small", "[10]", 0, 10), entry("large", "[5000000]", 10, 5_000_010)];
    let payload = vec![7; 5_000_010];
    folder.write("x.safetensors", file(&format!("{{{}}}", entries.join(",")), &payload));
    let tensor = ["x.safetensors", "\"large\"", "5000000 B", "4.77 MiB"];
    refused(&folder, &["x.safetensors", "--device", "host:4MiB"], &tensor);
    let words = [&tensor[..], &["limit of 4 MiB", "raise the limit"]].concat();
    refused(&folder, &["x.safetensors", "--limit", "4MiB"], &words);
    refused(&folder, &["x.safetensors", "--limit", "4MiB", "--device", "host:1GiB", "--level", "2"], &words);
}

#[test]
fn a_cache_that_does_not_fit_is_refused() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 10);
    let with = |size| ["x.safetensors", "--device", "host:64MiB", "--kv-cache", size];
    refused(&folder, &with("64MiB"), &["kv_cache", "64 MiB"]);
    refused(&folder, &with("1TiB"), &["kv_cache", "1 TiB"]);
    refused(&folder, &with("15EiB"), &["kv_cache"]);
}

#[test]
fn limits_and_capacities_that_no_device_has() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 10);
    refused(&folder, &["x.safetensors", "--limit", "0"], &["limit of 0 B", "2 MiB"]);
    refused(&folder, &["x.safetensors", "--limit", "2MB"], &["limit of 1.91 MiB", "2 MiB"]);
    for size in ["0", "1", "2MB", "15EiB"] {
        let device = format!("host:{size}");
        refused(&folder, &["x.safetensors", "--device", &device], &["host:", "capacity"]);
    }
}

#[test]
fn gpus_that_are_not_there_are_refused() {
    let folder = Folder::new();
    folder.write_tensor("x.safetensors", "w", 10);
    for device in ["cuda:4294967295", "cuda:4096"] {
        refused(&folder, &["x.safetensors", "--device", device], &[device, "driver"]);
    }
}

#[test]
fn hostile_names_are_shown_escaped_and_short() {
    let folder = Folder::new();
    let escapes = r"\u001b]0;owned\u0007\u001b[2J\r\u202e\u009b31m";
    let long = "x".repeat(1 << 20);
    for (name, shown) in [(escapes, "\\u{1b}]0;owned"), (long.as_str(), "xxx")] {
        // In the header's own faults, and in those of the device.
        folder.write("x.safetensors", file(&format!("{{{}}}", entry(name, "[9]", 0, 4)), &[0; 4]));
        refused(&folder, &["x.safetensors"], &["x.safetensors", shown]);
        folder.write_tensor("x.safetensors", name, 5_000_000);
        refused(&folder, &["x.safetensors", "--limit", "2MiB"], &["x.safetensors", shown]);
        let index = "y.safetensors.index.json";
        folder.write(index, format!(r#"{{"weight_map":{{"{name}":"gone.safetensors"}}}}"#));
        refused(&folder, &[index], &["gone.safetensors", shown]);
        folder.write(index, format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#));
        refused(&folder, &[index], &[shown]);
    }
    let file_name = "\u{1b}[31m \u{7}.safetensors";
    folder.write(file_name, "torn");
    refused(&folder, &[file_name], &["\\u{1b}[31m"]);
    refused(&folder, &["\u{1b}[31m nowhere"], &["\\u{1b}[31m nowhere"]);
}
