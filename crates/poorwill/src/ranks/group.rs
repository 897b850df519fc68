//! The coordinator's side: asks all ranks, decides, and says what became of each.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use poorwill_core::{Decision, Level, Tag, Verdict};
use serde_json::Value;

use super::config::GroupConfig;
use super::connection::Connection;
use super::decision::FileDecision;
use super::error::{GroupError, GroupState, RanksError};
use super::message::{Answer, Call, RankStatus, StageCall};
use super::protocol::{Coordinator, Finding, GroupOp, Heard, Next};
use crate::private_folder;

/// Within which a step of a call has to end.
const WITHIN: Duration = Duration::from_secs(120);

/// More is no wait, but a mistake.
const WITHIN_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Between two tries to reach a decision.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Between two looks whether a staged rank is still there.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// A group's sleep.
///
/// ```
/// use std::time::Duration;
///
/// use poorwill::ranks::GroupSleep;
/// use poorwill::{Level, Tag};
///
/// let request = GroupSleep::all(Level::One).choosing(vec![Tag::weights()]).within(Duration::from_secs(30));
/// assert_eq!(request.tags, Some(vec![Tag::weights()]));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupSleep {
    /// The level.
    pub level: Level,
    /// `None`: all.
    pub tags: Option<Vec<Tag>>,
    /// Longest wait of each rank before its sleep begins, as [`SleepRequest::wait_max`](crate::SleepRequest::wait_max).
    pub wait_max: Option<Duration>,
    /// Within which all have to be staged, and again within which all have to say what became of them.
    pub within: Duration,
}

impl GroupSleep {
    /// All tags, within two minutes.
    #[must_use]
    pub fn all(level: Level) -> Self {
        Self { level, tags: None, wait_max: None, within: WITHIN }
    }

    /// Sets [`Self::tags`].
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// Sets [`Self::wait_max`].
    #[must_use]
    pub fn waiting(mut self, wait_max: impl Into<Option<Duration>>) -> Self {
        self.wait_max = wait_max.into();
        self
    }

    /// Sets [`Self::within`].
    #[must_use]
    pub fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }
}

/// A group's wake.
///
/// ```
/// use poorwill::ranks::GroupWake;
///
/// assert_eq!(GroupWake::all().tags, None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupWake {
    /// `None`: all that sleep.
    pub tags: Option<Vec<Tag>>,
    /// Longest wait of each rank for memory, as [`WakeRequest::wait_max`](crate::WakeRequest::wait_max).
    pub wait_max: Option<Duration>,
    /// As [`GroupSleep::within`].
    pub within: Duration,
}

impl GroupWake {
    /// All sleeping tags, within two minutes.
    #[must_use]
    pub fn all() -> Self {
        Self { tags: None, wait_max: None, within: WITHIN }
    }

    /// Sets [`Self::tags`].
    #[must_use]
    pub fn choosing(mut self, tags: impl Into<Option<Vec<Tag>>>) -> Self {
        self.tags = tags.into();
        self
    }

    /// Sets [`Self::wait_max`].
    #[must_use]
    pub fn waiting(mut self, wait_max: impl Into<Option<Duration>>) -> Self {
        self.wait_max = wait_max.into();
        self
    }

    /// Sets [`Self::within`].
    #[must_use]
    pub fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }
}

impl Default for GroupWake {
    fn default() -> Self {
        Self::all()
    }
}

/// The coordinator of a group. Two that call at once refuse each other, and harm nothing.
///
/// [The module](crate::ranks) has an example.
///
/// ```
/// use poorwill::ranks::{Group, GroupConfig};
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().to_owned();
/// let group = Group::open(&GroupConfig::new("job-17", 2)?.in_folder(folder))?;
/// for (rank, status) in group.status(Duration::from_secs(5)).into_iter().enumerate() {
///     match status {
///         Ok(status) => println!("rank {rank}, process {}: {:?}", status.pid, status.state),
///         Err(why) => println!("rank {rank}: {why}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Group {
    config: GroupConfig,
}

impl Group {
    /// Opens a group, whose ranks may start later.
    ///
    /// # Errors
    /// `PathTooLong`; `Folder` that cannot be used.
    pub fn open(config: &GroupConfig) -> Result<Self, RanksError> {
        config.socket(config.world_size() - 1)?;
        let folder = config.folder();
        private_folder::make(&folder)
            .map_err(|(action, source)| RanksError::folder(action, &folder, source))?;
        Ok(Self { config: config.clone() })
    }

    /// Puts all ranks to sleep, or none. Returns their reports, by rank.
    ///
    /// # Errors
    /// `Group`, with each rank that failed and where the group is left. `Folder`, before anything is asked.
    pub fn sleep(&self, request: &GroupSleep) -> Result<Vec<Value>, RanksError> {
        let level = request.level.number();
        let stage = |stage| Call::Sleep { level, stage };
        self.call(GroupOp::Sleep, request.tags.as_deref(), request.wait_max, request.within, &stage)
    }

    /// Wakes all ranks, or none. Returns their reports, by rank.
    ///
    /// # Errors
    /// As [`Group::sleep`].
    pub fn wake(&self, request: &GroupWake) -> Result<Vec<Value>, RanksError> {
        let stage = |stage| Call::Wake { stage };
        self.call(GroupOp::Wake, request.tags.as_deref(), request.wait_max, request.within, &stage)
    }

    /// Where each rank stands, or why it does not say.
    #[must_use]
    pub fn status(&self, within: Duration) -> Vec<Result<RankStatus, String>> {
        let end = Instant::now() + within.min(WITHIN_MAX);
        self.side_by_side(|rank| Connection::open(&self.config, rank, end).map(|(_, status)| status))
    }

    fn side_by_side<T: Send>(&self, each: impl Fn(u32) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let each = &each;
            let threads: Vec<_> =
                (0..self.config.world_size()).map(|rank| scope.spawn(move || each(rank))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, T>| thread.join();
            threads
                .into_iter()
                .map(|thread| join(thread).unwrap_or_else(|it| std::panic::resume_unwind(it)))
                .collect()
        })
    }

    fn call(
        &self,
        op: GroupOp,
        tags: Option<&[Tag]>,
        wait_max: Option<Duration>,
        within: Duration,
        call: &dyn Fn(StageCall) -> Call,
    ) -> Result<Vec<Value>, RanksError> {
        let within = within.min(WITHIN_MAX);
        let end = Instant::now() + within;
        let opened = self.side_by_side(|rank| Connection::open(&self.config, rank, end));
        let connections = self.all_free(op, opened)?;
        let decision = FileDecision::create(Some(&self.config.folder()))?;
        let stage = call(StageCall {
            tags: tags.map(|tags| tags.iter().map(Tag::to_string).collect()),
            wait_s: wait_max.map(|wait_max| wait_max.as_secs_f64()),
            decision: decision.path().to_owned(),
            // Counted from when the rank is staged, so this coordinator's time is up first.
            undo_after_s: within.as_secs_f64(),
        });
        let step = Step { decision: &decision, stage: &stage, end, within };
        let finding = match step.run(connections) {
            Ok(reports) => {
                // What stays is removed later.
                let _ = decision.remove();
                return Ok(reports);
            }
            Err(finding) => finding,
        };
        if finding.is_settled {
            let _ = decision.remove();
        }
        Err(RanksError::Group(Box::new(self.error(op, finding))))
    }

    /// Nothing is staged before every rank has answered.
    fn all_free(
        &self,
        op: GroupOp,
        opened: Vec<Result<(Connection, RankStatus), String>>,
    ) -> Result<Vec<Connection>, RanksError> {
        let mut error = GroupError::of(op, self.config.name(), GroupState::Unchanged);
        let mut connections = Vec::new();
        for (rank, opened) in (0..).zip(opened) {
            match opened {
                Ok((connection, _)) => connections.push(connection),
                Err(why) => error.complaints.push((rank, why)),
            }
        }
        if error.complaints.is_empty() { Ok(connections) } else { Err(RanksError::Group(Box::new(error))) }
    }

    fn error(&self, op: GroupOp, finding: Finding) -> GroupError {
        let state = match finding.verdict {
            Some(Verdict::Undo) => GroupState::Unchanged,
            Some(Verdict::Commit) => GroupState::Done,
            None => GroupState::Unknown,
        };
        let number = |rank| u32::try_from(rank).unwrap_or(u32::MAX);
        let complaints = finding.complaints.into_iter().map(|(rank, words)| (number(rank), words)).collect();
        let unconfirmed = finding.unconfirmed.into_iter().map(number).collect();
        let of = GroupError::of(op, self.config.name(), state);
        GroupError { complaints, unconfirmed, problem: finding.problem, ..of }
    }
}

/// One sleep or wake of all ranks.
struct Step<'s> {
    decision: &'s FileDecision,
    stage: &'s Call,
    end: Instant,
    within: Duration,
}

impl Step<'_> {
    fn run(&self, connections: Vec<Connection>) -> Result<Vec<Value>, Finding> {
        let coordinator = Coordinator::new(connections.len());
        thread::scope(|scope| {
            let (heard, hears) = channel();
            let (mut asks, mut streams) = (Vec::new(), Vec::new());
            for (rank, connection) in connections.into_iter().enumerate() {
                streams.push(Arc::clone(connection.stream()));
                let (ask, asked) = channel();
                asks.push(ask);
                let heard = heard.clone();
                scope.spawn(move || self.talk(connection, rank, &heard, &asked));
            }
            drop(heard);
            let found = self.coordinate(coordinator, &hears, asks);
            // Ends the threads that still wait for an answer.
            streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
            found
        })
    }

    fn coordinate(
        &self,
        mut coordinator: Coordinator,
        hears: &Receiver<(usize, Heard)>,
        asks: Vec<Sender<Instant>>,
    ) -> Result<Vec<Value>, Finding> {
        let (mut end, mut next) = (self.end, coordinator.next());
        let mut asks = Some(asks);
        loop {
            next = match next {
                Next::Wait => match hears.recv_timeout(end.saturating_duration_since(Instant::now())) {
                    Ok((rank, heard)) => coordinator.hear(rank, heard),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        coordinator.time_is_up()
                    }
                },
                Next::Propose(verdict) => match self.decision.decide(verdict) {
                    Ok(verdict) => coordinator.decided(Ok(verdict)),
                    Err(_) if Instant::now() >= end + self.within => coordinator.time_is_up(),
                    Err(error) => {
                        thread::sleep(RETRY_PAUSE);
                        coordinator.decided(Err(error.to_string()))
                    }
                },
                Next::Ask => {
                    end = Instant::now() + self.within;
                    for (rank, ask) in asks.take().into_iter().flatten().enumerate() {
                        if coordinator.is_open(rank) {
                            // A rank that was lost hears nothing.
                            let _ = ask.send(end);
                        }
                    }
                    coordinator.next()
                }
                Next::Finish => return coordinator.finish(),
            };
        }
    }

    /// What one rank is asked, and what it says. Ends when the rank is lost, or no longer of interest.
    fn talk(
        &self,
        mut connection: Connection,
        rank: usize,
        heard: &Sender<(usize, Heard)>,
        asked: &Receiver<Instant>,
    ) {
        // A rank that is staged late is asked what became of it, too.
        let late = self.end + 2 * self.within;
        let staged = heard_of(connection.ask(self.stage, late));
        let is_lost = matches!(staged, Heard::Lost(_));
        if heard.send((rank, staged)).is_err() || is_lost {
            return;
        }
        let end = loop {
            match asked.recv_timeout(LOOK_PAUSE) {
                Ok(end) => break end,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(why) = connection.disturbance() {
                        let _ = heard.send((rank, Heard::Lost(why)));
                        return;
                    }
                }
            }
        };
        let decided = Call::Decided { decision: self.decision.path().to_owned() };
        let ended = match heard_of(connection.ask(&decided, end)) {
            Heard::Refused(why) => Heard::Stranger(why),
            heard => heard,
        };
        let _ = heard.send((rank, ended));
    }
}

fn heard_of(answer: Result<Answer, String>) -> Heard {
    match answer {
        Ok(Answer::Staged) => Heard::Staged,
        Ok(Answer::Ended(outcome)) => Heard::Ended(outcome),
        Ok(Answer::Refused { why }) => Heard::Refused(why),
        Ok(Answer::Status(_)) => Heard::Lost("it answered another question".into()),
        Err(why) => Heard::Lost(why),
    }
}
