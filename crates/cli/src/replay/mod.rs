//! `poorwill replay`: what recorded allocations would need.

mod args;
mod input;
mod report;
mod show;

use std::cmp::Reverse;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use poorwill::ByteSize;
use poorwill_replay::answer::answer;
use poorwill_replay::cases::Case;
use poorwill_replay::page::{self, PageTrace};
use poorwill_replay::{Card, Claim, Run, Setup, Trace, replay_each};

use self::args::ClaimArg;
pub(crate) use self::args::ReplayArgs;
use self::report::{ReplayReport, Replayed};
use poorwill_local::failure::Failure;
use poorwill_local::files;
use poorwill_local::progress::Progress;

const CARD: ByteSize = ByteSize::gib(80);
const TAKEN: ByteSize = ByteSize::gib(1);
/// More than any device has; larger sizes would only be mistakes.
const CARD_MAX: ByteSize = ByteSize::gib(1 << 20);
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
    let card = card(args, trace, known_card)?;
    let mut notes = Vec::new();
    let setups = setups(args, trace, known_setups, case.is_some(), &mut notes)?;
    if args.card.is_none() && known_card.or(trace.card).is_none() {
        notes.push(format!("the card is assumed to have {CARD}; say --card"));
    }
    if args.taken.is_none() && trace.card.is_some() && known_taken(args, trace.card).is_none() {
        notes.push(format!("others are assumed to have {TAKEN} of this card; say --taken"));
    }
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
    Ok(Claim { name: claim.name.clone(), bytes: claim.bytes.0, from_step, to_step: usize::MAX })
}

/// As asked for, else as recorded.
fn card(args: &ReplayArgs, trace: &Trace, known: Option<Card>) -> Result<Card, Failure> {
    let known = known.or(trace.card);
    let total = args.card.map_or_else(|| known.map_or(CARD.0, |card| card.total_bytes), |size| size.0);
    let taken = args.taken.map_or_else(|| known_taken(args, known).unwrap_or(TAKEN.0), |size| size.0);
    let budget_bytes = args.budget.map(|size| size.0).or(known.and_then(|card| card.budget_bytes));
    let card = Card { total_bytes: total, taken_bytes: taken, budget_bytes };
    if total > CARD_MAX.0 {
        return Err(Failure::new(format!("no card has {}; {CARD_MAX} are the most", ByteSize(total))));
    }
    if budget_bytes == Some(0) {
        return Err(Failure::new(
            "a budget of nothing holds nothing; say a --budget, or none for all of the card",
        ));
    }
    if card.usable_bytes() == 0 {
        let (total, taken) = (ByteSize(total), ByteSize(taken));
        return Err(Failure::new(format!(
            "nothing is left: of a card of {total}, others have {taken}; say --taken"
        )));
    }
    Ok(card)
}

/// What others had of one card says nothing of another.
fn known_taken(args: &ReplayArgs, known: Option<Card>) -> Option<u64> {
    let is_same = |card: &Card| args.card.is_none_or(|size| size.0 == card.total_bytes);
    known.filter(is_same).map(|card| card.taken_bytes)
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
