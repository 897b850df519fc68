//! `--budget` of every command that takes memory: its spellings, whose it is, and what happens where it is too small.

use serde_json::{Value, json};

use crate::support::{Folder, Ran, folder_with_model, run};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The commands that take memory of a device, with the least to do, and a device of 64 GiB.
const COMMANDS: [&[&str]; 4] = [
    &["verify", "model", "--cycles=1", "--device=host:64GiB"],
    &["bench", "sleep", "--size=8MiB", "--cycles=1", "--device=host:64GiB"],
    &["bench", "churn", "--load=moe", "--device=host:64GiB"],
    &["demo", "--device=host:64GiB"],
];

/// Runs the command, on the host device or with GPUs.
type Runner<'a> = &'a dyn Fn(&[&str]) -> Ran;

fn with<'a>(args: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [args, more].concat()
}

fn succeeds(run: Runner<'_>, args: &[&str]) -> Value {
    let ran = run(&with(args, &["--json"]));
    let report = ran.json();
    ran.succeeded();
    report
}

/// Refused with exit code 1, for people and programs in the same words.
fn refused(run: Runner<'_>, args: &[&str], words: &[&str]) {
    let ran = run(args);
    let message = ran.failed(words).to_owned();
    assert_eq!(ran.stdout, "", "{args:?}");
    assert_eq!(run(&with(args, &["--json"])).json(), json!({ "error": message }), "{args:?}");
}

/// Refused with exit code 2 and words that help.
fn misused(run: Runner<'_>, args: &[&str], words: &[&str]) {
    let ran = run(args);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}: {ran:?}");
    for word in words.iter().chain(&["--help"]) {
        assert!(ran.stderr.contains(word), "{args:?}: `{word}` is not in: {}", ran.stderr);
    }
}

/// Most that a load may map within a budget.
fn churn_limit(run: Runner<'_>, device: &str, budget: &[&str]) -> u64 {
    let churn = ["bench", "churn", "--load=moe", "--device", device];
    let report = succeeds(run, &with(&churn, budget));
    let limit = report["limit_bytes"].as_u64().unwrap_or_else(|| panic!("{report}"));
    assert!(report["peak_mapped_bytes"].as_u64().unwrap() <= limit, "{report}");
    limit
}

#[test]
fn every_spelling_is_the_same_budget() {
    let folder = Folder::new();
    let run: Runner<'_> = &|args| run(&folder, args);
    for budget in ["44GiB", "44g", "45056m", "44 GiB", "47244640256", "host=44GiB", "0.1,host=44g"] {
        assert_eq!(churn_limit(run, "host:64GiB", &["--budget", budget]), 44 * GIB, "{budget}");
    }
    for budget in ["0.75", ".75", "75%", "75.0 %", "host=0.75", "0.1, host = 75%"] {
        assert_eq!(churn_limit(run, "host:64GiB", &["--budget", budget]), 48 * GIB, "{budget}");
    }
    // What there is, is the most.
    for budget in ["1.0", "100%", "1TiB"] {
        assert_eq!(churn_limit(run, "host:64GiB", &["--budget", budget]), 64 * GIB, "{budget}");
    }
}

#[test]
fn a_limit_is_within_the_budget() {
    let folder = folder_with_model();
    let run: Runner<'_> = &|args| run(&folder, args);
    let limit = churn_limit(run, "host:64GiB", &["--budget=0.75", "--limit=40GiB"]);
    assert_eq!(limit, 40 * GIB);
    let limit = churn_limit(run, "host:64GiB", &["--budget=0.75", "--limit=48GiB"]);
    assert_eq!(limit, 48 * GIB, "all of it");
    let sentence = [
        "cannot claim 49 GiB for `pool`: the budget is 48 GiB, of which 48 GiB would fit",
        "claim at most 48 GiB",
        "raise the budget to 49 GiB (a share of 0.77)",
    ];
    for command in [COMMANDS[0], COMMANDS[2]] {
        refused(run, &with(command, &["--budget=75%", "--limit=49GiB"]), &sentence);
        refused(run, &with(command, &["--budget=host=48g", "--limit=49g"]), &sentence);
    }
    // Nor can a limit be above what there is.
    let words = ["cannot claim 65 GiB for `pool`: the budget is 64 GiB", "no budget would do"];
    refused(run, &with(COMMANDS[0], &["--limit=65GiB"]), &words);
}

#[test]
fn a_budget_that_is_enough_and_one_that_is_not() {
    let folder = folder_with_model();
    let run: Runner<'_> = &|args| run(&folder, args);
    for budget in ["12MiB", "host=0.5"] {
        let budget = ["--budget", budget];
        for command in [
            &["verify", "model", "--cycles=1", "--device=host:32MiB"][..],
            &["bench", "sleep", "--size=8MiB", "--cycles=1", "--device=host:32MiB"],
        ] {
            assert_eq!(succeeds(run, &with(command, &budget))["verified"], true, "{command:?}");
        }
    }
    refused(run, &with(COMMANDS[0], &["--budget=4MiB"]), &["limit of 4 MiB", "raise the limit"]);
    refused(run, &with(COMMANDS[1], &["--budget=4MiB"]), &["cannot load"]);
    let churn = with(COMMANDS[2], &["--budget=0.125"]);
    run(&churn).failed(&["the load failed", "limit of 8 GiB"]);
}

#[test]
fn a_budget_below_a_granule_is_none() {
    let folder = folder_with_model();
    let run: Runner<'_> = &|args| run(&folder, args);
    for (budget, limit) in
        [("1MiB", "budget is 1 MiB"), ("0.00000001", "budget is 687 B"), ("1k", "budget is 1 KiB")]
    {
        for command in COMMANDS {
            let budget = format!("--budget={budget}");
            refused(run, &with(command, &[&budget]), &["cannot claim 2 MiB for `pool`", limit]);
        }
    }
}

#[test]
fn a_budget_of_another_device_is_a_slip() {
    let folder = folder_with_model();
    let run: Runner<'_> = &|args| run(&folder, args);
    for command in COMMANDS {
        for budget in ["cuda:0=20GiB", "cuda=0.5", "cuda:0=0.5,cuda:1=0.6"] {
            let budget = format!("--budget={budget}");
            misused(run, &with(command, &[&budget]), &["--budget names cuda:0", "the device is host"]);
        }
    }
    misused(
        run,
        &["verify", "model", "--device=cuda:1", "--budget=cuda:0=0.5"],
        &["--budget names cuda:0, and the device is cuda:1"],
    );
    misused(run, &["verify", "model", "--device=cuda:1", "--budget=host=0.5"], &["--budget names host"]);
    // Without a device it is the host's.
    misused(run, &["demo", "--budget=cuda:0=0.5"], &["--budget names cuda:0, and the device is host"]);
}

#[test]
fn what_is_no_budget_is_refused_by_its_words() {
    let folder = folder_with_model();
    let run: Runner<'_> = &|args| run(&folder, args);
    for (budget, words) in [
        ("1.5", "a share is at most 1.0"),
        ("150%", "a share is at most 1.0"),
        ("0", "with nothing to use"),
        ("0.0", "with nothing to use"),
        ("0GiB", "with nothing to use"),
        ("1", "it is one byte"),
        ("22", "without a unit it is that many bytes"),
        ("abc", "is no budget"),
        ("", "is no budget"),
        ("-0.5", "is no budget"),
        ("0,92", "is no budget"),
        ("0.9.2", "is no budget"),
        ("16EiB", "is no budget"),
        ("0.92,", "is no budget"),
        ("0.92,0.5", "two budgets for all devices"),
        ("host=0.9,host:8GiB=0.5", "two budgets for host"),
        ("host=", "is no budget"),
        ("gpu=0.5", "names no device"),
        ("=0.5", "names no device"),
        ("hip:0=0.5", "AMD"),
    ] {
        let budget = format!("--budget={budget}");
        for command in COMMANDS {
            misused(run, &with(command, &[&budget]), &["--budget", words]);
        }
    }
    for command in COMMANDS {
        let twice = run(&with(command, &["--budget=0.5", "--budget=0.6"]));
        assert_eq!((twice.code, twice.stdout.as_str()), (2, ""), "{twice:?}");
    }
}

#[test]
fn help_names_both_kinds_of_budget() {
    let folder = Folder::new();
    for command in [&["verify"][..], &["bench", "sleep"], &["bench", "churn"], &["demo"]] {
        let help = run(&folder, &with(command, &["--help"])).succeeded();
        for word in ["--budget", "20GiB", "0.92"] {
            assert!(help.contains(word), "{command:?}: {help}");
        }
    }
}

#[test]
fn the_demo_makes_its_loads_fit_the_budget() {
    let folder = Folder::new();
    let demo = |args: &[&str]| {
        let args = with(&["demo"], args);
        let mut command = crate::support::command(folder.path(), args);
        Ran::from(command.env("TMPDIR", folder.path()).output().unwrap())
    };
    let report = succeeds(&demo, &["--device=host:2GiB", "--budget=0.5"]);
    assert_eq!(report["verified"], true);
    for churn in report["churn"].as_array().unwrap() {
        assert_eq!(churn["limit_bytes"], GIB, "{churn}");
        assert!(churn["peak_mapped_bytes"].as_u64().unwrap() <= GIB);
    }
}

/// The same on GPUs, where the budget is cut from what everyone says.
mod on_gpus {
    use super::*;
    use crate::gpu::Gpus;

    /// HAMi's slice of 23 GiB of a card of 24, and a whole card with 48 GiB.
    fn slice() -> Gpus {
        Gpus::default()
            .with("POORWILL_FAKE_CUDA_DEVICES", "24GiB,48GiB")
            .with("POORWILL_FAKE_CUDA_SIMULATE", "0:hami=23GiB")
            .with("CUDA_DEVICE_MEMORY_LIMIT_0", "23g")
    }

    #[test]
    fn a_share_is_of_the_slice() {
        let (folder, gpus) = (Folder::new(), slice());
        let run: Runner<'_> = &|args| gpus.run(&folder, args);
        // One that fits, so that the report is of success.
        let sleep = ["bench", "sleep", "--size=8MiB", "--cycles=1", "--device=cuda:0", "--budget=0.92"];
        assert_eq!(succeeds(run, &sleep)["verified"], true);
        let limit = |device: &str, budget: &str| {
            let ran = run(&with(
                &["bench", "churn", "--load=moe", "--device", device, "--json"],
                &["--budget", budget],
            ));
            ran.json()["limit_bytes"].as_u64().unwrap()
        };
        for budget in ["22GiB", "cuda:0=22GiB", "0.5,cuda=22g"] {
            assert_eq!(limit("cuda:0", budget), 22 * GIB, "{budget}");
        }
        for (budget, bytes) in [("92%", 22_720_376_995), ("99GiB", 23 * GIB)] {
            assert_eq!(limit("cuda:0", budget), bytes, "{budget}");
        }
        assert_eq!(limit("cuda:1", "0.75"), 36 * GIB);
        assert_eq!(limit("cuda:1", "0.5,cuda:1=40g"), 40 * GIB);
    }

    #[test]
    fn a_limit_above_the_slice_is_refused() {
        let (folder, gpus) = (folder_with_model(), slice());
        let run: Runner<'_> = &|args| gpus.run(&folder, args);
        let verify = ["verify", "model", "--cycles=1", "--device=cuda:0"];
        assert_eq!(succeeds(run, &with(&verify, &["--limit=23GiB"]))["verified"], true);
        // The card has it and the slice has not.
        refused(
            run,
            &with(&verify, &["--limit=24GiB"]),
            &["cannot claim 24 GiB for `pool`: the budget is 23 GiB", "there are 23 GiB in all"],
        );
        refused(
            run,
            &with(&verify, &["--limit=22GiB", "--budget=0.92"]),
            &["cannot claim 22 GiB for `pool`: the budget is 21.16 GiB", "(a share of 0.96)"],
        );
        refused(run, &with(&verify, &["--budget=1MiB"]), &["cannot claim 2 MiB", "budget is 1 MiB"]);
        misused(
            run,
            &with(&verify, &["--budget=cuda:1=0.5"]),
            &["--budget names cuda:1", "the device is cuda:0"],
        );
        misused(
            run,
            &with(&verify, &["--budget=host=0.5"]),
            &["--budget names host", "the device is cuda:0"],
        );
        misused(run, &with(&verify, &["--budget=22"]), &["without a unit"]);
    }

    #[test]
    fn a_slice_over_its_limit_says_what_is_free() {
        let folder = folder_with_model();
        let gpus = slice().with("POORWILL_FAKE_CUDA_SIMULATE", "0:hami=23GiB,0:used=23.5GiB");
        let run: Runner<'_> = &|args| gpus.run(&folder, args);
        let words = ["tensor \"", "the device has 0 B free of 23 GiB"];
        refused(run, &["verify", "model", "--device=cuda:0"], &words);
    }

    #[test]
    #[ignore = "long: the demo once more, over the fake CUDA library"]
    fn the_demo_runs_within_a_part_of_a_gpu() {
        let folder = Folder::new();
        let gpus = slice();
        let run: Runner<'_> = &|args| gpus.run(&folder, args);
        let demo = succeeds(run, &["demo", "--device=cuda:0", "--budget=cuda:0=4g"]);
        assert_eq!(demo["verified"], true);
        for churn in demo["churn"].as_array().unwrap() {
            assert_eq!(churn["limit_bytes"], 4 * GIB, "{churn}");
        }
        assert!(demo["verify"]["loaded"]["device_bytes"].as_u64().unwrap() > 500 * MIB);
    }

    #[test]
    fn unknown_memory_needs_a_budget_in_bytes() {
        let folder = folder_with_model();
        let gpus = slice().with("POORWILL_FAKE_CUDA_SIMULATE", "1:total=0,1:info_total=0");
        let run: Runner<'_> = &|args| gpus.run(&folder, args);
        let verify = ["verify", "model", "--cycles=1", "--device=cuda:1"];
        for budget in [&[][..], &["--budget=0.92"]] {
            let words = ["how much memory cuda:1 has is not known", "--budget 20GiB"];
            refused(run, &with(&verify, budget), &words);
        }
        assert_eq!(succeeds(run, &with(&verify, &["--budget=20GiB"]))["verified"], true);
    }
}
