//! `poorwill replay`: what recorded allocations would need.

use std::fs;
use std::path::Path;

use poorwill::{ByteSize, chain};
use poorwill_replay::allocators::Kind;
use poorwill_replay::answer::{Answer, answer};
use poorwill_replay::cases::Case;
use poorwill_replay::page::{self, PageOptions};
use poorwill_replay::{Card, ReplayError, Run, Setup, Trace, TraceError, read, replay};
use serde::Serialize;

use crate::args::ReplayArgs;
use crate::failure::{Failure, Outcome};
use crate::show;

const CARD: ByteSize = ByteSize::gib(80);
const TAKEN: ByteSize = ByteSize::gib(1);
const PICTURE: (u32, u32) = (960, 420);

/// What was replayed.
#[derive(Debug, Serialize)]
pub(crate) struct ReplayReport {
    pub(crate) traces: Vec<Replayed>,
    #[serde(skip)]
    mismatch: Option<String>,
}

/// One trace on one card.
#[derive(Debug, Serialize)]
pub(crate) struct Replayed {
    pub(crate) name: String,
    pub(crate) steps: usize,
    pub(crate) total_bytes: u64,
    pub(crate) usable_bytes: u64,
    #[serde(flatten)]
    pub(crate) answer: Answer,
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Self {
        Self::new(chain(&error))
    }
}

impl From<TraceError> for Failure {
    fn from(error: TraceError) -> Self {
        Self::new(chain(&error))
    }
}

pub(crate) fn run(args: &ReplayArgs) -> Result<ReplayReport, Failure> {
    let case = match &args.case {
        Some(name) => Case::of(name)?,
        None => None,
    };
    let mut traces = Vec::new();
    for file in &args.files {
        let bytes = fs::read(file).map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
        let read = read::read(&file.display().to_string(), &bytes);
        traces.extend(read.map_err(|error| Failure::new(chain(&error)))?);
    }
    let (recorded, known_card, known_setups) = match &case {
        Some(case) => (std::slice::from_ref(&case.trace), Some(case.card), case.setups),
        None => (&*traces, None, &Setup::ALL[..]),
    };
    if (args.html.is_some() || args.svg.is_some()) && recorded.len() != 1 {
        let names: Vec<&str> = recorded.iter().map(|trace| &*trace.name).collect();
        return Err(Failure::new(format!(
            "a page and a picture show one trace, and there are {}: {}; name one file with one device",
            names.len(),
            names.join(", ")
        )));
    }
    let mut report = ReplayReport { traces: Vec::new(), mismatch: None };
    for trace in recorded {
        let card = card(args, trace, known_card)?;
        let setups = setups(args, trace, known_setups, case.is_some())?;
        let runs = setups.iter().map(|setup| replay(trace, setup, card)).collect::<Result<Vec<Run>, _>>()?;
        let mut answer = answer(trace, &runs)?;
        if let Some(case) = &case {
            answer.notes.push(format!("the report: {}", case.reported));
            answer.notes.extend(case.guessed.iter().map(|guess| format!("guessed: {guess}")));
        }
        if let Some(path) = &args.html {
            let options = PageOptions { answer: answer.sentence.clone(), ..PageOptions::default() };
            written(path, &page::page(trace, &runs, &options)?)?;
        }
        if let Some(path) = &args.svg {
            written(path, &page::svg(trace, &runs, PICTURE.0, PICTURE.1))?;
        }
        if !answer.fits {
            report.mismatch = Some(format!("`{}` does not fit", trace.name));
        }
        report.traces.push(Replayed {
            name: trace.name.clone(),
            steps: trace.steps.len(),
            total_bytes: card.total_bytes,
            usable_bytes: card.usable_bytes(),
            answer,
        });
    }
    Ok(report)
}

/// As asked for, else as recorded.
fn card(args: &ReplayArgs, trace: &Trace, known: Option<Card>) -> Result<Card, Failure> {
    let known = known.or(trace.card);
    let total = args.card.map_or_else(|| known.map_or(CARD.0, |card| card.total_bytes), |size| size.0);
    let taken = args.taken.map_or_else(|| known.map_or(TAKEN.0, |card| card.taken_bytes), |size| size.0);
    let budget_bytes = args.budget.map(|size| size.0).or(known.and_then(|card| card.budget_bytes));
    let card = Card { total_bytes: total, taken_bytes: taken, budget_bytes };
    if card.usable_bytes() == 0 {
        let (total, taken) = (ByteSize(total), ByteSize(taken));
        return Err(Failure::new(format!("nothing is left: of a card of {total}, others have {taken}")));
    }
    Ok(card)
}

/// As asked for, else what was recorded, and usual ones beside it.
fn setups(args: &ReplayArgs, trace: &Trace, known: &[&str], is_case: bool) -> Result<Vec<Setup>, Failure> {
    if !args.setup.is_empty() {
        return Ok(args.setup.clone());
    }
    let failed = |error: poorwill_replay::ParseSetupError| Failure::new(error.to_string());
    let mut setups = Vec::new();
    if !is_case {
        setups.push(match &trace.recorded {
            Some(recorded) => Setup::of_pytorch(&recorded.settings).map_err(failed)?.0,
            None => Setup::of(Kind::PyTorch),
        });
    }
    for text in known {
        let setup = text.parse::<Setup>().map_err(failed)?;
        if !setups.contains(&setup) {
            setups.push(setup);
        }
    }
    Ok(setups)
}

fn written(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}

impl Outcome for ReplayReport {
    const MISMATCH: &'static str = "it does not fit";

    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        show::replay(&self.traces)
    }
}
