//! `cargo xtask picture`: measures one load again, and draws what PyTorch's allocator and Poorwill's pool map for it.

use crate::steps::{Failure, Step, say};

const TRACE: &str = "docs/images/churn-moe.csv";
const PICTURE: &str = "docs/images/churn-moe.svg";
const CASES: [(&str, &str); 3] = [
    ("moe-block-layout", "docs/images/replay-moe-block-layout.svg"),
    ("gpt-oss-swizzle", "docs/images/replay-gpt-oss-swizzle.svg"),
    ("dense", "docs/images/replay-dense.svg"),
];
/// What vLLM sets while it loads a model, and Poorwill, on an H200.
const SETUPS: [&str; 6] =
    ["--card", "141GiB", "--setup", "pytorch:max_split_size_mb:20", "--setup", "poorwill"];

pub(crate) fn run() -> Result<(), Failure> {
    let poorwill = |words: &[&'static str]| {
        let cargo = ["run", "--release", "--quiet", "--locked", "--package", "poorwill-cli", "--"];
        Step::cargo([&cargo[..], words].concat()).run()
    };
    poorwill(&["bench", "churn", "--load", "moe", "--seed", "0", "--trace", TRACE])?;
    poorwill(&[&["replay", TRACE, "--svg", PICTURE], &SETUPS[..]].concat())?;
    say(&format!("xtask picture: {PICTURE}, from {TRACE}"));
    for (case, picture) in CASES {
        // Reported loads that do not fit, so the command fails.
        drop(poorwill(&["replay", "--case", case, "--svg", picture]));
        say(&format!("xtask picture: {picture}"));
    }
    Ok(())
}
