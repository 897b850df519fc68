//! `poorwill replay`: what recorded allocations would need.

mod args;
mod card;
mod input;
mod report;
mod show;

use std::cmp::Reverse;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use poorwill_replay::answer::answer;
use poorwill_replay::cases::Case;
use poorwill_replay::page::{self, PageTrace};
use poorwill_replay::trace::Step;
use poorwill_replay::{Claim, Run, Setup, Trace, replay_each};

use self::args::ClaimArg;
pub(crate) use self::args::ReplayArgs;
use self::report::{ReplayReport, Replayed};
use poorwill_local::failure::Failure;
use poorwill_local::files;
use poorwill_local::progress::Progress;

const PICTURE: (u32, u32) = (960, 420);

pub(crate) fn run(args: &ReplayArgs) -> Result<ReplayReport, Failure> {
    let case = match &args.case {
        Some(name) => Case::of(name)?,
        None => None,
    };
    for path in args.html.iter().chain(&args.svg) {
        check_writable(path).map_err(|error| unwritten(path, &error))?;
    }
    let mut traces = match &case {
        Some(case) => vec![case.trace.clone()],
        None => input::read_traces(args)?,
    };
    if let Some(device) = args.device {
        input::keep_device(&mut traces, device)?;
    }
    for trace in &mut traces {
        trace.claims = args.claim.iter().map(|claim| of_load(claim, trace)).collect::<Result<_, _>>()?;
    }
    check_drawable(args, &traces)?;
    let progress = Progress::waiting("replay");
    let mut found = Vec::new();
    for trace in &traces {
        found.push(replay_trace(args, trace, case.as_ref())?);
    }
    if let Some(path) = &args.html {
        let mut shown: Vec<_> = traces.iter().zip(&found).collect();
        // The worst first, as in the answer.
        shown.sort_by_key(|(_, (replayed, _))| Reverse(replayed.badness()));
        let shown: Vec<PageTrace<'_>> = shown
            .into_iter()
            .map(|(trace, (replayed, runs))| PageTrace {
                trace,
                runs,
                answer: &replayed.said,
                notes: &replayed.answer.notes,
            })
            .collect();
        write(path, &page::page(&shown)?)?;
    }
    if let (Some(path), [trace], [(_, runs)]) = (&args.svg, &*traces, &*found) {
        write(path, &page::svg(trace, runs, PICTURE.0, PICTURE.1))?;
    }
    drop(progress);
    Ok(ReplayReport::of(found.into_iter().map(|(replayed, _)| replayed).collect()))
}

/// A picture shows one trace.
fn check_drawable(args: &ReplayArgs, traces: &[Trace]) -> Result<(), Failure> {
    if args.svg.is_none() || traces.len() == 1 {
        return Ok(());
    }
    let names: Vec<&str> = traces.iter().map(|trace| &*trace.name).collect();
    Err(Failure::new(format!(
        "a picture shows one trace, and there are {}: {}; name one file, and one --device of it",
        names.len(),
        names.join(", ")
    )))
}

fn replay_trace(
    args: &ReplayArgs,
    trace: &Trace,
    case: Option<&Case>,
) -> Result<(Replayed, Vec<Run>), Failure> {
    let known_card = case.map(|case| case.card);
    let known_setups = case.map_or(&Setup::ALL[..], |case| case.setups);
    let mut notes = Vec::new();
    let card = card::card(args, trace, known_card, &mut notes)?;
    let setups = setups(args, trace, known_setups, case.is_some(), &mut notes)?;
    let runs = replay_each(trace, &setups, card)?;
    let mut answer = answer(trace, &runs)?;
    answer.notes.extend(notes);
    if let Some(case) = case {
        answer.notes.push(format!("the report: {}", case.reported));
        answer.notes.extend(case.guessed.iter().map(|guess| format!("guessed: {guess}")));
    }
    let said = std::iter::once(&answer.sentence).chain(&answer.advice).cloned().collect::<Vec<_>>().join(" ");
    let replayed = Replayed {
        name: trace.name.clone(),
        steps: trace.steps.len(),
        total_bytes: card.total_bytes,
        taken_bytes: card.taken_bytes,
        budget_bytes: card.budget_bytes,
        usable_bytes: card.usable_bytes(),
        said,
        answer,
    };
    Ok((replayed, runs))
}

/// For the whole trace, or from its phase on.
fn of_load(claim: &ClaimArg, trace: &Trace) -> Result<Claim, Failure> {
    let from = match &claim.phase {
        None => Some(0),
        Some(name) => trace.phases.iter().find(|phase| phase.name == *name).map(|phase| phase.from),
    };
    let from_step = from.ok_or_else(|| {
        let known: Vec<&str> = trace.phases.iter().map(|phase| &*phase.name).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let phase = claim.phase.as_deref().unwrap_or_default();
        Failure::new(format!(
            "claim `{}`: `{}` has no phase `{phase}`; it has {known}",
            claim.name, trace.name
        ))
    })?;
    let from_step = behind_emptying(trace, from_step);
    Ok(Claim { name: claim.name.clone(), bytes: claim.bytes.0, from_step, to_step: usize::MAX })
}

/// Graphs, and others who know, empty the cache before they take memory: what a phase begins with comes before its claim.
fn behind_emptying(trace: &Trace, from: usize) -> usize {
    let next = trace.phases.iter().map(|phase| phase.from).find(|next| *next > from).unwrap_or(usize::MAX);
    let begins = trace.steps.iter().enumerate().take(next).skip(from);
    let begins = begins.take_while(|(_, step)| !matches!(step, Step::Alloc(_)));
    let empties = begins.filter(|(_, step)| matches!(step, Step::EmptyCache)).last();
    empties.map_or(from, |(at, _)| at + 1)
}

/// As asked for, else what was recorded, and usual ones beside it.
fn setups(
    args: &ReplayArgs,
    trace: &Trace,
    known: &[&str],
    is_case: bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Setup>, Failure> {
    if !args.setup.is_empty() {
        return Ok(args.setup.clone());
    }
    let mut setups = Vec::new();
    if !is_case {
        let settings = trace.recorded.as_ref().map(|recorded| &*recorded.settings).unwrap_or_default();
        let (setup, unknown) = Setup::of_pytorch(settings)
            .map_err(|error| Failure::new(format!("{}: {error}; say another --setup", trace.name)))?;
        if !unknown.is_empty() {
            notes.push(format!("settings that were recorded and are not modelled: {}", unknown.join(", ")));
        }
        setups.push(setup);
        // vLLM limits splits while it loads, whatever the settings are.
        if setup.to_string() == "pytorch:expandable_segments:True" {
            setups.extend("pytorch:max_split_size_mb:20,expandable_segments:True".parse::<Setup>());
        }
    }
    for text in known {
        let setup = text.parse::<Setup>().map_err(|error| Failure::new(error.to_string()))?;
        if !setups.contains(&setup) {
            setups.push(setup);
        }
    }
    Ok(setups)
}

/// What cannot be written is refused before the replay, so that no answer is lost. A pipe is not opened twice.
fn check_writable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(old) if old.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(old) if !old.is_file() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(path).map(drop),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match OpenOptions::new().write(true).create_new(true).open(path) {
                Ok(_) => fs::remove_file(path),
                // A link to nothing is replaced.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                Err(error) => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    files::replace(path, text).map_err(|error| unwritten(path, &error))
}

fn unwritten(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("{}: {error}", path.display()))
}
