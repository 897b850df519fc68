//! A rank's side: a socket on which a coordinator asks it to sleep or wake.
//!
//! Promise: a bad request is answered with what is wrong, and changes nothing. When the coordinator hangs up, the rank
//! proposes to undo at once, and does what the decision says.

use std::fmt;
use std::io::Write;
use std::mem::forget;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use poorwill_core::{Decision, Level, PoolError, SleepRequest, Verdict, WakeRequest, chain};

use super::config::GroupConfig;
use super::decision::FileDecision;
use super::error::RanksError;
use super::line::{LineError, Lines};
use super::message::{Answer, Call, REQUEST_BYTES_MAX, RankStatus, StageCall, read, write};
use super::place::RankPlace;
use super::protocol::{GroupOp, Participant, RankState, Refusal};
use super::rank::{Rank, RankOutcome, StageError, StagedRank};

/// For one more, the oldest outside the turn is hung up on.
const CALLERS_MAX: usize = 32;

/// A pause after a connection that could not be accepted, as with too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Longest time without a verdict that a request may ask for. Decisions of ended coordinators are removed then.
const UNDO_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Serves one rank of a group until it is dropped.
///
/// Dropping it proposes to undo what is staged, and waits for what is being staged.
///
/// ```
/// use poorwill::ranks::{Group, GroupConfig, GroupSleep, RankServer};
/// use poorwill::{AllocRequest, Arena, Config, Level, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().to_owned();
/// let config = GroupConfig::new("job", 1)?.in_folder(folder);
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// arena.alloc(&AllocRequest::new(2 << 20, Tag::weights()))?;
/// let server = RankServer::start(&config, 0, arena)?; // In each rank.
/// let reports = Group::open(&config)?.sleep(&GroupSleep::all(Level::One))?; // In any process.
/// assert_eq!(reports[0]["released_bytes"], 2 << 20);
/// # Ok(())
/// # }
/// ```
pub struct RankServer {
    serving: Arc<Serving>,
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
    pid: u32,
    /// Free for another process once all else has ended.
    place: RankPlace,
}

struct Serving {
    config: GroupConfig,
    rank: u32,
    does: Box<dyn Rank>,
    state: Mutex<ServingState>,
    changed: Condvar,
}

#[derive(Default)]
struct ServingState {
    participant: Participant,
    /// Of its turn.
    decision: Option<Arc<FileDecision>>,
    /// The oldest first.
    callers: Vec<Caller>,
    callers_ever: u64,
    is_closing: bool,
}

struct Caller {
    id: u64,
    stream: UnixStream,
    /// As of its session.
    staged: Option<Arc<FileDecision>>,
}

/// What one caller asks, one call after the other.
struct Session {
    caller: u64,
    /// The decision that it has staged last.
    staged: Option<Arc<FileDecision>>,
}

impl RankServer {
    /// Serves this rank in the background.
    ///
    /// # Errors
    /// `Taken`: another process or this one serves it already. `Rank`, `PathTooLong`, `Folder` and `Serve`.
    pub fn start(config: &GroupConfig, rank: u32, does: impl Rank + 'static) -> Result<Self, RanksError> {
        let place = RankPlace::take(config, rank)?;
        let listener = Arc::new(place.listen()?);
        let (state, changed) = Default::default();
        let serving = Serving { config: config.clone(), rank, does: Box::new(does), state, changed };
        let serving = Arc::new(serving);
        let (accepting, accepted) = (Arc::clone(&serving), Arc::clone(&listener));
        let thread =
            thread::Builder::new().name("poorwill-rank".into()).spawn(move || accepting.accept(&accepted));
        let thread = thread.map_err(|source| RanksError::Serve {
            action: "start a thread for",
            path: place.socket().to_owned(),
            source,
        })?;
        Ok(Self { serving, listener, thread: Some(thread), pid: std::process::id(), place })
    }

    /// Where the rank stands.
    #[must_use]
    pub fn status(&self) -> RankStatus {
        self.serving.status()
    }

    /// Where it serves.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.place.socket()
    }
}

impl fmt::Debug for RankServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankServer").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Drop for RankServer {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            forget(self.thread.take()); // It is not here.
            return;
        }
        self.serving.close();
        // Ends the wait for the next caller.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Serving {
    fn lock(&self) -> MutexGuard<'_, ServingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers each caller on a thread of its own, until the server is dropped.
    fn accept(self: Arc<Self>, listener: &UnixListener) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        loop {
            let accepted = listener.accept();
            if self.lock().is_closing {
                break;
            }
            threads.retain(|thread| !thread.is_finished());
            match accepted {
                Ok((caller, _)) => threads.extend(self.begin(caller)),
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Without a thread the caller sees that its connection ends.
    fn begin(self: &Arc<Self>, caller: UnixStream) -> Option<JoinHandle<()>> {
        let id = {
            let mut state = self.lock();
            if state.is_closing {
                // A later caller would hold up the end.
                return None;
            }
            if state.callers.len() >= CALLERS_MAX {
                state.hang_up_on_oldest();
            }
            state.callers_ever += 1;
            let id = state.callers_ever;
            state.callers.push(Caller { id, stream: caller.try_clone().ok()?, staged: None });
            id
        };
        self.changed.notify_all();
        let serving = Arc::clone(self);
        let started = thread::Builder::new().name("poorwill-rank-call".into()).spawn(move || {
            serving.serve(&caller, id);
            serving.forget_caller(id);
        });
        if started.is_err() {
            self.forget_caller(id);
        }
        started.ok()
    }

    fn forget_caller(&self, id: u64) {
        self.lock().callers.retain(|caller| caller.id != id);
    }

    fn close(&self) {
        let mut state = self.lock();
        state.is_closing = true;
        for caller in &state.callers {
            let _ = caller.stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn serve(self: &Arc<Self>, caller: &UnixStream, id: u64) {
        let mut session = Session { caller: id, staged: None };
        let mut lines = Lines::new(REQUEST_BYTES_MAX);
        loop {
            let (answer, is_last) = match lines.next(&mut &*caller) {
                Ok(None) => break,
                Ok(Some(line)) => {
                    let answer = read(&line).map_or_else(refused, |call| self.answer(call, &mut session));
                    (answer, false)
                }
                // The next line cannot be found.
                Err(error @ LineError::TooLong { .. }) => (refused(format!("the request is {error}")), true),
                Err(LineError::Torn | LineError::Io(_)) => break,
            };
            if send(caller, &answer).is_err() || is_last {
                break;
            }
        }
        if let Some(decision) = session.staged {
            self.abandon(&decision);
        }
    }

    fn answer(self: &Arc<Self>, call: Call, session: &mut Session) -> Answer {
        match call {
            Call::Status => Answer::Status(self.status()),
            Call::Sleep { level, stage } => {
                let level = match level {
                    1 => Level::One,
                    2 => Level::Two,
                    other => return refused(format!("level {other}: a sleep has level 1 or 2")),
                };
                self.stage(GroupOp::Sleep, &stage, session, |wait_max, decision, undo_after| {
                    let mut request = SleepRequest::all(level).choosing(stage.tags()?);
                    request.wait_max = wait_max;
                    self.does.stage_sleep(&request, decision, undo_after)
                })
            }
            Call::Wake { stage } => {
                self.stage(GroupOp::Wake, &stage, session, |wait_max, decision, undo_after| {
                    let mut request = WakeRequest::all().choosing(stage.tags()?);
                    request.wait_max = wait_max;
                    self.does.stage_wake(&request, decision, undo_after)
                })
            }
            Call::Decided { decision } => self.outcome(&decision, session.caller),
        }
    }

    fn stage(
        self: &Arc<Self>,
        op: GroupOp,
        call: &StageCall,
        session: &mut Session,
        stage: impl FnOnce(
            Option<Duration>,
            Arc<dyn Decision>,
            Duration,
        ) -> Result<Box<dyn StagedRank>, StageError>,
    ) -> Answer {
        let times = (|| {
            let wait_max = call.wait_s.map(|wait_s| duration("wait_s", wait_s)).transpose()?;
            Ok::<_, String>((wait_max, duration("undo_after_s", call.undo_after_s)?))
        })();
        let (wait_max, undo_after) = match times {
            Ok(times) => times,
            Err(why) => return refused(why),
        };
        let decision = match FileDecision::open(&call.decision) {
            Ok(decision) => Arc::new(decision),
            Err(error) => return refused(chain(&error)),
        };
        if let Err(answer) = self.begin_turn(op, &decision, session.caller) {
            return answer;
        }
        session.staged = Some(Arc::clone(&decision));
        let register: Arc<dyn Decision> = Arc::clone(&decision) as _;
        let made = catch_unwind(AssertUnwindSafe(|| stage(wait_max, register, undo_after)));
        let made = made.unwrap_or_else(|_| Err("it panicked; its process has the message".into()));
        let followed = made.and_then(|made| self.follow(made));
        match followed {
            Ok(()) => Answer::Staged,
            Err(error) => {
                let why = chain(&*error);
                // The others need not wait for this one.
                let _ = decision.decide(Verdict::Undo);
                match error.downcast_ref() {
                    Some(PoolError::Undone { .. }) => {
                        let outcome = RankOutcome::Undone { why };
                        self.end(outcome.clone());
                        Answer::Ended(outcome)
                    }
                    _ => {
                        self.end(RankOutcome::Failed { why: why.clone() });
                        refused(why)
                    }
                }
            }
        }
    }

    fn begin_turn(&self, op: GroupOp, decision: &Arc<FileDecision>, caller: u64) -> Result<(), Answer> {
        let mut state = self.lock();
        // Read under the lock, so that no other turn ends in between.
        let found = decision.verdict().map_err(|error| refused(error.to_string()))?;
        let begun = state.participant.begin(op, &id_of(decision.path()), found);
        begun.map_err(|refusal| match refusal {
            Refusal::Late(Verdict::Undo) => Answer::Ended(RankOutcome::Undone { why: refusal.to_string() }),
            _ => refused(refusal.to_string()),
        })?;
        state.decision = Some(Arc::clone(decision));
        let caller = state.callers.iter_mut().find(|known| known.id == caller);
        caller.into_iter().for_each(|known| known.staged = Some(Arc::clone(decision)));
        Ok(())
    }

    /// Waits in the background for what becomes of it.
    fn follow(self: &Arc<Self>, staged: Box<dyn StagedRank>) -> Result<(), StageError> {
        self.lock().participant.stage();
        let serving = Arc::clone(self);
        let wait = move || {
            let panicked = |_| RankOutcome::Failed { why: "it panicked; its process has the message".into() };
            serving.end(catch_unwind(AssertUnwindSafe(|| staged.wait())).unwrap_or_else(panicked));
        };
        // Where no thread starts, what is staged is dropped, and so undone.
        thread::Builder::new().name("poorwill-rank-outcome".into()).spawn(wait).map(drop)?;
        Ok(())
    }

    fn end(&self, outcome: RankOutcome) {
        self.lock().participant.end(outcome);
        self.changed.notify_all();
    }

    fn outcome(&self, decision: &Path, caller: u64) -> Answer {
        let mut state = self.lock();
        loop {
            match state.participant.outcome(&id_of(decision)) {
                Err(refusal) => return refused(refusal.to_string()),
                Ok(Some(outcome)) => return Answer::Ended(outcome.clone()),
                Ok(None) if state.is_closing => return refused("the rank stops serving"),
                Ok(None) if state.callers.iter().all(|known| known.id != caller) => {
                    return refused("the caller gave way to another");
                }
                Ok(None) => {}
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The coordinator that asked for this is gone.
    fn abandon(&self, decision: &FileDecision) {
        let proposal = self.lock().participant.abandoned(&id_of(decision.path()));
        if let Some(verdict) = proposal {
            // If it fails, the rank proposes it again after its time.
            let _ = decision.decide(verdict);
        }
    }

    fn status(&self) -> RankStatus {
        let state = self.lock();
        let is_in_turn = state.participant.state() != RankState::Idle;
        let decision = state.decision.as_ref().filter(|_| is_in_turn);
        RankStatus {
            group: self.config.name().to_owned(),
            rank: self.rank,
            world_size: self.config.world_size(),
            pid: std::process::id(),
            state: state.participant.state(),
            problem: decision.and_then(|decision| decision.verdict().err()).map(|error| error.to_string()),
        }
    }
}

impl ServingState {
    /// First of those that have staged nothing, then of those whose turn is over.
    fn hang_up_on_oldest(&mut self) {
        let has_staged_nothing = |caller: &Caller| caller.staged.is_none();
        let oldest = self.callers.iter().position(has_staged_nothing);
        // One turn at a time: there is another.
        let oldest = oldest.or_else(|| self.callers.iter().position(|caller| !self.is_in_turn(caller)));
        if let Some(oldest) = oldest {
            let _ = self.callers.remove(oldest).stream.shutdown(Shutdown::Both);
        }
    }

    /// Whether what it has staged waits for its verdict, or is carried out.
    fn is_in_turn(&self, caller: &Caller) -> bool {
        let is_same = |(staged, decision): (&Arc<_>, &Arc<_>)| Arc::ptr_eq(staged, decision);
        self.participant.state() != RankState::Idle
            && caller.staged.as_ref().zip(self.decision.as_ref()).is_some_and(is_same)
    }
}

fn send(mut caller: &UnixStream, answer: &Answer) -> Result<(), String> {
    let mut line = write(answer)?;
    line.push(b'\n');
    caller.write_all(&line).map_err(|error| error.to_string())
}

fn refused(why: impl Into<String>) -> Answer {
    Answer::Refused { why: why.into() }
}

fn id_of(decision: &Path) -> String {
    decision.to_string_lossy().into_owned()
}

fn duration(field: &str, seconds: f64) -> Result<Duration, String> {
    let duration = Duration::try_from_secs_f64(seconds).ok().filter(|duration| *duration <= UNDO_AFTER_MAX);
    let most_s = UNDO_AFTER_MAX.as_secs();
    duration.ok_or_else(|| format!("`{field}` is {seconds}: it can be from 0 to {most_s} seconds"))
}
