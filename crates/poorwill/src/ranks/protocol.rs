//! The protocol of a group, without sockets, files or clocks: what is heard, and what follows from it.
//!
//! The truth is the [decision](poorwill_core::decision); messages only make it faster. So any of them may be lost.
//!
//! Promises: a coordinator proposes to commit only after each rank has said, once, that it is staged. A rank takes part in
//! one decision at a time, and in none that was made before.

use std::fmt;

use poorwill_core::Verdict;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rank::RankOutcome;

/// What the group does.
///
/// ```
/// use poorwill::ranks::GroupOp;
///
/// assert_eq!(GroupOp::Wake.to_string(), "wake");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOp {
    /// It sleeps.
    Sleep,
    /// It wakes.
    Wake,
}

impl fmt::Display for GroupOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sleep => "sleep",
            Self::Wake => "wake",
        })
    }
}

/// Where a rank stands.
///
/// ```
/// use poorwill::ranks::RankState;
///
/// assert_eq!(serde_json::to_value(RankState::Staged).unwrap(), "staged");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankState {
    /// It takes part in nothing.
    Idle,
    /// It does what can fail.
    Staging,
    /// It waits for the verdict, or carries it out.
    Staged,
}

/// Why a rank takes no part.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("it is busy with a {op} of another call ({decision}); try again when that has ended")]
    Busy { op: GroupOp, decision: String },
    #[error("the request is late: its decision is made already, to {0}")]
    Late(Verdict),
    #[error("it takes no part in the decision {0}")]
    Stranger(String),
}

/// A rank's side.
#[derive(Debug, Default)]
pub(super) struct Participant {
    turn: Option<Turn>,
}

#[derive(Debug)]
struct Turn {
    op: GroupOp,
    decision: String,
    at: At,
}

#[derive(Debug)]
enum At {
    Staging,
    Staged,
    Ended(RankOutcome),
}

impl Participant {
    /// A coordinator asks to stage. `found` is the verdict that is there.
    pub(super) fn begin(
        &mut self,
        op: GroupOp,
        decision: &str,
        found: Option<Verdict>,
    ) -> Result<(), Refusal> {
        if let Some(turn) = &self.turn
            && !matches!(turn.at, At::Ended(_))
        {
            return Err(Refusal::Busy { op: turn.op, decision: turn.decision.clone() });
        }
        // To commit is decided after this rank has said that it is staged: the request is a copy of that one.
        if let Some(verdict) = found {
            return Err(Refusal::Late(verdict));
        }
        self.turn = Some(Turn { op, decision: decision.to_owned(), at: At::Staging });
        Ok(())
    }

    /// All that can fail is done.
    pub(super) fn stage(&mut self) {
        if let Some(turn) = &mut self.turn
            && matches!(turn.at, At::Staging)
        {
            turn.at = At::Staged;
        }
    }

    /// It has failed to stage, or has carried the verdict out.
    pub(super) fn end(&mut self, outcome: RankOutcome) {
        if let Some(turn) = &mut self.turn {
            turn.at = At::Ended(outcome);
        }
    }

    /// What it proposes when the coordinator that asked for this decision is gone.
    pub(super) fn abandoned(&self, decision: &str) -> Option<Verdict> {
        let turn = self.turn.as_ref().filter(|turn| turn.decision == decision)?;
        (!matches!(turn.at, At::Ended(_))).then_some(Verdict::Undo)
    }

    /// What became of this decision; `None`: nothing yet.
    pub(super) fn outcome(&self, decision: &str) -> Result<Option<&RankOutcome>, Refusal> {
        match &self.turn {
            Some(Turn { decision: own, at, .. }) if own == decision => Ok(match at {
                At::Ended(outcome) => Some(outcome),
                At::Staging | At::Staged => None,
            }),
            _ => Err(Refusal::Stranger(decision.to_owned())),
        }
    }

    pub(super) fn state(&self) -> RankState {
        match self.turn.as_ref().map(|turn| &turn.at) {
            None | Some(At::Ended(_)) => RankState::Idle,
            Some(At::Staging) => RankState::Staging,
            Some(At::Staged) => RankState::Staged,
        }
    }
}

/// What a coordinator hears of a rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Heard {
    Staged,
    /// It could not stage, and has changed nothing.
    Refused(String),
    /// The verdict is carried out.
    Ended(RankOutcome),
    /// It was asked what became of it, and takes no part.
    Stranger(String),
    /// It hung up, or its answer counts for nothing.
    Lost(String),
}

/// What a coordinator does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Hears on, until its time is up.
    Wait,
    /// Proposes this to the decision, again if that fails.
    Propose(Verdict),
    /// Asks each [open](Coordinator::is_open) rank what became of it.
    Ask,
    /// It has heard all that it will.
    Finish,
}

/// The coordinator's side.
#[derive(Debug)]
pub(super) struct Coordinator {
    ranks: Vec<RankRecord>,
    proposed: Option<Verdict>,
    verdict: Option<Verdict>,
    problem: Option<String>,
    is_asking: bool,
}

#[derive(Debug, Clone, Default)]
struct RankRecord {
    at: RankAt,
    complaint: Option<String>,
}

#[derive(Debug, Clone, Default)]
enum RankAt {
    #[default]
    Staging,
    Staged,
    /// Open until it says so again, now that there is a verdict: it takes no part from then on.
    Refused,
    Unchanged,
    Lost,
    Ended(RankOutcome),
}

impl RankRecord {
    fn is_open(&self) -> bool {
        matches!(self.at, RankAt::Staging | RankAt::Staged | RankAt::Refused)
    }

    fn complain(&mut self, words: impl Into<String>) {
        self.complaint.get_or_insert(words.into());
    }

    fn hear(&mut self, heard: Heard, is_asking: bool) {
        match (&self.at, heard) {
            (RankAt::Unchanged | RankAt::Lost | RankAt::Ended(_), _) => {}
            (RankAt::Staging, Heard::Staged) => self.at = RankAt::Staged,
            (RankAt::Staging, Heard::Refused(why)) => {
                self.at = RankAt::Refused;
                self.complain(why);
            }
            // It heard before that the group undoes it.
            (RankAt::Staging, Heard::Ended(RankOutcome::Undone { .. })) if !is_asking => {
                self.at = RankAt::Refused;
            }
            // It has said why.
            (RankAt::Refused, Heard::Stranger(_)) if is_asking => self.at = RankAt::Unchanged,
            (RankAt::Staging, Heard::Stranger(why)) if is_asking => {
                self.at = RankAt::Unchanged;
                self.complain(why);
            }
            (_, Heard::Lost(why) | Heard::Stranger(why)) => {
                self.at = RankAt::Lost;
                self.complain(why);
            }
            (_, Heard::Ended(outcome)) if is_asking => {
                if let RankOutcome::Failed { why } = &outcome {
                    self.complain(why.as_str());
                }
                self.at = RankAt::Ended(outcome);
            }
            (_, heard) => {
                self.at = RankAt::Lost;
                self.complain(match heard {
                    Heard::Staged => "it said twice that it is staged".to_owned(),
                    other => format!("it answered out of turn: {other:?}"),
                });
            }
        }
    }
}

impl Coordinator {
    pub(super) fn new(ranks: usize) -> Self {
        let ranks = vec![RankRecord::default(); ranks];
        Self { ranks, proposed: None, verdict: None, problem: None, is_asking: false }
    }

    pub(super) fn hear(&mut self, rank: usize, heard: Heard) -> Next {
        let is_asking = self.is_asking;
        if let Some(record) = self.ranks.get_mut(rank) {
            record.hear(heard, is_asking);
        }
        self.next()
    }

    /// The time of the step is up: of staging, of reaching the decision, or of answering.
    pub(super) fn time_is_up(&mut self) -> Next {
        let (words, closes) = match (self.is_asking, self.proposed) {
            (true, _) => ("it did not say in time what became of it", true),
            (false, None) => ("it was not staged in time", false),
            (false, Some(_)) => {
                self.is_asking = true;
                return Next::Ask;
            }
        };
        for record in &mut self.ranks {
            if closes && record.is_open() || matches!(record.at, RankAt::Staging) {
                record.complain(words);
                if closes {
                    record.at = RankAt::Lost;
                }
            }
        }
        if closes { Next::Finish } else { self.propose(Verdict::Undo) }
    }

    /// The decision was asked.
    pub(super) fn decided(&mut self, answer: Result<Verdict, String>) -> Next {
        match answer {
            Ok(verdict) => {
                (self.verdict, self.problem, self.is_asking) = (Some(verdict), None, true);
                Next::Ask
            }
            Err(problem) => {
                self.problem = Some(problem);
                self.proposed.map_or_else(|| self.next(), Next::Propose)
            }
        }
    }

    /// What follows from all that was heard.
    pub(super) fn next(&mut self) -> Next {
        if self.is_asking {
            return if self.ranks.iter().any(RankRecord::is_open) { Next::Wait } else { Next::Finish };
        }
        let is = |wanted: fn(&RankAt) -> bool| move |record: &RankRecord| wanted(&record.at);
        if self.proposed.is_some() {
            Next::Wait
        } else if self.ranks.iter().any(is(|at| matches!(at, RankAt::Refused | RankAt::Lost))) {
            self.propose(Verdict::Undo)
        } else if self.ranks.iter().all(is(|at| matches!(at, RankAt::Staged))) {
            self.propose(Verdict::Commit)
        } else {
            Next::Wait
        }
    }

    /// Whether this rank is still to say what became of it.
    pub(super) fn is_open(&self, rank: usize) -> bool {
        self.ranks.get(rank).is_some_and(RankRecord::is_open)
    }

    fn propose(&mut self, verdict: Verdict) -> Next {
        self.proposed = Some(verdict);
        Next::Propose(verdict)
    }

    /// The reports by rank, or what failed.
    pub(super) fn finish(self) -> Result<Vec<Value>, Finding> {
        let (verdict, is_decided) = (self.verdict(), self.verdict.is_some());
        let (complaints, unconfirmed) = (Vec::new(), Vec::new());
        let mut finding =
            Finding { verdict, problem: self.problem, complaints, unconfirmed, is_settled: false };
        let (mut reports, mut undone) = (Vec::new(), Vec::new());
        for (rank, record) in self.ranks.into_iter().enumerate() {
            match record.at {
                RankAt::Ended(RankOutcome::Done { report }) => reports.push(report),
                RankAt::Ended(RankOutcome::Undone { why }) => undone.push((rank, why)),
                RankAt::Ended(RankOutcome::Failed { .. }) | RankAt::Unchanged => {}
                RankAt::Staging | RankAt::Staged | RankAt::Refused | RankAt::Lost => {
                    finding.unconfirmed.push(rank);
                }
            }
            finding.complaints.extend(record.complaint.map(|words| (rank, words)));
        }
        // That the others undid it is no complaint, unless nothing else says why.
        if verdict != Some(Verdict::Undo) || finding.complaints.is_empty() {
            finding.complaints.append(&mut undone);
        }
        finding.is_settled = is_decided && finding.unconfirmed.is_empty();
        if finding.is_settled && finding.complaints.is_empty() && verdict == Some(Verdict::Commit) {
            Ok(reports)
        } else {
            Err(finding)
        }
    }

    /// As the decision says, or what became of the ranks.
    fn verdict(&self) -> Option<Verdict> {
        let of_rank = |record: &RankRecord| match record.at {
            RankAt::Ended(RankOutcome::Done { .. }) => Some(Verdict::Commit),
            RankAt::Ended(RankOutcome::Undone { .. }) => Some(Verdict::Undo),
            _ => None,
        };
        self.verdict.or_else(|| self.ranks.iter().find_map(of_rank))
    }
}

/// Why a group did not do it, and where that leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// `None`: not known.
    pub(super) verdict: Option<Verdict>,
    /// Why it is not.
    pub(super) problem: Option<String>,
    /// By rank.
    pub(super) complaints: Vec<(usize, String)>,
    /// Ranks that have not said that they carried it out.
    pub(super) unconfirmed: Vec<usize>,
    /// No rank will look at the decision again.
    pub(super) is_settled: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> Heard {
        Heard::Ended(RankOutcome::Done { report: Value::Null })
    }

    fn undone() -> Heard {
        Heard::Ended(RankOutcome::Undone { why: "undone".into() })
    }

    #[test]
    fn all_are_staged_before_it_commits() {
        let mut coordinator = Coordinator::new(2);
        assert_eq!(coordinator.hear(1, Heard::Staged), Next::Wait);
        assert_eq!(coordinator.hear(7, Heard::Staged), Next::Wait, "there is no such rank");
        assert_eq!(coordinator.hear(0, Heard::Staged), Next::Propose(Verdict::Commit));
        assert_eq!(coordinator.decided(Err("it fails".into())), Next::Propose(Verdict::Commit));
        assert_eq!(coordinator.decided(Ok(Verdict::Commit)), Next::Ask);
        assert_eq!([coordinator.hear(0, done()), coordinator.hear(1, done())], [Next::Wait, Next::Finish]);
        assert_eq!(coordinator.finish(), Ok(vec![Value::Null; 2]));
    }

    #[test]
    fn what_hinders_one_undoes_all() {
        let refused = || Heard::Refused("no memory".into());
        for (hindrance, words) in [
            (vec![refused()], "no memory"),
            (vec![Heard::Lost("it hung up".into())], "it hung up"),
            (vec![Heard::Staged, Heard::Staged], "it said twice that it is staged"),
            (vec![done()], "it answered out of turn"),
        ] {
            let mut coordinator = Coordinator::new(2);
            let next = hindrance.into_iter().map(|heard| coordinator.hear(0, heard)).last();
            assert_eq!(next, Some(Next::Propose(Verdict::Undo)), "{words}");
            assert_eq!(coordinator.hear(1, Heard::Staged), Next::Wait);
            assert_eq!(coordinator.decided(Ok(Verdict::Undo)), Next::Ask);
            coordinator.hear(0, Heard::Stranger("it takes no part".into()));
            assert_eq!(coordinator.hear(1, undone()), Next::Finish);
            let finding = coordinator.finish().unwrap_err();
            assert_eq!(finding.verdict, Some(Verdict::Undo));
            let [(0, complaint)] = &finding.complaints[..] else { panic!("{finding:?}") };
            assert!(complaint.starts_with(words), "{complaint}");
            assert_eq!(finding.is_settled, words == "no memory", "the others have not confirmed it");
        }
    }

    #[test]
    fn time_ends_each_step() {
        let mut coordinator = Coordinator::new(2);
        coordinator.hear(0, Heard::Staged);
        assert_eq!(coordinator.time_is_up(), Next::Propose(Verdict::Undo));
        assert_eq!(coordinator.decided(Err("it fails".into())), Next::Propose(Verdict::Undo));
        assert_eq!(coordinator.time_is_up(), Next::Ask);
        assert_eq!(coordinator.hear(0, undone()), Next::Wait);
        assert_eq!(coordinator.time_is_up(), Next::Finish);
        let finding = coordinator.finish().unwrap_err();
        assert_eq!(finding.complaints, [(1, "it was not staged in time".to_owned())]);
        // By what became of the first rank.
        assert_eq!((finding.verdict, &finding.unconfirmed[..]), (Some(Verdict::Undo), &[1][..]));
        assert!(!finding.is_settled && finding.problem.as_deref() == Some("it fails"));
    }

    #[test]
    fn a_rank_takes_part_in_one_decision_at_a_time() {
        let mut rank = Participant::default();
        assert_eq!(
            rank.begin(GroupOp::Sleep, "a", Some(Verdict::Commit)),
            Err(Refusal::Late(Verdict::Commit))
        );
        rank.begin(GroupOp::Sleep, "a", None).unwrap();
        assert_eq!((rank.state(), rank.abandoned("a")), (RankState::Staging, Some(Verdict::Undo)));
        for other in ["a", "b"] {
            let busy = Refusal::Busy { op: GroupOp::Sleep, decision: "a".into() };
            assert_eq!(rank.begin(GroupOp::Wake, other, None), Err(busy));
        }
        rank.stage();
        assert_eq!((rank.state(), rank.outcome("a")), (RankState::Staged, Ok(None)));
        assert_eq!(rank.abandoned("b"), None);
        rank.end(RankOutcome::Undone { why: "so".into() });
        assert_eq!((rank.state(), rank.abandoned("a")), (RankState::Idle, None));
        assert!(matches!(rank.outcome("a"), Ok(Some(RankOutcome::Undone { .. }))));
        assert_eq!(rank.outcome("b"), Err(Refusal::Stranger("b".into())));
    }
}
