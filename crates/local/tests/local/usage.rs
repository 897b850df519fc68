//! Arguments: what is wrong usage (exit code 2), and how help is to be had.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::support::{Folder, Ran, command, run};

/// Wrong usage: nothing on standard output, and words that help on standard error.
fn assert_usage(args: &[&str], words: &[&str]) {
    let ran = run(&Folder::new(), args);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}: {ran:?}");
    for word in words {
        assert!(ran.stderr.contains(word), "{args:?}: `{word}` is not in: {}", ran.stderr);
    }
}

#[test]
fn help_and_version_are_for_standard_output() {
    let folder = Folder::new();
    for args in [&["--help"][..], &["-h"], &["help"]] {
        let help = run(&folder, args).succeeded();
        assert!(
            ["demo", "verify", "doctor", "bench", "Usage"].iter().all(|word| help.contains(word)),
            "{help}"
        );
    }
    for args in [&["verify", "--help"][..], &["help", "verify"]] {
        let help = run(&folder, args).succeeded();
        for option in
            ["--device", "--cycles", "--level", "--limit", "--prepare", "--kv-cache", "--json", "CHECKPOINT"]
        {
            assert!(help.contains(option), "{help}");
        }
    }
    for args in [&["bench", "churn", "--help"][..], &["help", "bench", "churn"]] {
        let help = run(&folder, args).succeeded();
        for option in ["--load", "--seed", "--rounds", "--limit", "--device", "--trace", "--json", "swizzle"]
        {
            assert!(help.contains(option), "{help}");
        }
    }
    let help = run(&folder, &["bench", "sleep", "--help"]).succeeded();
    assert!(
        ["--device", "--size", "--changed", "--cycles", "--json", "24GiB"]
            .iter()
            .all(|option| help.contains(option)),
        "{help}"
    );
    let help = run(&folder, &["bench", "--help"]).succeeded();
    assert!(["churn", "sleep", "offload", "load"].iter().all(|bench| help.contains(bench)), "{help}");
    for command in ["demo", "doctor"] {
        assert!(run(&folder, &[command, "--help"]).succeeded().contains("--json"));
    }
    for args in [&["--version"][..], &["-V"]] {
        let version = run(&folder, args).succeeded();
        assert!(
            version.starts_with("poorwill-demo ") && version.contains(env!("CARGO_PKG_VERSION")),
            "{version}"
        );
    }
}

#[test]
fn without_a_command_there_is_help() {
    assert_usage(&[], &["Usage", "demo", "verify"]);
}

#[test]
fn commands_and_options_that_do_not_exist() {
    assert_usage(&["sleep"], &["sleep", "--help"]);
    assert_usage(&["Verify", "x"], &["Verify"]);
    assert_usage(&["--json"], &["--json"]);
    assert_usage(&["verify", "x", "--levels", "1"], &["--levels", "--level"]);
    assert_usage(&["demo", "x"], &["x"]);
    assert_usage(&["demo", "--cycles", "1"], &["--cycles"]);
    assert_usage(&["doctor", "host"], &["host"]);
    assert_usage(&["doctor", "--limit", "1GiB"], &["--limit"]);
}

#[test]
fn errors_name_the_command() {
    for (args, usage) in [
        (&["verify", "x", "--level=9"][..], "Usage: poorwill-demo verify [OPTIONS] <CHECKPOINT>..."),
        (&["verify", "x", "--limit=much"], "Usage: poorwill-demo verify [OPTIONS] <CHECKPOINT>..."),
        (
            &["bench", "churn", "--load=moe", "--rounds=0"],
            "Usage: poorwill-demo bench churn [OPTIONS] --load <LOAD>",
        ),
        (&["bench", "churn", "--load=walk"], "Usage: poorwill-demo bench churn [OPTIONS] --load <LOAD>"),
        (&["verify", "x", "--budget=cuda:0=1GiB"], "error: `poorwill-demo verify`: --budget names cuda:0"),
        (
            &["bench", "sleep", "--budget=cuda:0=1GiB"],
            "error: `poorwill-demo bench sleep`: --budget names cuda:0",
        ),
    ] {
        assert_usage(args, &[usage]);
    }
}

#[test]
fn verify_needs_a_checkpoint() {
    assert_usage(&["verify"], &["CHECKPOINT"]);
    assert_usage(&["verify", "--json"], &["CHECKPOINT"]);
    assert_usage(&["verify", ""], &["CHECKPOINT"]);
}

#[test]
fn a_benchmark_needs_a_name_and_a_load() {
    assert_usage(&["bench"], &["Usage", "churn"]);
    assert_usage(&["bench", "--json"], &["--json"]);
    assert_usage(&["bench", "walk"], &["walk"]);
    assert_usage(&["bench", "churn"], &["--load"]);
    assert_usage(&["bench", "churn", "moe"], &["moe"]);
    for load in ["", "Moe", "mixture", "moe,dense"] {
        assert_usage(&["bench", "churn", "--load", load], &["--load", load, "moe", "dense", "swizzle"]);
    }
    for seed in ["-1", "18446744073709551616", "x", ""] {
        assert_usage(&["bench", "churn", "--load=moe", &format!("--seed={seed}")], &["--seed", seed]);
    }
}

#[test]
fn sizes_that_are_none() {
    for size in ["1.5.GiB", "", "GiB", "-1", "1e9", "12q", "0x10", "16EiB", "1.3", "٣", "1,5GiB"] {
        for option in ["--limit", "--kv-cache"] {
            assert_usage(
                &["verify", "x", &format!("{option}={size}")],
                &[option, size, "write it like 24GiB"],
            );
        }
        assert_usage(&["bench", "churn", "--load=moe", &format!("--limit={size}")], &["--limit", size]);
        assert_usage(
            &["bench", "sleep", &format!("--size={size}")],
            &["--size", size, "write it like 24GiB"],
        );
        if !size.is_empty() {
            let device = format!("--device=host:{size}");
            assert_usage(&["verify", "x", &device], &["--device", size, "capacity", "write it like 24GiB"]);
        }
    }
}

#[test]
fn devices_that_are_none() {
    for command in
        [&["demo"][..], &["verify", "x"], &["bench", "churn", "--load", "moe"], &["bench", "sleep"]]
    {
        for device in
            ["gpu", "", "HOST", "host:", "host:8GiBs", "cuda:", "cuda:x", "cuda:-1", "cuda:4294967296"]
        {
            let device = format!("--device={device}");
            assert_usage(&[command, &[&device]].concat(), &["--device"]);
        }
        assert_usage(&[command, &["--device", "gpu"]].concat(), &["`gpu`", "host", "cuda:N"]);
        assert_usage(&[command, &["--device", "host:"]].concat(), &["capacity", "24GiB"]);
        assert_usage(&[command, &["--device", "hip:0"]].concat(), &["AMD", "not supported yet"]);
    }
}

#[test]
fn numbers_out_of_bounds() {
    for size in ["0", "0GiB"] {
        assert_usage(&["bench", "sleep", "--size", size], &["--size", size, "24GiB"]);
    }
    for layers in ["0", "-1", "4294967296", "x", "", "1.5"] {
        assert_usage(
            &["bench", "offload", &format!("--layers={layers}")],
            &["--layers", layers, "not in 1..="],
        );
    }
    for args in [&["--size", "0"][..], &["--device", "gpu"], &["--cycles", "1"], &["32"]] {
        assert_usage(&[&["bench", "offload"], args].concat(), &[args[0]]);
    }
    for part in ["200%", "-1", "x", "", "1", "1.5", "-1%", "1e-2", "NaN", "0.0.1", "٣%", "%"] {
        let args = ["bench", "sleep", &format!("--changed={part}")];
        assert_usage(&args, &["--changed", part, "like 1% or 0.01"]);
    }
    assert_usage(&["bench", "sleep", "--changed", "-1"], &["--changed", "less than nothing"]);
    for cycles in ["0", "-1", "4294967296", "three", "", "1.5"] {
        for command in [&["verify", "x"][..], &["bench", "sleep"]] {
            assert_usage(&[command, &[&format!("--cycles={cycles}")]].concat(), &["--cycles", cycles]);
        }
    }
    for cycles in ["0", "-1", "4294967296"] {
        for command in [&["verify", "x"][..], &["bench", "sleep"]] {
            assert_usage(&[command, &["--cycles", cycles]].concat(), &["--cycles", cycles, "not in 1..="]);
        }
    }
    for size in ["--limit", "--kv-cache", "--host-budget"] {
        assert_usage(&["verify", "x", size, "-1GiB"], &[size, "`-1GiB` is not a size"]);
    }
    for rounds in ["0", "-1", "4294967296", "three", "", "1.5"] {
        let args = ["bench", "churn", "--load=moe", &format!("--rounds={rounds}")];
        assert_usage(&args, &["--rounds", rounds]);
    }
    for level in ["0", "3", "-1", "257", "one", ""] {
        assert_usage(&["verify", "x", &format!("--level={level}")], &["--level", level]);
    }
}

#[test]
fn arguments_need_not_be_unicode() {
    let folder = Folder::new();
    let name = OsStr::from_bytes(b"w\xffs.safetensors");
    folder.write_tensor(name, "w", 10);
    let verify = |name: &OsStr| {
        let args = [OsStr::new("verify"), name, OsStr::new("--cycles=1")];
        Ran::from(command(folder.path(), args).output().unwrap())
    };
    verify(name).succeeded();
    verify(OsStr::from_bytes(b"n\xff.safetensors")).failed(&["n\u{fffd}.safetensors", "no such file"]);
    let device = [OsStr::new("verify"), OsStr::new("x"), OsStr::new("--device"), OsStr::from_bytes(b"\xff")];
    assert_eq!(Ran::from(command(folder.path(), device).output().unwrap()).code, 2);
}

/// The program of a newcomer says which program has the rest.
#[test]
fn commands_of_the_other_program_are_named() {
    for name in poorwill_local::SERVICES {
        for words in [&[*name][..], &["help", name], &[name, "--config", "rotate.toml"]] {
            assert_usage(
                words,
                &[&format!("`{name}` is a command of the program `poorwill`"), "cargo poorwill"],
            );
        }
    }
}
