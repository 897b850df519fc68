//! `cargo xtask picture`: measures one load again and draws its mapped memory, beside PyTorch's pool.

use crate::steps::{Failure, Step, say};

const TRACE: &str = "docs/images/churn-moe.csv";
const PICTURE: &str = "docs/images/churn-moe.svg";

pub(crate) fn run() -> Result<(), Failure> {
    let run = |package, what: &[&'static str]| {
        let cargo = ["run", "--release", "--quiet", "--locked", "--package", package];
        Step::cargo([&cargo[..], what].concat()).run()
    };
    let bench = ["--", "bench", "churn", "--load", "moe", "--seed", "0", "--trace", TRACE];
    run("poorwill-cli", &bench)?;
    run("poorwill-bench", &["--example", "picture", "--", TRACE, PICTURE])?;
    say(&format!("xtask picture: {PICTURE}, from {TRACE}"));
    Ok(())
}
