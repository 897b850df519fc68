//! The developer's commands: `cargo xtask COMMAND`.
//!
//! They need nothing but the Rust toolchain. Exit codes: 0 done, 1 a step failed, 2 wrong usage, including a
//! benchmark's own arguments.

#![forbid(unsafe_code)]

mod bench;
mod book;
mod build;
mod console;
mod dist;
mod effort;
mod guard;
mod lint;
mod picture;
mod ptx;
mod python;
mod python_tests;
mod release;
mod rotation;
mod steps;
mod tally;
mod test;
mod toolchain;
mod vllm;

use std::ffi::OsString;
use std::fmt;
use std::num::NonZero;
use std::process::ExitCode;

use self::bench::{BENCHES, Bench};
use self::effort::Tier;

const USAGE: &str = "\
The developer's commands.

Usage: cargo xtask COMMAND

Commands:
  test [-- ARGS]  build and run the tests of a developer's day: every promise on the host device, over the fake
                  CUDA library and on an NVIDIA GPU if one is here, documentation, and the Python package, also in
                  the code of vLLM and SGLang (0.12 GB to fetch, once);
                  ARGS go to `cargo test`: `cargo xtask test -- --package poorwill-core-tests pool`
  test --full     everything: usual cases of random tests (fewer over the fake library and on a GPU, as the
                  same code runs on the host device), long tests, rotation's page in a browser, every
                  version of vLLM (another 0.7 GB), the Python package over PyTorch (0.9 GB to fetch,
                  once)
  test --rest     what --full has beyond a quick run that came before: what this left out, and again what
                  does more with the usual effort; of vLLM the contract with every version
  test --repeat N every test of Rust that waits, sleeps or has a deadline, N times, 1000 at the most
  python [-- ARGS]
                  the Python package alone: build it, run its tests, check its types;
                  ARGS go to `pytest`: `cargo xtask python -- -k fork`
  dist            the wheels of the Python package, for this machine and for what else the compiler
                  builds for, checked: what their libraries need, and installed under every CPython here
  licenses        write the licences of what the wheels link again
  vllm            the plugins for vLLM and SGLang against the sources of every version, fetched once (0.8 GB)
  clients         stock clients of OpenAI's and Anthropic's APIs against a rotation of mock engines: for Python (fetched
                  once), JavaScript, Java and a page in Chromium where these are here, and curl
  engines         llama.cpp's server and an embedding server behind a rotation (fetched once, 0.15 GB)
  bench NAME [ARGS]
                  one benchmark, in release: alloc (allocating and freeing, beside a peer),
                  wake (on the host device, beside its limit)
  book            docs/ as a book of HTML pages with a search, its links followed; mdBook is built once and kept
  release --dry-run
                  all that can be checked before a release: the crates' packages, the wheels, the book; and what is
                  to be done by hand
  picture         draw docs/images again from a load measured now
  ptx             compile the GPU's kernels again, which are written in CUDA C (50 MB to fetch, once)
  lint            formatting, clippy, documentation, a check for aarch64, and the style of the Python

Options:
  -h, --help      print this

Environment:
  POORWILL_EFFORT=quick|usual|long
                  how hard random tests try: a tenth of the usual cases (what `test` does), the usual ones
                  (`test --full`), or twenty times as many
  POORWILL_TEST_DEVICE=host|fake|cuda:N
                  for `test -- ARGS`: what the tests of promises run on";

const WRONG_USAGE: u8 = 2;

/// Maximum repetitions of tests: the list of all is held in memory.
const MOST_TIMES: u32 = 1000;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let request = match Request::parse(&args) {
        Ok(request) => request,
        Err(error) => {
            steps::note(&format!("xtask: {error}\n\n{USAGE}"));
            return ExitCode::from(WRONG_USAGE);
        }
    };
    let outcome = match &request {
        Request::Help => {
            steps::say(USAGE);
            Ok(())
        }
        Request::Test(tier) => test::run(*tier),
        Request::Repeat(times) => test::repeat(*times),
        Request::Chosen { cargo_args } => test::run_chosen(cargo_args),
        Request::Python { pytest_args } => python_tests::run(pytest_args),
        Request::Dist => dist::run().map(drop),
        Request::Licenses => dist::licenses::write(),
        Request::Vllm => vllm::run(),
        Request::Clients => rotation::clients().map(drop),
        Request::Engines => rotation::engines().map(drop),
        Request::Lint => lint::run(),
        Request::Release => release::dry_run(),
        Request::Book => book::run().map(drop),
        Request::Picture => picture::run(),
        Request::Ptx => ptx::run(),
        Request::Bench { bench, args } => bench.run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            steps::note(&format!("xtask: {failure}"));
            // A benchmark parses its own arguments; cargo passes on its exit code.
            let is_bench = matches!(request, Request::Bench { .. });
            if failure.is_usage() || is_bench && failure.exit_code() == Some(WRONG_USAGE.into()) {
                ExitCode::from(WRONG_USAGE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// A parsed command line.
#[derive(Debug, PartialEq)]
enum Request {
    Help,
    Test(Tier),
    Repeat(NonZero<u32>),
    Chosen { cargo_args: Vec<OsString> },
    Python { pytest_args: Vec<OsString> },
    Dist,
    Licenses,
    Vllm,
    Clients,
    Engines,
    Lint,
    Book,
    Release,
    Picture,
    Ptx,
    Bench { bench: Bench, args: Vec<OsString> },
}

impl Request {
    fn parse(args: &[OsString]) -> Result<Request, UsageError> {
        let Some((command, rest)) = args.split_first() else { return Err(UsageError::NoCommand) };
        let wants_help = |word: &OsString| word == "--help" || word == "-h";
        if wants_help(command) || command == "help" || rest.first().is_some_and(wants_help) {
            return Ok(Request::Help);
        }
        let command = command.to_str().ok_or_else(|| UsageError::UnknownCommand(command.clone()))?;
        match command {
            "test" => Self::parse_test(rest),
            "python" => Self::parse_python(rest),
            "bench" => Self::parse_bench(rest),
            "release" if matches!(rest, [dry] if dry == "--dry-run") => Ok(Request::Release),
            "release" => Err(UsageError::NotDry),
            _ => {
                let request =
                    Self::plain(command).ok_or_else(|| UsageError::UnknownCommand(command.into()))?;
                match rest.first() {
                    Some(argument) => Err(UsageError::Unexpected(argument.clone())),
                    None => Ok(request),
                }
            }
        }
    }

    /// Commands that take no arguments.
    fn plain(command: &str) -> Option<Request> {
        Some(match command {
            "dist" => Request::Dist,
            "licenses" => Request::Licenses,
            "vllm" => Request::Vllm,
            "clients" => Request::Clients,
            "engines" => Request::Engines,
            "lint" => Request::Lint,
            "book" => Request::Book,
            "picture" => Request::Picture,
            "ptx" => Request::Ptx,
            _ => return None,
        })
    }

    fn parse_test(rest: &[OsString]) -> Result<Request, UsageError> {
        match rest {
            [] => Ok(Request::Test(Tier::Quick)),
            [tier] if tier == "--full" => Ok(Request::Test(Tier::Full)),
            [tier] if tier == "--rest" => Ok(Request::Test(Tier::Rest)),
            [repeat, times] if repeat == "--repeat" => {
                let times = times.to_str().and_then(|times| times.parse::<NonZero<u32>>().ok());
                let times = times.filter(|times| times.get() <= MOST_TIMES);
                times.map(Request::Repeat).ok_or(UsageError::NoTimes)
            }
            [repeat] if repeat == "--repeat" => Err(UsageError::NoTimes),
            [dashes] if dashes == "--" => Ok(Request::Test(Tier::Quick)),
            [dashes, cargo_args @ ..] if dashes == "--" => {
                Ok(Request::Chosen { cargo_args: cargo_args.to_vec() })
            }
            [tier, other] if is_tier(tier) && is_tier(other) => {
                Err(UsageError::TwoTiers(tier.clone(), other.clone()))
            }
            [repeat, times, argument, ..] if repeat == "--repeat" => {
                let tier = format!("--repeat {}", times.display()).into();
                Err(UsageError::AfterTier { tier, argument: argument.clone() })
            }
            [tier, argument, ..] if is_tier(tier) => {
                Err(UsageError::AfterTier { tier: tier.clone(), argument: argument.clone() })
            }
            [tier, ..] if tier.to_string_lossy().starts_with("--") => {
                Err(UsageError::UnknownTier(tier.clone()))
            }
            [argument, ..] => Err(UsageError::before_dashes("test", argument)),
        }
    }

    fn parse_python(rest: &[OsString]) -> Result<Request, UsageError> {
        match rest {
            [] => Ok(Request::Python { pytest_args: Vec::new() }),
            [dashes, pytest_args @ ..] if dashes == "--" => {
                Ok(Request::Python { pytest_args: pytest_args.to_vec() })
            }
            [argument, ..] => Err(UsageError::before_dashes("python", argument)),
        }
    }

    fn parse_bench(rest: &[OsString]) -> Result<Request, UsageError> {
        let Some((name, args)) = rest.split_first() else { return Err(UsageError::NoBench) };
        let bench = Bench::named(name).ok_or_else(|| UsageError::UnknownBench(name.clone()))?;
        Ok(Request::Bench { bench, args: args.to_vec() })
    }
}

fn is_tier(word: &OsString) -> bool {
    word == "--full" || word == "--rest"
}

#[derive(Debug, PartialEq)]
enum UsageError {
    NoCommand,
    UnknownCommand(OsString),
    UnknownTier(OsString),
    TwoTiers(OsString, OsString),
    AfterTier { tier: OsString, argument: OsString },
    NoTimes,
    BeforeDashes { command: String, argument: OsString },
    Unexpected(OsString),
    NotDry,
    NoBench,
    UnknownBench(OsString),
}

impl UsageError {
    fn before_dashes(command: &str, argument: &OsString) -> Self {
        Self::BeforeDashes { command: command.to_owned(), argument: argument.clone() }
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UsageError::NoCommand => write!(f, "no command given"),
            UsageError::UnknownCommand(name) => write!(f, "unknown command `{}`", name.display()),
            UsageError::BeforeDashes { command, argument } => {
                let (taker, argument) =
                    (if command == "test" { "cargo test" } else { "pytest" }, argument.display());
                write!(
                    f,
                    "unexpected `{argument}`: arguments for `{taker}` go after `--`, \
                     as in `cargo xtask {command} -- {argument}`"
                )
            }
            UsageError::NoTimes => write!(
                f,
                "`--repeat` has no number from 1 to {MOST_TIMES}: write it like `cargo xtask test --repeat 20`"
            ),
            UsageError::TwoTiers(one, other) => write!(
                f,
                "`{}` and `{}` are two tiers: give `--full` for everything, or `--rest` alone after a quick run",
                one.display(),
                other.display()
            ),
            UsageError::AfterTier { tier, argument } => write!(
                f,
                "unexpected `{}` after `{}`, which takes nothing more; chosen tests run with \
                 `cargo xtask test -- ARGS`",
                argument.display(),
                tier.display()
            ),
            UsageError::UnknownTier(tier) => write!(
                f,
                "unknown option `{}`: `cargo xtask test` takes `--full`, `--rest` or `--repeat N`; arguments for \
                 `cargo test` go after `--`",
                tier.display()
            ),
            UsageError::Unexpected(argument) => {
                write!(f, "unexpected `{}`: this command takes no arguments", argument.display())
            }
            UsageError::NotDry => {
                write!(
                    f,
                    "`release` takes exactly `--dry-run`: `cargo xtask release --dry-run` lists what a person does to \
                     publish"
                )
            }
            UsageError::NoBench => write!(f, "bench needs a name; known are {}", bench_names()),
            UsageError::UnknownBench(name) => {
                write!(f, "no benchmark `{}`; known are {}", name.display(), bench_names())
            }
        }
    }
}

fn bench_names() -> String {
    BENCHES.map(|bench| bench.name).join(", ")
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn parse(words: &[&str]) -> Result<Request, UsageError> {
        Request::parse(&words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn commands_are_recognised() {
        assert_eq!(parse(&["test"]), Ok(Request::Test(Tier::Quick)));
        assert_eq!(parse(&["test", "--"]), Ok(Request::Test(Tier::Quick)));
        assert_eq!(parse(&["test", "--full"]), Ok(Request::Test(Tier::Full)));
        assert_eq!(parse(&["test", "--rest"]), Ok(Request::Test(Tier::Rest)));
        assert_eq!(parse(&["python"]), Ok(Request::Python { pytest_args: vec![] }));
        assert_eq!(parse(&["dist"]), Ok(Request::Dist));
        assert_eq!(parse(&["licenses"]), Ok(Request::Licenses));
        assert_eq!(parse(&["vllm"]), Ok(Request::Vllm));
        assert_eq!(parse(&["lint"]), Ok(Request::Lint));
        assert_eq!(parse(&["picture"]), Ok(Request::Picture));
        assert_eq!(parse(&["ptx"]), Ok(Request::Ptx));
        assert_eq!(parse(&["book"]), Ok(Request::Book));
        assert_eq!(parse(&["release", "--dry-run"]), Ok(Request::Release));
        let args = vec!["--json".into()];
        for bench in BENCHES {
            let args = args.clone();
            assert_eq!(parse(&["bench", bench.name, "--json"]), Ok(Request::Bench { bench, args }));
        }
        for words in [&["--help"][..], &["-h"], &["help"], &["test", "--help"], &["lint", "-h"]] {
            assert_eq!(parse(words), Ok(Request::Help), "{words:?}");
        }
    }

    #[test]
    fn arguments_after_the_dashes_are_cargos() {
        let cargo_args = ["pool", "--", "--nocapture"].map(OsString::from).to_vec();
        assert_eq!(parse(&["test", "--", "pool", "--", "--nocapture"]), Ok(Request::Chosen { cargo_args }));
        let pytest_args = ["-k", "fork"].map(OsString::from).to_vec();
        assert_eq!(parse(&["python", "--", "-k", "fork"]), Ok(Request::Python { pytest_args }));
        for (command, taker) in [("test", "`cargo test`"), ("python", "`pytest`")] {
            let message = parse(&[command, "pool"]).unwrap_err().to_string();
            assert!(
                message.contains(taker) && message.contains(&format!("`cargo xtask {command} -- pool`")),
                "{message}"
            );
        }
    }

    #[test]
    fn wrong_usage_is_refused() {
        assert_eq!(parse(&[]), Err(UsageError::NoCommand));
        assert_eq!(parse(&["tset"]), Err(UsageError::UnknownCommand("tset".into())));
        for words in [&["test", "--repeat"][..], &["test", "--repeat", "0"], &["test", "--repeat", "x"]] {
            assert_eq!(parse(words), Err(UsageError::NoTimes));
        }
        assert_eq!(parse(&["test", "--repeat", "1001"]), Err(UsageError::NoTimes));
        assert_eq!(parse(&["test", "--repeat", "50"]), Ok(Request::Repeat(NonZero::new(50).unwrap())));
        let after_times = UsageError::AfterTier { tier: "--repeat 20".into(), argument: "core".into() };
        assert_eq!(parse(&["test", "--repeat", "20", "core"]), Err(after_times));
        assert_eq!(parse(&["test", "--quick"]), Err(UsageError::UnknownTier("--quick".into())));
        let after_tier = UsageError::AfterTier { tier: "--full".into(), argument: "core".into() };
        assert_eq!(parse(&["test", "--full", "core"]), Err(after_tier));
        for (one, other) in [("--full", "--rest"), ("--rest", "--full"), ("--full", "--full")] {
            let error = parse(&["test", one, other]).unwrap_err();
            assert_eq!(error, UsageError::TwoTiers(one.into(), other.into()));
            let message = error.to_string();
            assert!(
                message.starts_with(&format!(
                    "`{one}` and `{other}` are two tiers: give `--full` for everything"
                )),
                "{message}"
            );
        }
        assert_eq!(parse(&["release"]), Err(UsageError::NotDry));
        assert_eq!(parse(&["release", "--now"]), Err(UsageError::NotDry));
        assert_eq!(parse(&["bench"]), Err(UsageError::NoBench));
        assert_eq!(parse(&["bench", "walk"]), Err(UsageError::UnknownBench("walk".into())));
        assert_eq!(parse(&["lint", "core"]), Err(UsageError::Unexpected("core".into())));
        assert_eq!(parse(&["dist", "x86_64"]), Err(UsageError::Unexpected("x86_64".into())));
        assert_eq!(parse(&["vllm", "0.33"]), Err(UsageError::Unexpected("0.33".into())));
        assert_eq!(parse(&["picture", "moe"]), Err(UsageError::Unexpected("moe".into())));
    }

    #[test]
    fn usage_names_every_command() {
        for command in [
            "test", "python", "dist", "licenses", "vllm", "bench", "book", "release", "lint", "picture",
            "ptx",
        ] {
            assert!(USAGE.lines().any(|line| line.starts_with(&format!("  {command} "))), "{command}");
        }
        for bench in BENCHES {
            assert!(USAGE.contains(&format!("{} (", bench.name)), "{}", bench.name);
        }
    }

    #[test]
    fn commands_of_the_pages_are_ours() {
        let root = steps::workspace_root();
        let mut count = 0;
        for page in pages(&root) {
            let text = std::fs::read_to_string(&page).unwrap();
            for typed in commands(&text) {
                // A word in capitals stands for one of the benchmarks.
                let is_placeholder = |word: &str| word.bytes().all(|b| b.is_ascii_uppercase());
                let words: Vec<&str> = typed
                    .split_whitespace()
                    .map(|word| if is_placeholder(word) { BENCHES[0].name } else { word })
                    .collect();
                assert!(parse(&words).is_ok(), "{}: cargo xtask {typed}", page.display());
                count += 1;
            }
        }
        assert!(count > 40, "only {count} commands were found");
    }

    /// Every page of the repository, but none of a build.
    fn pages(root: &Path) -> Vec<PathBuf> {
        let (mut pages, mut folders) = (Vec::new(), vec![root.to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type().unwrap())).unwrap();
                let name = path.file_name().unwrap().to_string_lossy();
                if kind.is_dir() && name != "target" && !name.starts_with('.') {
                    folders.push(path);
                } else if kind.is_file() && name.ends_with(".md") {
                    pages.push(path);
                }
            }
        }
        pages
    }

    /// What follows `cargo xtask` at the start of a line or within inline code, without what is optional.
    fn commands(page: &str) -> Vec<String> {
        let of_line = |line: &str| {
            let typed = line.trim().strip_prefix("cargo xtask ");
            typed.map(|typed| typed.split(" #").next().unwrap_or_default().to_owned())
        };
        let inline = page.split('`').skip(1).step_by(2).filter_map(|code| {
            let (_, typed) = code.split_once("cargo xtask ").filter(|_| !code.contains('\n'))?;
            Some(typed.split(" [").next().unwrap_or_default().to_owned())
        });
        page.lines().filter_map(of_line).chain(inline).collect()
    }

    #[test]
    fn commands_are_found_in_lines_and_in_inline_code() {
        let page = "```sh\n  cargo xtask one  # why\n```\nRun `cargo xtask two [--x]` or `nice cargo xtask three`.\n";
        assert_eq!(commands(page), ["one ", "two", "three"]);
    }
}
