//! `poorwill hibernate`: takes processes off their devices and puts them back, once or as a helper.

mod own;
mod serve;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use poorwill::hibernation::{
    HibernateError, HibernateReport, HibernateRequest, Hibernator, HibernatorOptions, ProcessInspection,
    ProcessState, Processes, Recovered, ResumeReport,
};
use serde::Serialize;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) use self::own::OwnHelper;
use crate::args::HibernateArgs;
use crate::failure::{self, Failure, Outcome};
use crate::show;

/// The folder of processes on the host device, for engines that are started without arguments of ours.
const HOST_PROCESSES: &str = "POORWILL_HOST_PROCESSES";

pub(crate) fn run(args: HibernateArgs) -> ExitCode {
    let options = options(args.processes, args.journal);
    if args.serve {
        return serve::run(&options);
    }
    let json = args.json;
    match once(&options) {
        Err(failure) => failure::finish(json, Err::<States, _>(failure)),
        Ok((hibernator, _signals)) if args.recover => failure::finish(json, failing(recover(&hibernator))),
        Ok((hibernator, _signals)) if args.resume => {
            failure::finish(json, failing(resume(&hibernator, &args.pids, args.without_space_check)))
        }
        Ok((hibernator, _signals)) if args.state => {
            failure::finish(json, failing(States::of(&hibernator, &args.pids)))
        }
        Ok((hibernator, _signals)) if args.inspect => {
            failure::finish(json, failing(Inspections::of(&hibernator, &args.pids)))
        }
        Ok((hibernator, _signals)) => {
            let host_max = args.host_max.map(|size| size.0);
            let request = request(args.wait_max, host_max, args.without_space_check)
                .with_suspended_communicators(args.suspended_communicators);
            failure::finish(json, failing(hibernator.hibernate(&args.pids, &request)))
        }
    }
}

fn request(wait_max: Duration, host_bytes_max: Option<u64>, without_space_check: bool) -> HibernateRequest {
    let request = HibernateRequest::within(wait_max).limited_to(host_bytes_max);
    if without_space_check { request.without_space_check() } else { request }
}

fn resume(
    hibernator: &Hibernator,
    pids: &[u32],
    without_space_check: bool,
) -> Result<ResumeReport, HibernateError> {
    if without_space_check { hibernator.resume_without_space_check(pids) } else { hibernator.resume(pids) }
}

fn options(processes: Option<PathBuf>, journal: Option<PathBuf>) -> HibernatorOptions {
    let folder = processes
        .or_else(|| std::env::var_os(HOST_PROCESSES).filter(|name| !name.is_empty()).map(PathBuf::from));
    let options = HibernatorOptions::of(folder.map_or(Processes::Cuda, Processes::Host));
    match journal {
        Some(journal) => options.remembering_in(journal),
        None => options,
    }
}

/// A command is not ended between two steps: it finishes what it has begun.
fn once(options: &HibernatorOptions) -> Result<(Hibernator, HeldSignals), Failure> {
    let signals = HeldSignals::new()?;
    let hibernator = Hibernator::open(options)?;
    warn_of_unreadable(&hibernator);
    Ok((hibernator, signals))
}

fn warn_of_unreadable(hibernator: &Hibernator) {
    for path in hibernator.unreadable_entries() {
        tracing::warn!("an entry of the journal is not understood, and was set aside: {}", path.display());
    }
}

fn recover(hibernator: &Hibernator) -> Result<RecoverOutcome, HibernateError> {
    Ok(RecoverOutcome { recovered: hibernator.recover()? })
}

fn failing<T>(result: Result<T, HibernateError>) -> Result<T, Failure> {
    result.map_err(Failure::from)
}

impl From<HibernateError> for Failure {
    fn from(error: HibernateError) -> Self {
        let failure = Self::new(poorwill::chain(&error));
        match serde_json::to_value(&error) {
            Ok(Value::Object(mut details)) => {
                details.remove("message");
                failure.with_details(details)
            }
            _ => failure,
        }
    }
}

/// SIGTERM and SIGINT, which from then on end nothing by themselves.
struct HeldSignals {
    runtime: Runtime,
    terminate: Signal,
    _interrupt: Signal,
}

impl HeldSignals {
    fn new() -> Result<Self, Failure> {
        let failed = |error| Failure::new(format!("cannot wait for signals: {error}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let inside = runtime.enter();
        let terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        drop(inside);
        Ok(Self { runtime, terminate, _interrupt: interrupt })
    }
}

/// Where processes stand.
#[derive(Debug, Serialize)]
pub(crate) struct States {
    pub(crate) processes: Vec<StateOf>,
}

#[derive(Debug, Serialize)]
pub(crate) struct StateOf {
    pub(crate) pid: u32,
    pub(crate) state: ProcessState,
}

impl States {
    fn of(hibernator: &Hibernator, pids: &[u32]) -> Result<Self, HibernateError> {
        let state = |&pid| hibernator.state(pid).map(|state| StateOf { pid, state });
        Ok(Self { processes: pids.iter().map(state).collect::<Result<_, _>>()? })
    }
}

/// What processes hold, and what they would take together.
#[derive(Debug, Serialize)]
pub(crate) struct Inspections {
    pub(crate) processes: Vec<InspectionOf>,
    pub(crate) host_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct InspectionOf {
    pub(crate) pid: u32,
    #[serde(flatten)]
    pub(crate) inspection: ProcessInspection,
    host_bytes: Option<u64>,
}

impl Inspections {
    fn of(hibernator: &Hibernator, pids: &[u32]) -> Result<Self, HibernateError> {
        let inspect = |&pid| {
            let inspection = hibernator.inspect(pid)?;
            Ok(InspectionOf { pid, host_bytes: inspection.host_bytes(), inspection })
        };
        let processes: Vec<_> = pids.iter().map(inspect).collect::<Result<_, HibernateError>>()?;
        let host_bytes =
            processes.iter().try_fold(0_u64, |sum, process| Some(sum.saturating_add(process.host_bytes?)));
        Ok(Self { processes, host_bytes })
    }
}

#[derive(Debug, Serialize)]
struct RecoverOutcome {
    recovered: Vec<Recovered>,
}

macro_rules! shown {
    ($($outcome:ty: $show:expr;)+) => {
        $(impl Outcome for $outcome {
            fn mismatch(&self) -> Option<&str> {
                None
            }

            fn text(&self) -> String {
                $show(self)
            }
        })+
    };
}

shown! {
    HibernateReport: show::hibernate::hibernated;
    ResumeReport: show::hibernate::resumed;
    States: show::hibernate::states;
    Inspections: show::hibernate::inspected;
    RecoverOutcome: |outcome: &Self| show::hibernate::recovered(&outcome.recovered);
}
