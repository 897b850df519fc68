//! Sets of processes whose steps fail and whose callers end, at each call.

use std::time::Duration;

use poorwill_core::hibernation::plan::{
    JournalEntry, ProcessKey, Recovered, Recovery, SetError, SetErrorCause, SetPhase, SetPlan, SetProcess,
};
use poorwill_core::hibernation::{CheckpointErrorKind, CheckpointStep, HeldMemory, Obstacle, ProcessState};
use poorwill_testkit::effort::{Effort, seed_of_this_run};
use poorwill_testkit::processes::{CallerFault, DEVICE, OTHERS_BYTES, Simulation};

use CheckpointStep::{Checkpoint, Lock, Restore, Unlock};
use ProcessState::{Checkpointed, Failed, Locked, Running};

const HELD_BYTES: u64 = 1 << 20;
/// What a restore needs beside.
const MARGIN_BYTES: u64 = 64 << 20;
const WAIT: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Off,
    Back,
}

struct Set {
    simulation: Simulation,
    processes: Vec<ProcessKey>,
    /// What the driver says that each holds.
    figure: Option<u64>,
}

impl Set {
    /// On their devices, or off them if the way is back.
    fn of(count: usize, way: Way) -> Self {
        Self::with(Some(HELD_BYTES), count, way)
    }

    /// Where the driver keeps no figures.
    fn without_figures(count: usize, way: Way) -> Self {
        Self::with(None, count, way)
    }

    fn with(figure: Option<u64>, count: usize, way: Way) -> Self {
        let simulation = Simulation::default();
        simulation.set_total_bytes(16 * HELD_BYTES + MARGIN_BYTES);
        let processes = (0..count).map(|_| simulation.start(HELD_BYTES)).collect();
        let set = Self { simulation, processes, figure };
        if way == Way::Back {
            set.go(Way::Off, CallerFault::Never).0.unwrap();
        }
        set
    }

    /// The result, how many calls were made, and whether the fault has ended the caller.
    fn go(&self, way: Way, fault: CallerFault) -> (Result<(), SetError>, u32, bool) {
        let (checkpointer, journal) = self.simulation.caller_with(fault);
        let plan = SetPlan::new(&checkpointer, &journal);
        let result = match way {
            Way::Off => {
                plan.inspect(&self.pids()).and_then(|_| plan.hibernate(&self.members(), WAIT)).map(drop)
            }
            Way::Back => plan.resume(&self.processes, &self.simulation.entries()).map(drop),
        };
        (result, checkpointer.calls(), checkpointer.is_killed())
    }

    /// Recovers all entries; the number of calls, and whether the fault has ended the caller.
    fn recover(&self, fault: CallerFault) -> (Vec<Recovered>, u32, bool) {
        let (checkpointer, journal) = self.simulation.caller_with(fault);
        let plan = SetPlan::new(&checkpointer, &journal);
        let recover = |entry: &JournalEntry| plan.recover(entry, |process| self.simulation.is_alive(process));
        let found =
            self.simulation.entries().iter().flat_map(|entry| recover(entry).unwrap_or_default()).collect();
        (found, checkpointer.calls(), checkpointer.is_killed())
    }

    /// As a caller has inspected them.
    fn members(&self) -> Vec<SetProcess> {
        let held = || vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes: self.figure }];
        self.processes.iter().map(|&key| SetProcess { key, held: held() }).collect()
    }

    fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(|process| process.pid).collect()
    }

    /// Of those that live.
    fn states(&self) -> Vec<ProcessState> {
        self.processes.iter().filter_map(|process| self.simulation.state(*process)).collect()
    }

    /// As [`Set::assert_whole`], once a recovery has forgotten an entry that could not be removed.
    fn assert_at_rest(&self, what: &str) {
        let states = self.states();
        self.recover(CallerFault::Never);
        assert_eq!(self.states(), states, "{what}: a recovery finds nothing to do");
        self.assert_whole(what);
    }

    /// All run and nothing is remembered, or all are off and can come back.
    fn assert_whole(&self, what: &str) {
        assert_eq!(self.simulation.unlocked_restores(), 0, "{what}: another may restore there, too");
        let states: Vec<_> = self.states().into_iter().filter(|state| *state != Failed).collect();
        let entries = self.simulation.entries();
        if states.iter().all(|state| *state == Running) {
            assert_eq!(entries, [], "{what}");
            return;
        }
        assert!(states.iter().all(|state| *state == Checkpointed), "{what}: {states:?}");
        assert!(
            matches!(&entries[..], [entry] if entry.phase == SetPhase::Hibernated),
            "{what}: {entries:?}"
        );
    }
}

/// Runs a plan with the n-th call as each of these faults, for each n.
fn at_each_call(
    way: Way,
    faults: &[fn(u32) -> CallerFault],
    check: impl Fn(&Set, Result<(), SetError>, &str),
) {
    for (count, figure) in (1..=3).flat_map(|count| [(count, Some(HELD_BYTES)), (count, None)]) {
        let calls = Set::with(figure, count, way).go(way, CallerFault::Never).1;
        assert!(calls > 3);
        for fault in faults {
            for n in 1..=calls {
                let set = Set::with(figure, count, way);
                let result = set.go(way, fault(n)).0;
                check(&set, result, &format!("{way:?} of {count} with {figure:?}, {:?}", fault(n)));
            }
        }
    }
}

fn steps_of(set: &Set) -> Vec<CheckpointStep> {
    set.simulation.steps().into_iter().map(|(step, _)| step).collect()
}

#[test]
fn all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked() {
    let set = Set::of(3, Way::Off);
    set.go(Way::Off, CallerFault::Never).0.unwrap();
    set.assert_whole("off");
    set.go(Way::Back, CallerFault::Never).0.unwrap();
    set.assert_whole("back");
    let each = |step| [step; 3];
    assert_eq!(steps_of(&set), [each(Lock), each(Checkpoint), each(Restore), each(Unlock)].concat());
}

#[test]
fn one_failure_brings_all_back() {
    at_each_call(Way::Off, &[CallerFault::Nth], |set, result, what| {
        let error = result.expect_err(what);
        assert_eq!(error.left, [], "{what}: {error}");
        assert!(set.states().iter().all(|state| *state == Running), "{what}");
        set.assert_whole(what);
    });
}

#[test]
fn what_is_not_known_keeps_no_process_from_coming_back_at_once() {
    for count in 1..=3 {
        let calls = Set::without_figures(count, Way::Off).go(Way::Off, CallerFault::Never).1;
        for fault in [CallerFault::Nth as fn(u32) -> CallerFault, CallerFault::JournalFrom] {
            for n in 1..=calls {
                for set in [Set::without_figures(count, Way::Off), Set::of(count, Way::Off)] {
                    let what = format!("{count}, {:?}, {:?}", fault(n), set.figure);
                    let (result, ..) = set.go(Way::Off, fault(n));
                    // The journal may not be needed any more.
                    let Err(error) = result else { continue };
                    assert_eq!(error.left, [], "{what}: {error}");
                    assert!(set.states().iter().all(|state| *state == Running), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_set_that_does_not_resume_can_be_resumed() {
    at_each_call(Way::Back, &[CallerFault::Nth], |set, result, what| {
        set.assert_at_rest(what);
        let off = set.states().contains(&Checkpointed);
        match result {
            Ok(()) => assert!(!off, "{what}"),
            Err(error) if error.to_string().starts_with("restore") => {
                assert!(off && error.left.len() == set.processes.len(), "{what}: {error}");
                set.go(Way::Back, CallerFault::Never).0.expect(what);
            }
            // Nothing had begun.
            Err(error) => assert!(off && error.left.is_empty(), "{what}: {error}"),
        }
    });
}

#[test]
fn what_has_lost_its_device_or_ended_is_named_and_the_rest_goes_on() {
    for way in [Way::Off, Way::Back] {
        at_each_call(way, &[CallerFault::Loses, CallerFault::Ends], |set, result, what| {
            set.assert_at_rest(what);
            let lost = set.states().contains(&Failed);
            match result {
                Ok(()) => assert!(!lost, "{what}"),
                Err(error) => {
                    let failed = error.left.iter().filter(|left| left.state == Some(Failed)).count();
                    assert_eq!(failed, usize::from(lost), "{what}: {error}");
                    assert!(!lost || error.to_string().contains("restart it"), "{what}: {error}");
                }
            }
        });
    }
}

#[test]
fn whenever_the_caller_ends_another_brings_its_set_to_rest() {
    for way in [Way::Off, Way::Back] {
        at_each_call(
            way,
            &[CallerFault::KilledBefore, CallerFault::KilledDuring, CallerFault::KilledAfter],
            |set, _, what| {
                let (found, ..) = set.recover(CallerFault::Never);
                set.assert_whole(what);
                for process in found {
                    let state = set.states()[set.pids().iter().position(|pid| *pid == process.pid).unwrap()];
                    assert_eq!(process.state, Some(state), "{what}");
                    let off = process.what == Recovery::Hibernating;
                    assert_eq!(off, state == Checkpointed, "{what}: {process}");
                }
                set.assert_at_rest(what);
                if set.states().contains(&Checkpointed) {
                    set.go(Way::Back, CallerFault::Never).0.expect(what);
                }
            },
        );
    }
}

#[test]
fn a_recovery_that_ends_is_gone_on_with() {
    let kills: [fn(u32) -> CallerFault; 3] =
        [CallerFault::KilledBefore, CallerFault::KilledDuring, CallerFault::KilledAfter];
    for way in [Way::Off, Way::Back] {
        at_each_call(way, &kills, |set, _, what| {
            // Each of these ends its caller later than the one before.
            for n in 1.. {
                let kill = kills[n as usize % kills.len()](n);
                if !set.recover(kill).2 {
                    break;
                }
            }
            set.assert_whole(what);
        });
    }
}

#[test]
fn whatever_fails_the_error_names_what_it_leaves() {
    let mut random = fastrand::Rng::with_seed(seed_of_this_run().unwrap_or(28));
    for _ in 0..Effort::of_this_run().cases(400) {
        let (way, count) = (if random.bool() { Way::Off } else { Way::Back }, random.usize(1..=5));
        let figure = Some(HELD_BYTES).filter(|_| random.bool());
        let set = Set::with(figure, count, way);
        let fault = match random.u32(0..2) {
            0 => CallerFault::Every(random.u32(1..8)),
            _ => {
                let step = |_| [Lock, Checkpoint, Restore, Unlock][random.usize(0..4)];
                let steps: Vec<_> = (0..3).map(step).collect();
                let pid = |random: &mut fastrand::Rng| set.processes[random.usize(0..count)].pid;
                CallerFault::Steps(steps.into_iter().map(|step| (step, pid(&mut random))).collect())
            }
        };
        let what = format!("{way:?} of {count} with {figure:?}, {fault:?}");
        let (result, ..) = set.go(way, fault);
        let before = if way == Way::Off { Running } else { Checkpointed };
        match result {
            Ok(()) => set.assert_at_rest(&what),
            Err(error) if error.left.is_empty() => {
                assert!(set.states().iter().all(|state| *state == before), "{what}: {error}");
                set.assert_at_rest(&what);
            }
            Err(error) => {
                for (process, state) in set.processes.iter().zip(set.states()) {
                    let left = error.left.iter().find(|left| left.pid == process.pid);
                    let named = left.map(|left| left.state);
                    let expected = (state != Running).then_some(Some(state));
                    assert!(named == expected || named == Some(None), "{what}: {process:?} {state}: {error}");
                }
            }
        }
        set.recover(CallerFault::Never);
        set.assert_whole(&what);
        if set.states().contains(&Checkpointed) && !set.states().contains(&Failed) {
            set.go(Way::Back, CallerFault::Never).0.expect(&what);
        }
    }
}

#[test]
fn a_part_that_cannot_come_back_takes_the_rest_along() {
    let set = Set::of(2, Way::Off);
    let [first, second] = [set.processes[0], set.processes[1]];
    // The second fails once more when it is to be checkpointed, so it runs.
    let steps = CallerFault::Steps(vec![(Checkpoint, second.pid), (Restore, first.pid)]);
    let error = set.go(Way::Off, steps).0.unwrap_err();
    assert_eq!(set.states(), [Checkpointed, Running], "none stays locked: {error}");
    assert_eq!(error.left.len(), 1);
    let (found, ..) = set.recover(CallerFault::Never);
    assert!(matches!(&found[..], [process] if process.what == Recovery::BroughtBack), "{found:?}");
    set.assert_whole("recovered");

    let set = Set::of(2, Way::Back);
    let stuck = CallerFault::Steps(vec![(Restore, set.processes[1].pid)]);
    let error = set.go(Way::Back, stuck).0.unwrap_err();
    assert_eq!((set.states(), error.left.len()), (vec![Checkpointed; 2], 2), "{error}");
    assert!(error.to_string().contains("make room") && error.to_string().contains("resume it"), "{error}");
    set.assert_whole("still off");
}

#[test]
fn what_hinders_is_found_before_anything_is_locked() {
    let set = Set::of(2, Way::Off);
    let pids = set.pids();
    let (checkpointer, journal) = set.simulation.caller();
    let plan = SetPlan::new(&checkpointer, &journal);
    let refused = |pids: &[u32], words: &[&str]| {
        let error = plan.inspect(pids).unwrap_err();
        for word in words {
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        assert_eq!((set.simulation.steps(), set.simulation.entries()), (vec![], vec![]));
        assert_eq!(error.left, []);
        error
    };
    refused(&[], &["name one"]);
    refused(&[pids[0], pids[1], pids[0]], &["twice"]);
    refused(&[pids[0], 4_000_000], &["4000000", "no such process"]);
    let obstacles = ["cuda:0 and cuda:1", "2 of 2 ranks"];
    set.simulation.hinder(
        set.processes[1],
        vec![Obstacle::PeerMapping(obstacles[0].into()), Obstacle::Communicator(obstacles[1].into())],
    );
    let error = refused(&pids, &[obstacles[0], obstacles[1], "nothing was changed"]);
    assert!(matches!(error.cause, SetErrorCause::Obstacles { pid, .. } if pid == pids[1]));
    let plan = plan.with_suspended_communicators(1);
    let error = plan.inspect(&pids).unwrap_err().to_string();
    assert!(error.contains(obstacles[0]) && !error.contains(obstacles[1]), "{error}");
    set.simulation
        .hinder(set.processes[1], ["one", "two"].map(|it| Obstacle::Communicator(it.into())).into());
    let error = plan.inspect(&pids).unwrap_err().to_string();
    assert!(error.contains("one") && error.contains("two"), "{error}");
    plan.with_suspended_communicators(2).inspect(&pids).unwrap();
    for (state, next) in [(Locked, "recover"), (Checkpointed, "resume"), (Failed, "restart")] {
        set.simulation.set_state(set.processes[0], state);
        let error = refused(&pids, &[state.as_str(), next]);
        let SetErrorCause::Process(error) = error.cause else { panic!("{error}") };
        assert!(matches!(error.kind, CheckpointErrorKind::WrongState { found, .. } if found == state));
    }
}

#[test]
fn a_process_that_another_program_has_locked_stays_so() {
    let set = Set::of(2, Way::Off);
    let (checkpointer, journal) = set.simulation.caller();
    let plan = SetPlan::new(&checkpointer, &journal);
    plan.inspect(&set.pids()).unwrap();
    set.simulation.set_state(set.processes[1], Locked);
    let error = plan.hibernate(&set.members(), WAIT).unwrap_err();
    assert_eq!((set.states(), &error.left), (vec![Running, Locked], &vec![]), "{error}");
    assert_eq!(set.simulation.entries(), []);
}

#[test]
fn only_what_hibernates_is_resumed() {
    let set = Set::of(2, Way::Back);
    set.simulation.set_state(set.processes[1], Running);
    let error = set.go(Way::Back, CallerFault::Never).0.unwrap_err();
    assert!(error.to_string().contains("nothing to resume"), "{error}");
    assert_eq!(set.states(), [Checkpointed, Running]);
}

#[test]
fn a_number_that_has_gone_to_another_process_is_not_taken_for_the_first() {
    let set = Set::of(1, Way::Off);
    set.go(Way::Off, CallerFault::KilledAfter(3)).0.unwrap_err();
    assert_eq!(set.states(), [Locked]);
    let later = set.simulation.reuse(set.processes[0]);
    set.simulation.set_state(later, Locked);
    assert_eq!(set.recover(CallerFault::Never).0, []);
    assert_eq!((set.simulation.state(later), set.simulation.entries()), (Some(Locked), vec![]));
}

#[test]
fn of_a_set_that_hibernates_those_that_have_ended_are_forgotten_last() {
    let set = Set::of(2, Way::Back);
    set.simulation.end(set.processes[0]);
    let (found, ..) = set.recover(CallerFault::Never);
    assert!(matches!(&found[..], [process] if process.what == Recovery::Hibernating), "{found:?}");
    set.simulation.end(set.processes[1]);
    assert_eq!((set.recover(CallerFault::Never).0, set.simulation.entries()), (vec![], vec![]));
}

#[test]
fn nothing_is_restored_that_its_device_has_no_space_for() {
    let set = Set::of(2, Way::Back);
    let needed = 2 * HELD_BYTES + MARGIN_BYTES;
    set.simulation.set_free_bytes(Some(needed - 1));
    let error = set.go(Way::Back, CallerFault::Never).0.unwrap_err();
    let SetErrorCause::DeviceMemory { needed_bytes, free_bytes, .. } = error.cause else { panic!("{error}") };
    assert_eq!((needed_bytes, free_bytes), (needed, needed - 1));
    set.assert_whole("refused");
    set.simulation.set_free_bytes(Some(needed));
    set.go(Way::Back, CallerFault::Never).0.unwrap();

    // Neither in a recovery, nor where a set is brought back: all of it goes off instead.
    for fault in [CallerFault::KilledAfter(6), CallerFault::KilledBefore(7)] {
        let set = Set::of(2, Way::Off);
        set.go(Way::Off, fault).0.unwrap_err();
        let before = set.states();
        assert!(before.contains(&Checkpointed) && before.contains(&Locked), "{before:?}");
        set.simulation.set_free_bytes(Some(HELD_BYTES - 1));
        let (found, ..) = set.recover(CallerFault::Never);
        assert!(found.iter().all(|process| process.what == Recovery::Hibernating), "{found:?}");
        assert_eq!(set.states(), [Checkpointed; 2]);
        set.assert_whole("recovered");
    }
    let set = Set::of(2, Way::Off);
    set.simulation.set_free_bytes(Some(0));
    let error = set.go(Way::Off, CallerFault::Nth(7)).0.unwrap_err();
    assert_eq!((set.states(), error.left.len()), (vec![Checkpointed; 2], 2), "{error}");
    set.assert_whole("brought nowhere");
}

#[test]
fn a_step_that_goes_on_is_awaited_before_anything_is_decided() {
    let set = Set::of(1, Way::Off);
    set.go(Way::Off, CallerFault::KilledDuring(4)).0.unwrap_err();
    assert_eq!(set.states(), [ProcessState::Checkpointing]);
    let (found, ..) = set.recover(CallerFault::Never);
    assert!(matches!(&found[..], [process] if process.what == Recovery::Hibernating), "{found:?}");
    set.assert_whole("its checkpoint has ended");
}

#[test]
fn what_a_restore_needs_is_measured_where_the_driver_keeps_no_figure() {
    let set = Set::without_figures(2, Way::Back);
    set.simulation.set_total_bytes(4 * HELD_BYTES + MARGIN_BYTES);
    let [entry] = &set.simulation.entries()[..] else { panic!() };
    let figures: Vec<_> = entry.processes.iter().map(|process| process.held[0].used_bytes).collect();
    assert_eq!(figures, [Some(HELD_BYTES); 2]);

    let other = set.simulation.start(3 * HELD_BYTES);
    let error = set.go(Way::Back, CallerFault::Never).0.unwrap_err();
    let SetErrorCause::DeviceMemory { needed_bytes, free_bytes, .. } = error.cause else { panic!("{error}") };
    assert_eq!((needed_bytes, free_bytes), (2 * HELD_BYTES + MARGIN_BYTES, HELD_BYTES + MARGIN_BYTES));
    set.simulation.end(other);
    set.go(Way::Back, CallerFault::Never).0.unwrap();
}

#[test]
fn what_was_used_before_is_enough_where_nothing_was_measured() {
    let used_bytes = 5 * HELD_BYTES;
    let assert_needed = |set: &Set, free_bytes| {
        set.assert_whole("off");
        set.simulation.set_free_bytes(Some(free_bytes - 1));
        let error = set.go(Way::Back, CallerFault::Never).0.unwrap_err();
        let SetErrorCause::DeviceMemory { needed_bytes, .. } = error.cause else { panic!("{error}") };
        assert_eq!(needed_bytes, free_bytes);
        set.simulation.set_free_bytes(Some(free_bytes));
        set.go(Way::Back, CallerFault::Never).0.unwrap();
    };

    // The caller is killed between the checkpoints and their figures.
    let set = Set::without_figures(2, Way::Off);
    let other = set.simulation.start(3 * HELD_BYTES);
    set.go(Way::Off, CallerFault::KilledAfter(8)).0.unwrap_err();
    assert_eq!(set.states(), [Checkpointed; 2]);
    set.recover(CallerFault::Never);
    set.simulation.end(other);
    assert_needed(&set, used_bytes);

    // The second is checkpointed in the undo alone, since there is no space for the first.
    let set = Set::without_figures(2, Way::Off);
    set.simulation.set_free_bytes(Some(0));
    let error = set.go(Way::Off, CallerFault::Nth(8)).0.unwrap_err();
    assert_eq!((set.states(), error.left.len()), (vec![Checkpointed; 2], 2), "{error}");
    assert_needed(&set, OTHERS_BYTES);

    // Two sets at once: neither may have been there when the other was.
    let set = Set::without_figures(2, Way::Off);
    for process in &set.processes {
        let (checkpointer, journal) = set.simulation.caller_with(CallerFault::KilledAfter(4));
        let held = vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes: None }];
        let one = [SetProcess { key: *process, held }];
        SetPlan::new(&checkpointer, &journal).hibernate(&one, WAIT).unwrap_err();
    }
    assert_eq!(set.states(), [Checkpointed; 2]);
    set.simulation.set_free_bytes(Some(3 * HELD_BYTES - 1));
    let error = set.go(Way::Back, CallerFault::Never).0.unwrap_err();
    assert!(
        matches!(error.cause, SetErrorCause::DeviceMemory { needed_bytes, .. } if needed_bytes == 3 * HELD_BYTES)
    );
}

#[test]
fn what_is_not_known_is_refused_off_and_back_unless_it_is_asked_for() {
    let set = Set::of(1, Way::Off);
    let pid = set.pids()[0];
    let (checkpointer, journal) = set.simulation.caller();
    let plan = SetPlan::new(&checkpointer, &journal);
    let (unseen, unknown_space) = (SetErrorCause::NoFigures { pid }, SetErrorCause::UnknownSpace { pid });
    let assert_refused = |error: SetError, cause: &SetErrorCause| {
        assert_eq!((&error.cause, error.pid()), (cause, Some(pid)));
        let asking = "add --without-space-check to `poorwill hibernate`";
        assert!(error.left.is_empty() && error.to_string().contains(asking), "{error}");
    };
    set.simulation.set_free_bytes(None);
    assert_refused(plan.inspect(&set.pids()).unwrap_err(), &unseen);
    assert_eq!(set.simulation.steps(), []);
    let unchecked = plan.without_space_check();
    unchecked.inspect(&set.pids()).unwrap();
    unchecked.hibernate(&set.members(), WAIT).unwrap();
    // Nothing is free as far as it is known, and nothing is known of what it held.
    for (free_bytes, used_bytes, cause) in
        [(None, Some(HELD_BYTES), &unseen), (Some(u64::MAX), None, &unknown_space)]
    {
        set.simulation.set_free_bytes(free_bytes);
        let held = vec![HeldMemory { uuid: DEVICE.to_owned(), used_bytes }];
        let remembered = [SetProcess { key: set.processes[0], held }];
        let entry = JournalEntry::new(remembered, SetPhase::Hibernated);
        assert_refused(plan.resume(&set.processes, &[entry]).unwrap_err(), cause);
    }
    // As another program has taken it off.
    assert_refused(plan.resume(&set.processes, &[]).unwrap_err(), &unknown_space);
    set.assert_whole("still off");
    unchecked.resume(&set.processes, &[]).unwrap();
    assert_eq!((set.states(), set.simulation.entries()), (vec![Running], vec![]));
}

#[test]
fn a_checkpoint_that_gains_nothing_is_undone() {
    let set = Set::without_figures(1, Way::Off);
    // Another process takes meanwhile what it leaves.
    set.simulation.set_free_bytes(Some(OTHERS_BYTES));
    let error = set.go(Way::Off, CallerFault::Never).0.unwrap_err();
    let unmeasured = SetErrorCause::Unmeasured { pid: set.pids()[0] };
    assert_eq!((&error.cause, error.pid(), &error.left[..]), (&unmeasured, Some(set.pids()[0]), &[][..]));
    set.assert_whole("undone");
    assert_eq!(set.states(), [Running]);

    // There may be no space for it any more: all that is known is that this much would do.
    set.simulation.set_free_bytes(Some(OTHERS_BYTES - 1));
    let error = set.go(Way::Off, CallerFault::Never).0.unwrap_err();
    assert_eq!((&error.cause, set.states()), (&unmeasured, vec![Checkpointed]));
    assert!(error.to_string().ends_with("is checkpointed: resume it"), "{error}");
    assert!(!error.to_string().contains("nothing was changed"), "{error}");
    set.assert_whole("off");
}
