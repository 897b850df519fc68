//! A group, its coordinators, the network between them, and what is checked.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use poorwill_core::decision::look;
use poorwill_core::{Decision, DecisionError, Verdict};
use serde_json::Value;

use super::super::protocol::{Coordinator, GroupOp, Heard, Next, Participant, RankState, Refusal};
use super::super::rank::RankOutcome;
use super::register::SimulatedRegister;

/// In virtual milliseconds.
type Ms = u64;

/// What ails messages, files and processes ends here.
const FAULTS_END: Ms = 4_000;
const LOOK_MS: Ms = 20;
const OPERATION_MS_MAX: Ms = 6;
const RETRY_MS: Ms = 20;
const WITHIN_MS: Ms = 300;

/// A mistake in the protocol, which the checks must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Defect {
    /// A rank undoes after its time without asking the decision.
    UndoesAlone,
    /// A coordinator commits when the first rank is staged.
    CommitsEarly,
    /// The last proposal is the verdict.
    LastVerdictWins,
    /// A coordinator removes the decision as soon as it is made.
    RemovesEarly,
    /// As before, and what was removed counts as undecided.
    RemovalForgets,
    /// A rank takes part in a decision that is made already.
    JoinsLate,
}

impl Defect {
    pub(super) const ALL: [Self; 6] = [
        Self::UndoesAlone,
        Self::CommitsEarly,
        Self::LastVerdictWins,
        Self::RemovesEarly,
        Self::RemovalForgets,
        Self::JoinsLate,
    ];

    /// What the checks say of it.
    pub(super) fn words(self) -> &'static [&'static str] {
        match self {
            Self::UndoesAlone | Self::LastVerdictWins | Self::RemovalForgets => &["half", "differ", "said"],
            Self::CommitsEarly => &["never staged"],
            Self::RemovesEarly => &["undecided"],
            Self::JoinsLate => &["differ", "twice", "undecided"],
        }
    }
}

/// What became of a rank in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Staged,
    Through,
    Undone,
}

/// A rank or, by round, a coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Rank(usize),
    Coordinator(usize),
}

#[derive(Debug, Clone)]
enum Happening {
    Begin,
    TimeIsUp { step: u32 },
    Write(Verdict),
    Written(Result<Verdict, DecisionError>),
    Hear { rank: usize, heard: Heard },
    AskStage { round: usize },
    AskDecided { round: usize },
    HungUp { round: usize },
    Staged { is_able: bool },
    Look { turn: u32 },
    Looked { turn: u32, is_overdue: bool, result: Result<Option<Verdict>, DecisionError> },
    Abandon { round: usize, verdict: Verdict },
    Stop { for_ms: Ms },
    Continue { since: Ms },
    Kill,
    Heal,
}

#[derive(Debug, Default)]
struct Process {
    is_dead: bool,
    is_stopped: bool,
    /// Arrived while it was stopped.
    deferred: Vec<Happening>,
}

#[derive(Debug, Default)]
struct SimulatedRank {
    participant: Participant,
    round: usize,
    turn: u32,
    deadline: Ms,
    /// How late it may be, for looks that failed and for stops.
    excuse_ms: Ms,
    is_asleep: bool,
    asked: BTreeSet<usize>,
    fates: BTreeMap<usize, Fate>,
}

#[derive(Debug)]
struct SimulatedCoordinator {
    op: GroupOp,
    register: SimulatedRegister,
    machine: Option<Coordinator>,
    step: u32,
    is_proposing: bool,
    gives_up: Ms,
    /// What it said at its end.
    said: Option<Option<Verdict>>,
}

/// How often something happened in all schedules.
#[derive(Debug, Default)]
pub(super) struct Seen {
    counts: BTreeMap<String, u64>,
}

impl Seen {
    fn count(&mut self, what: String) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// The schedules reach every state, with every fault in it.
    pub(super) fn assert_complete(&self) {
        let states = ["rank Idle", "rank Staging", "rank Staged"];
        let steps = ["coordinator hearing", "coordinator proposing", "coordinator asking"];
        let struck = states.into_iter().chain(steps);
        let faults = struck.flat_map(|state| [format!("{state} killed"), format!("{state} stopped")]);
        let ends = ["all done", "all undone", "commit unconfirmed", "undo unconfirmed", "not known"];
        let others =
            ["64 ranks", "busy", "late", "lost", "late message", "doubled", "register failed", "abandoned"];
        for what in faults.chain(ends.into_iter().chain(others).map(str::to_owned)) {
            let count = self.counts.get(&what).copied().unwrap_or(0);
            assert!(count > 10, "{what}: {count} of {:#?}", self.counts);
        }
    }
}

#[derive(Debug)]
pub(super) struct World {
    now: Ms,
    queued: u64,
    queue: BTreeMap<(Ms, u64), (Who, Happening)>,
    rng: Rng,
    defect: Option<Defect>,
    undo_after_ms: Ms,
    lost: f64,
    doubled: f64,
    late: f64,
    unable: f64,
    processes: BTreeMap<Who, Process>,
    ranks: Vec<SimulatedRank>,
    coordinators: Vec<SimulatedCoordinator>,
    violation: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, defect: Option<Defect>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let size = match rng.u32(0..16) {
            0 => 64,
            1 => rng.usize(9..64),
            2 => 1,
            _ => rng.usize(2..9),
        };
        let mut chance = |most: f64| [0.0, most / 10.0, most][rng.usize(0..3)];
        let (lost, doubled, late) = (chance(0.1), chance(0.1), chance(0.2));
        let (unable, failing) = (chance(0.1), chance(0.5));
        let rounds = rng.usize(1..5);
        let mut world = Self {
            now: 0,
            queued: 0,
            queue: BTreeMap::new(),
            defect,
            undo_after_ms: [WITHIN_MS, WITHIN_MS, 60][rng.usize(0..3)],
            lost,
            doubled,
            late,
            unable,
            processes: BTreeMap::new(),
            ranks: (0..size).map(|_| SimulatedRank::default()).collect(),
            coordinators: Vec::new(),
            violation: None,
            rng,
        };
        let who = (0..size).map(Who::Rank).chain((0..rounds).map(Who::Coordinator));
        world.processes = who.map(|who| (who, Process::default())).collect();
        let begins = world.begin_rounds(rounds, failing);
        world.push_faults(begins);
        world
    }

    /// Coordinators, one after the other; returns when another could begin.
    fn begin_rounds(&mut self, rounds: usize, failing: f64) -> Ms {
        let (mut begins, overlapping) = (0, self.rng.bool());
        for round in 0..rounds {
            let op = if round % 2 == 0 { GroupOp::Sleep } else { GroupOp::Wake };
            let is = |wanted| self.defect == Some(wanted);
            let (wins, forgets) = (is(Defect::LastVerdictWins), is(Defect::RemovalForgets));
            let register = SimulatedRegister::new(self.rng.fork(), failing, wins, forgets);
            self.coordinators.push(SimulatedCoordinator {
                op,
                register,
                machine: None,
                step: 0,
                is_proposing: false,
                gives_up: 0,
                said: None,
            });
            self.push(begins, Who::Coordinator(round), Happening::Begin);
            begins += if overlapping { self.rng.u64(0..200) } else { self.rng.u64(200..1_000) };
        }
        begins
    }

    fn push_faults(&mut self, begins: Ms) {
        for _ in 0..[0, 1, 2, 4][self.rng.usize(0..4)] {
            let who = self.any();
            let at = self.rng.u64(0..begins + 400).min(FAULTS_END);
            let event = match self.rng.u32(0..3) {
                0 => Happening::Kill,
                _ => Happening::Stop { for_ms: self.rng.u64(1..1_500) },
            };
            self.push(at, who, event);
        }
        self.push(FAULTS_END, Who::Coordinator(0), Happening::Heal);
    }

    fn any(&mut self) -> Who {
        if self.rng.u32(0..3) == 0 {
            Who::Coordinator(self.rng.usize(0..self.coordinators.len()))
        } else {
            Who::Rank(self.rng.usize(0..self.ranks.len()))
        }
    }

    fn push(&mut self, at: Ms, who: Who, event: Happening) {
        self.queued += 1;
        self.queue.insert((at, self.queued), (who, event));
    }

    fn push_soon(&mut self, who: Who, event: Happening) {
        let at = self.now + self.rng.u64(0..OPERATION_MS_MAX);
        self.push(at, who, event);
    }

    /// What the network does to a message.
    fn send(&mut self, to: Who, event: &Happening, seen: &mut Seen) {
        let are_faults = self.now < FAULTS_END;
        let mut happens = |chance: f64| are_faults && self.rng.f64() < chance;
        if happens(self.lost) {
            return seen.count("lost".into());
        }
        let copies = if happens(self.doubled) { 2 } else { 1 };
        if copies == 2 {
            seen.count("doubled".into());
        }
        for _ in 0..copies {
            let is_late = are_faults && self.rng.f64() < self.late;
            if is_late {
                seen.count("late message".into());
            }
            let at = self.now + self.rng.u64(1..if is_late { 2_000 } else { 12 });
            self.push(at, to, event.clone());
        }
    }

    pub(super) fn run(mut self, seen: &mut Seen) -> Result<(), String> {
        if self.ranks.len() == 64 {
            seen.count("64 ranks".into());
        }
        while let Some(((at, _), (who, event))) = self.queue.pop_first() {
            self.now = at;
            if at > 20 * FAULTS_END {
                self.violate("it goes on for ever, undecided".into());
            }
            self.happen(who, event, seen);
            if let Some(violation) = self.violation.take() {
                return Err(violation);
            }
        }
        self.check_end()
    }

    fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    fn process(&mut self, who: Who) -> &mut Process {
        self.processes.entry(who).or_default()
    }

    fn happen(&mut self, who: Who, event: Happening, seen: &mut Seen) {
        match event {
            Happening::Heal => return self.heal(),
            Happening::Kill => return self.kill(who, seen),
            Happening::Continue { since } => {
                let stopped_ms = self.now - since;
                let process = self.process(who);
                process.is_stopped = false;
                let deferred = std::mem::take(&mut process.deferred);
                if let Who::Rank(rank) = who {
                    self.ranks[rank].excuse_ms += stopped_ms;
                }
                deferred.into_iter().for_each(|event| self.push(self.now, who, event));
                return;
            }
            _ => {}
        }
        let process = self.process(who);
        if process.is_dead {
            return;
        }
        if process.is_stopped {
            return process.deferred.push(event);
        }
        if let Happening::Stop { for_ms } = event {
            process.is_stopped = true;
            let standing = self.standing(who);
            seen.count(format!("{standing} stopped"));
            return self.push(self.now + for_ms, who, Happening::Continue { since: self.now });
        }
        match who {
            Who::Rank(rank) => self.happen_to_rank(rank, event, seen),
            Who::Coordinator(round) => self.happen_to_coordinator(round, event, seen),
        }
    }

    fn standing(&self, who: Who) -> String {
        match who {
            Who::Rank(rank) => format!("rank {:?}", self.ranks[rank].participant.state()),
            Who::Coordinator(round) => {
                let coordinator = &self.coordinators[round];
                let at = match (&coordinator.machine, coordinator.is_proposing, coordinator.step) {
                    (None, ..) => "idle",
                    (_, true, _) => "proposing",
                    (_, _, 1) => "hearing",
                    _ => "asking",
                };
                format!("coordinator {at}")
            }
        }
    }

    fn heal(&mut self) {
        self.coordinators.iter().for_each(|coordinator| coordinator.register.heal());
    }

    fn kill(&mut self, who: Who, seen: &mut Seen) {
        if self.process(who).is_dead {
            return;
        }
        self.process(who).is_dead = true;
        let standing = self.standing(who);
        seen.count(format!("{standing} killed"));
        match who {
            Who::Rank(rank) => {
                for round in 0..self.coordinators.len() {
                    let heard = Heard::Lost("it hung up".into());
                    self.send(Who::Coordinator(round), &Happening::Hear { rank, heard }, seen);
                }
            }
            Who::Coordinator(round) => {
                for rank in 0..self.ranks.len() {
                    self.send(Who::Rank(rank), &Happening::HungUp { round }, seen);
                }
            }
        }
    }

    fn happen_to_rank(&mut self, rank: usize, event: Happening, seen: &mut Seen) {
        match event {
            Happening::AskStage { round } => self.begin(rank, round, seen),
            Happening::Staged { is_able } => self.stage(rank, is_able, seen),
            Happening::Look { turn } if turn == self.ranks[rank].turn => {
                let own = &self.ranks[rank];
                let is_overdue = self.now >= own.deadline;
                let result = look(&self.coordinators[own.round].register, is_overdue);
                if is_overdue && self.defect == Some(Defect::UndoesAlone) {
                    return self.end(rank, Verdict::Undo, seen);
                }
                self.push_soon(Who::Rank(rank), Happening::Looked { turn, is_overdue, result });
            }
            Happening::Looked { turn, is_overdue, result } if turn == self.ranks[rank].turn => {
                match result {
                    Ok(Some(verdict)) => return self.end(rank, verdict, seen),
                    Ok(None) if is_overdue => {
                        self.violate(format!("rank {rank} is undecided after its last look"));
                    }
                    Ok(None) => {}
                    Err(_) => {
                        seen.count("register failed".into());
                        self.ranks[rank].excuse_ms += LOOK_MS + OPERATION_MS_MAX;
                    }
                }
                self.push(self.now + LOOK_MS, Who::Rank(rank), Happening::Look { turn });
            }
            Happening::AskDecided { round } => self.answer(rank, round, seen),
            Happening::HungUp { round } => {
                if let Some(verdict) = self.ranks[rank].participant.abandoned(&round.to_string()) {
                    seen.count("abandoned".into());
                    self.push_soon(Who::Rank(rank), Happening::Abandon { round, verdict });
                }
            }
            Happening::Abandon { round, verdict } => drop(self.coordinators[round].register.decide(verdict)),
            _ => {}
        }
    }

    fn say(&mut self, rank: usize, round: usize, heard: Heard, seen: &mut Seen) {
        self.send(Who::Coordinator(round), &Happening::Hear { rank, heard }, seen);
    }

    fn begin(&mut self, rank: usize, round: usize, seen: &mut Seen) {
        let coordinator = &self.coordinators[round];
        let found = match coordinator.register.verdict() {
            Ok(found) => found.filter(|_| self.defect != Some(Defect::JoinsLate)),
            Err(error) => return self.say(rank, round, Heard::Refused(error.to_string()), seen),
        };
        let own = &mut self.ranks[rank];
        if let Err(refusal) = own.participant.begin(coordinator.op, &round.to_string(), found) {
            let words = refusal.to_string();
            seen.count(if words.contains("busy") { "busy" } else { "late" }.into());
            let heard = match refusal {
                Refusal::Late(Verdict::Undo) => Heard::Ended(RankOutcome::Undone { why: words }),
                _ => Heard::Refused(words),
            };
            return self.say(rank, round, heard, seen);
        }
        own.round = round;
        let is_able = self.now >= FAULTS_END || self.rng.f64() >= self.unable;
        let at = self.now + self.rng.u64(1..100);
        self.push(at, Who::Rank(rank), Happening::Staged { is_able });
    }

    fn stage(&mut self, rank: usize, is_able: bool, seen: &mut Seen) {
        let round = self.ranks[rank].round;
        if !is_able {
            let _ = self.coordinators[round].register.decide(Verdict::Undo);
            let outcome = RankOutcome::Failed { why: "no memory".into() };
            self.ranks[rank].participant.end(outcome.clone());
            if self.ranks[rank].asked.remove(&round) {
                self.say(rank, round, Heard::Ended(outcome), seen);
            }
            return self.say(rank, round, Heard::Refused("no memory".into()), seen);
        }
        let own = &mut self.ranks[rank];
        own.participant.stage();
        own.turn += 1;
        (own.deadline, own.excuse_ms) = (self.now + self.undo_after_ms, 0);
        let turn = own.turn;
        if own.fates.insert(round, Fate::Staged) == Some(Fate::Through) {
            self.violate(format!("rank {rank} takes part in round {round} twice"));
        }
        self.push_soon(Who::Rank(rank), Happening::Look { turn });
        self.say(rank, round, Heard::Staged, seen);
    }

    fn end(&mut self, rank: usize, verdict: Verdict, seen: &mut Seen) {
        let round = self.ranks[rank].round;
        let op = self.coordinators[round].op;
        let own = &mut self.ranks[rank];
        let latest = own.deadline + LOOK_MS + 2 * OPERATION_MS_MAX + own.excuse_ms;
        let is_too_late = self.now > latest;
        let (fate, outcome) = match verdict {
            Verdict::Commit => {
                own.is_asleep = op == GroupOp::Sleep;
                (Fate::Through, RankOutcome::Done { report: Value::Null })
            }
            Verdict::Undo => (Fate::Undone, RankOutcome::Undone { why: "undone".into() }),
        };
        own.fates.insert(round, fate);
        own.participant.end(outcome.clone());
        let is_asked = own.asked.remove(&round);
        if is_too_late {
            self.violate(format!("rank {rank} is undecided until {}, and {latest} is the latest", self.now));
        }
        if fate == Fate::Through
            && let Some(missing) = self.ranks.iter().position(|other| !other.fates.contains_key(&round))
        {
            self.violate(format!("round {round} is committed, and rank {missing} was never staged"));
        }
        if is_asked {
            self.say(rank, round, Heard::Ended(outcome), seen);
        }
    }

    fn answer(&mut self, rank: usize, round: usize, seen: &mut Seen) {
        let heard = match self.ranks[rank].participant.outcome(&round.to_string()) {
            Ok(Some(outcome)) => Heard::Ended(outcome.clone()),
            Ok(None) => {
                self.ranks[rank].asked.insert(round);
                return;
            }
            Err(refusal) => Heard::Stranger(refusal.to_string()),
        };
        self.say(rank, round, heard, seen);
    }

    fn happen_to_coordinator(&mut self, round: usize, event: Happening, seen: &mut Seen) {
        let size = self.ranks.len();
        let own = &mut self.coordinators[round];
        match event {
            Happening::Begin => {
                (own.machine, own.step) = (Some(Coordinator::new(size)), 1);
                for rank in 0..size {
                    self.send(Who::Rank(rank), &Happening::AskStage { round }, seen);
                }
                self.push(self.now + WITHIN_MS, Who::Coordinator(round), Happening::TimeIsUp { step: 1 });
            }
            Happening::Write(verdict) => {
                let written = own.register.decide(verdict);
                self.push_soon(Who::Coordinator(round), Happening::Written(written));
            }
            Happening::Written(written) => {
                let gives_up = self.now >= own.gives_up;
                own.is_proposing = false;
                let Some(machine) = &mut own.machine else { return };
                let next = match written {
                    Ok(verdict) => machine.decided(Ok(verdict)),
                    Err(_) if gives_up => machine.time_is_up(),
                    Err(error) => machine.decided(Err(error.to_string())),
                };
                self.go_on(round, next, seen);
            }
            Happening::TimeIsUp { step } if own.step == step && !own.is_proposing => {
                let Some(machine) = &mut own.machine else { return };
                let next = machine.time_is_up();
                self.go_on(round, next, seen);
            }
            Happening::Hear { rank, heard } => {
                let is_first = heard == Heard::Staged && own.step == 1 && !own.is_proposing;
                let Some(machine) = &mut own.machine else { return };
                let mut next = machine.hear(rank, heard);
                if is_first && self.defect == Some(Defect::CommitsEarly) {
                    next = Next::Propose(Verdict::Commit);
                }
                self.go_on(round, next, seen);
            }
            _ => {}
        }
    }

    fn go_on(&mut self, round: usize, next: Next, seen: &mut Seen) {
        let own = &mut self.coordinators[round];
        match next {
            Next::Wait => {}
            Next::Propose(verdict) => {
                if own.gives_up == 0 {
                    own.gives_up = self.now + WITHIN_MS;
                }
                own.is_proposing = true;
                let at = self.now + self.rng.u64(0..RETRY_MS);
                self.push(at, Who::Coordinator(round), Happening::Write(verdict));
            }
            Next::Ask => {
                own.step = 2;
                if matches!(self.defect, Some(Defect::RemovesEarly | Defect::RemovalForgets)) {
                    own.register.remove();
                }
                let open = |rank: &usize| own.machine.as_ref().is_some_and(|machine| machine.is_open(*rank));
                let open: Vec<usize> = (0..self.ranks.len()).filter(open).collect();
                for rank in open {
                    self.send(Who::Rank(rank), &Happening::AskDecided { round }, seen);
                }
                self.push(self.now + WITHIN_MS, Who::Coordinator(round), Happening::TimeIsUp { step: 2 });
                let next = self.coordinators[round].machine.as_mut().map(Coordinator::next);
                self.go_on(round, next.unwrap_or(Next::Wait), seen);
            }
            Next::Finish => self.finish(round, seen),
        }
    }

    fn finish(&mut self, round: usize, seen: &mut Seen) {
        let own = &mut self.coordinators[round];
        let Some(machine) = own.machine.take() else { return };
        let (verdict, is_confirmed) = match machine.finish() {
            Ok(reports) => {
                let is_through = |rank: &SimulatedRank| rank.fates.get(&round) == Some(&Fate::Through);
                if reports.len() != self.ranks.len() || !self.ranks.iter().all(is_through) {
                    let count = reports.len();
                    self.violate(format!(
                        "round {round} was said to be done by {count} ranks, and is not by all"
                    ));
                }
                (Some(Verdict::Commit), true)
            }
            Err(finding) => (finding.verdict, finding.is_settled),
        };
        seen.count(
            match (verdict, is_confirmed) {
                (Some(Verdict::Commit), true) => "all done",
                (Some(Verdict::Commit), false) => "commit unconfirmed",
                (Some(Verdict::Undo), true) => "all undone",
                (Some(Verdict::Undo), false) => "undo unconfirmed",
                (None, _) => "not known",
            }
            .into(),
        );
        let own = &mut self.coordinators[round];
        own.said = Some(verdict);
        if is_confirmed {
            own.register.remove();
        }
    }

    /// All is at rest.
    fn check_end(&self) -> Result<(), String> {
        let live = |rank: &usize| !self.processes[&Who::Rank(*rank)].is_dead;
        for rank in (0..self.ranks.len()).filter(live) {
            let state = self.ranks[rank].participant.state();
            if state != RankState::Idle {
                return Err(format!("rank {rank} is undecided at the end: {state:?}"));
            }
        }
        for (round, coordinator) in self.coordinators.iter().enumerate() {
            let has = |fate: Fate| self.ranks.iter().position(|rank| rank.fates.get(&round) == Some(&fate));
            let (through, undone) = (has(Fate::Through), has(Fate::Undone));
            if let (Some(through), Some(undone)) = (through, undone) {
                return Err(format!("round {round} is half done: by rank {through}, and not by {undone}"));
            }
            let is_denied = match coordinator.said {
                Some(Some(Verdict::Commit)) => undone.is_some(),
                Some(Some(Verdict::Undo)) => through.is_some(),
                Some(None) | None => false,
            };
            if is_denied {
                return Err(format!("round {round} was said to be {:?}, and is not", coordinator.said));
            }
        }
        let asleep: BTreeSet<bool> =
            (0..self.ranks.len()).filter(live).map(|rank| self.ranks[rank].is_asleep).collect();
        if asleep.len() > 1 { Err("live ranks differ in whether they sleep".into()) } else { Ok(()) }
    }
}
