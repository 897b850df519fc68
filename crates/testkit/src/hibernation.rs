//! The rules of the contract of checkpointers.
//!
//! `hibernation_contract!(open, target)` makes a test of every function here. `open` returns a fresh [`Setup`], or
//! `None` where the test runs in a child of this process instead. `target` is what a target process does, which calls
//! [`serve`]. The names in brackets are the rules' names in [`poorwill_core::hibernation`].

mod cuda;
mod fault;
mod host;
mod target;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::{CheckpointErrorKind, CheckpointStep, Checkpointer, ProcessState, Result};
use rustix::process::Signal;

pub use cuda::CudaSetup;
pub use fault::{Hold, STEPS, TargetFault};
pub use host::HostSetup;
pub use target::{Enter, HibernationTarget, serve};

use crate::child::{self, OwnedChild};
use crate::watchdog::eventually;

/// What host and CUDA targets do.
pub mod targets {
    pub use super::cuda::target as cuda;
    pub use super::host::target as host;
}

/// A place for targets, and their checkpointers.
pub trait Setup {
    /// A fresh checkpointer, as another caller has it. The limit is for processes that are stopped.
    fn checkpointer_within(&self, answer_max: Option<Duration>) -> Arc<dyn Checkpointer>;

    /// A command that runs the target of this module's tests.
    fn command(&self, module: &str, fault: Option<TargetFault>) -> Command;

    /// Where a step waits.
    fn hold(&self) -> Hold;

    /// Variables of a process that opens the same setup.
    fn variables(&self) -> Vec<(&'static str, String)>;

    /// Whether targets can have faults, as they cannot on a GPU.
    fn has_faults(&self) -> bool {
        true
    }
}

/// What a rule is tested with.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Where.
    pub setup: &'a dyn Setup,
    /// The module of the tests.
    pub module: &'a str,
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("module", &self.module).finish_non_exhaustive()
    }
}

/// Makes a test of every rule, for the setups that the first expression opens, and the targets that the second one is.
#[macro_export]
macro_rules! hibernation_contract {
    ($open:expr, $target:expr) => {
        $crate::hibernation_contract!($open, $target;
            the_own_process_is_refused, what_is_no_process_is_refused, a_process_without_a_device_is_refused,
            steps_begin_in_their_state, a_state_survives_its_caller, a_lock_waits_for_queued_work,
            device_calls_wait_while_locked, a_checkpoint_takes_all_memory, bytes_come_back_at_their_addresses,
            a_failed_step_leaves_a_named_state, a_lost_process_has_failed, an_inspection_changes_nothing,
            obstacles_are_named, a_process_that_ended_is_gone, a_process_killed_in_a_step_is_gone,
            a_killed_caller_leaves_a_named_state, a_stopped_process_gives_no_answer, threads_take_processes_at_once);
    };
    ($open:expr, $target:expr; $($rule:ident),+) => {
        #[test]
        fn the_target() {
            if $crate::child::role().as_deref() == Some($crate::hibernation::TARGET) {
                $target();
            }
        }

        #[test]
        fn the_caller() {
            $crate::hibernation::call_for_another($open, module_path!());
        }

        $(#[test]
        fn $rule() {
            if let Some(setup) = ($open)() {
                $crate::hibernation::$rule($crate::hibernation::Context { setup: &setup, module: module_path!() });
            }
        })+
    };
}

/// The role of a target process.
pub const TARGET: &str = "target";
const CALLER: &str = "caller";
/// What the caller's process does: a number and a step.
const CALL: &str = "POORWILL_TEST_CALL";

const SHORT: Duration = Duration::from_millis(30);
const LONG: Duration = Duration::from_secs(200);
/// Granules of a target.
const GRANULES: u64 = 5;

/// A test of this module's test program, by its path without the crate.
fn test_command(module: &str, test: &str, role: &str) -> Command {
    let module = module.split_once("::").map_or(String::new(), |(_, path)| format!("{path}::"));
    child::command_for(&format!("{module}{test}"), role, &[])
}

fn target_command(module: &str) -> Command {
    test_command(module, "the_target", TARGET)
}

impl Context<'_> {
    fn checkpointer(&self) -> Arc<dyn Checkpointer> {
        self.setup.checkpointer_within(None)
    }

    fn target(&self) -> HibernationTarget {
        HibernationTarget::start(self.setup.command(self.module, None))
    }

    fn faulty(&self, fault: TargetFault) -> HibernationTarget {
        HibernationTarget::start(self.setup.command(self.module, Some(fault)))
    }
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> CheckpointErrorKind {
    result.expect_err("the call must fail").kind
}

fn step(checkpointer: &dyn Checkpointer, step: CheckpointStep, pid: u32) -> Result<()> {
    match step {
        CheckpointStep::State => checkpointer.state(pid).map(drop),
        CheckpointStep::Inspect => checkpointer.inspect(pid).map(drop),
        CheckpointStep::Lock => checkpointer.lock(pid, LONG),
        CheckpointStep::Checkpoint => checkpointer.checkpoint(pid),
        CheckpointStep::Restore => checkpointer.restore(pid),
        CheckpointStep::Unlock => checkpointer.unlock(pid),
    }
}

/// The error of every call.
fn kinds_of_all(checkpointer: &dyn Checkpointer, pid: u32) -> Vec<CheckpointErrorKind> {
    let questions = [CheckpointStep::State, CheckpointStep::Inspect];
    questions.into_iter().chain(STEPS).map(|which| kind(step(checkpointer, which, pid))).collect()
}

fn expect_of_all(checkpointer: &dyn Checkpointer, pid: u32, expected: &CheckpointErrorKind) {
    let kinds = kinds_of_all(checkpointer, pid);
    assert!(kinds.iter().all(|kind| kind == expected), "{pid}: {kinds:?}");
}

/// The steps from running up to where `before` begins.
fn go_to(checkpointer: &dyn Checkpointer, before: CheckpointStep, pid: u32) {
    for which in STEPS.into_iter().take_while(|which| *which != before) {
        step(checkpointer, which, pid).unwrap();
    }
}

/// The steps that bring a process back from where it stands.
fn bring_back(checkpointer: &dyn Checkpointer, pid: u32) {
    if checkpointer.state(pid).unwrap() == ProcessState::Checkpointed {
        checkpointer.restore(pid).unwrap();
    }
    if checkpointer.state(pid).unwrap() == ProcessState::Locked {
        checkpointer.unlock(pid).unwrap();
    }
    assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Running);
}

/// Where a step that has no fault ends.
fn after(step: CheckpointStep) -> ProcessState {
    match step {
        CheckpointStep::Checkpoint => ProcessState::Checkpointed,
        CheckpointStep::Lock | CheckpointStep::Restore => ProcessState::Locked,
        _ => ProcessState::Running,
    }
}

fn number_of_ended(target: &mut HibernationTarget) -> u64 {
    target.ask("ended").parse().unwrap()
}

/// Waits until so many device calls of a target have ended.
///
/// # Panics
/// If they do not.
#[must_use]
pub fn expect_ended(target: HibernationTarget, calls: u64) -> HibernationTarget {
    let target = std::sync::Mutex::new(target);
    eventually("device calls end", || number_of_ended(&mut target.lock().unwrap()) == calls);
    target.into_inner().unwrap()
}

/// \[outside\]
///
/// # Panics
/// If the rule is broken, as every function here.
pub fn the_own_process_is_refused(context: Context<'_>) {
    let checkpointer = context.checkpointer();
    expect_of_all(&*checkpointer, std::process::id(), &CheckpointErrorKind::OwnProcess);
}

/// \[gone\]: numbers that no process has, and threads.
pub fn what_is_no_process_is_refused(context: Context<'_>) {
    let checkpointer = context.checkpointer();
    for pid in [0, i32::MAX.cast_unsigned(), 1 << 31, u32::MAX] {
        expect_of_all(&*checkpointer, pid, &CheckpointErrorKind::NoSuchProcess);
    }
    let mut ended = OwnedChild::start(&mut Command::new("true"));
    let pid = ended.id();
    // Also before its parent has looked.
    eventually("it ends", || {
        checkpointer.state(pid).is_err_and(|e| e.kind == CheckpointErrorKind::NoSuchProcess)
    });
    ended.wait().unwrap();
    expect_of_all(&*checkpointer, pid, &CheckpointErrorKind::NoSuchProcess);
}

/// `NoDevice`.
pub fn a_process_without_a_device_is_refused(context: Context<'_>) {
    let checkpointer = context.checkpointer();
    let mut other = OwnedChild::start(Command::new("cat").stdin(Stdio::piped()));
    expect_of_all(&*checkpointer, other.id(), &CheckpointErrorKind::NoDevice);
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success(), "it went on");
}

/// \[steps\]
pub fn steps_begin_in_their_state(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    let pid = target.pid();
    target.ask(&format!("fill {GRANULES}"));
    for next in STEPS {
        let found = checkpointer.state(pid).unwrap();
        for wrong in STEPS.into_iter().filter(|wrong| wrong.begins() != Some(found)) {
            let expected = CheckpointErrorKind::wrong_state(found, wrong.begins().unwrap());
            assert_eq!(kind(step(&*checkpointer, wrong, pid)), expected, "{wrong} while {found}");
            assert_eq!(checkpointer.state(pid).unwrap(), found);
        }
        step(&*checkpointer, next, pid).unwrap();
        assert_eq!(checkpointer.state(pid).unwrap(), after(next));
    }
    checkpointer.lock(pid, LONG).unwrap();
    checkpointer.unlock(pid).unwrap();
    assert_eq!(target.ask("verify"), "same");
}

/// \[theirs\]
pub fn a_state_survives_its_caller(context: Context<'_>) {
    let mut target = context.target();
    target.ask(&format!("fill {GRANULES}"));
    for next in STEPS {
        step(&*context.checkpointer(), next, target.pid()).unwrap();
        assert_eq!(context.checkpointer().state(target.pid()).unwrap(), after(next));
    }
    assert_eq!(target.ask("verify"), "same");
}

/// \[lock\]: the queued work.
pub fn a_lock_waits_for_queued_work(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    let pid = target.pid();
    target.ask("queue");
    for wait_max in [Duration::ZERO, SHORT] {
        let busy = kind(checkpointer.lock(pid, wait_max));
        assert!(matches!(busy, CheckpointErrorKind::Busy { .. }), "{busy:?}");
        assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Running);
    }
    assert_eq!(target.ask("verify"), "same", "it runs on");
    thread::scope(|scope| {
        let locking = scope.spawn(|| checkpointer.lock(pid, LONG));
        target.ask("finish");
        locking.join().unwrap().unwrap();
    });
    assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Locked);
    checkpointer.unlock(pid).unwrap();
}

/// \[lock\], \[restore\], \[unlock\]: device calls.
pub fn device_calls_wait_while_locked(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    let pid = target.pid();
    checkpointer.lock(pid, LONG).unwrap();
    target.ask("begin");
    for next in [CheckpointStep::Checkpoint, CheckpointStep::Restore] {
        step(&*checkpointer, next, pid).unwrap();
        target.ask("begin");
        assert_eq!(number_of_ended(&mut target), 0, "after the {next}");
    }
    thread::sleep(SHORT);
    assert_eq!(number_of_ended(&mut target), 0);
    checkpointer.unlock(pid).unwrap();
    drop(expect_ended(target, 3));
}

/// \[checkpoint\]: nothing is held afterwards.
pub fn a_checkpoint_takes_all_memory(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    let pid = target.pid();
    let held = |when: &str| {
        let inspection = checkpointer.inspect(pid).unwrap();
        let figures = inspection.held.iter().map(|held| held.used_bytes);
        figures.sum::<Option<u64>>().unwrap_or_else(|| panic!("{when}: {inspection:?}"))
    };
    let before = held("before");
    let filled: u64 = target.ask(&format!("fill {GRANULES}")).parse().unwrap();
    let full = held("filled");
    assert!(full >= before + filled, "{before}, {full}");
    checkpointer.lock(pid, LONG).unwrap();
    assert_eq!(held("locked"), full);
    checkpointer.checkpoint(pid).unwrap();
    assert!(held("checkpointed") <= 8 << 20, "some MiB of the driver's own");
    checkpointer.restore(pid).unwrap();
    checkpointer.unlock(pid).unwrap();
    assert_eq!(held("back"), full);
}

/// \[restore\]: bytes and addresses, over several rounds.
pub fn bytes_come_back_at_their_addresses(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    for round in 0..5 {
        target.ask("fill 2");
        STEPS.into_iter().for_each(|which| step(&*checkpointer, which, target.pid()).unwrap());
        assert_eq!(target.ask("verify"), "same", "round {round}");
    }
}

/// \[undone\]
pub fn a_failed_step_leaves_a_named_state(context: Context<'_>) {
    if !context.setup.has_faults() {
        return;
    }
    let checkpointer = context.checkpointer();
    for failing in STEPS {
        let mut target = context.faulty(TargetFault::Fails(failing));
        let pid = target.pid();
        target.ask(&format!("fill {GRANULES}"));
        go_to(&*checkpointer, failing, pid);
        let error = kind(step(&*checkpointer, failing, pid));
        assert!(matches!(error, CheckpointErrorKind::Refused { .. }), "{failing}: {error:?}");
        let state = checkpointer.state(pid).unwrap();
        if state == ProcessState::Failed {
            assert_eq!(failing, CheckpointStep::Restore, "only a restore may lose it");
            continue;
        }
        assert_eq!(Some(state), failing.begins(), "{failing}");
        step(&*checkpointer, failing, pid).unwrap();
        bring_back(&*checkpointer, pid);
        assert_eq!(target.ask("verify"), "same", "{failing}");
    }
}

/// \[undone\], \[lost\]: `Failed`.
pub fn a_lost_process_has_failed(context: Context<'_>) {
    if !context.setup.has_faults() {
        return;
    }
    let checkpointer = context.checkpointer();
    for losing in [CheckpointStep::Checkpoint, CheckpointStep::Restore] {
        let mut target = context.faulty(TargetFault::Loses(losing));
        let pid = target.pid();
        go_to(&*checkpointer, losing, pid);
        target.ask("begin");
        kind(step(&*checkpointer, losing, pid));
        assert_eq!(checkpointer.state(pid).unwrap(), ProcessState::Failed);
        for which in STEPS {
            let expected = CheckpointErrorKind::wrong_state(ProcessState::Failed, which.begins().unwrap());
            assert_eq!(kind(step(&*checkpointer, which, pid)), expected);
        }
        target.kill();
        expect_of_all(&*checkpointer, pid, &CheckpointErrorKind::NoSuchProcess);
    }
}

/// \[inspect\]
pub fn an_inspection_changes_nothing(context: Context<'_>) {
    let (checkpointer, mut target) = (context.checkpointer(), context.target());
    let pid = target.pid();
    target.ask(&format!("fill {GRANULES}"));
    target.ask("queue");
    for next in STEPS {
        let state = checkpointer.state(pid).unwrap();
        let inspection = checkpointer.inspect(pid).unwrap();
        assert_eq!((inspection.state, inspection.obstacles), (state, vec![]));
        assert_eq!(checkpointer.state(pid).unwrap(), state);
        if state == ProcessState::Running {
            assert_eq!(target.ask("verify"), "same");
            target.ask("finish");
        }
        step(&*checkpointer, next, pid).unwrap();
    }
    assert_eq!(target.ask("verify"), "same");
}

/// \[inspect\]: what makes a later step fail.
pub fn obstacles_are_named(context: Context<'_>) {
    if !context.setup.has_faults() {
        return;
    }
    let (checkpointer, mut target) = (context.checkpointer(), context.faulty(TargetFault::Obstacle));
    let pid = target.pid();
    let inspection = checkpointer.inspect(pid).unwrap();
    assert_eq!((inspection.state, inspection.obstacles.len()), (ProcessState::Running, 1), "{inspection:?}");
    assert_eq!(target.ask("verify"), "same");
    let fails = |which| step(&*checkpointer, which, pid).is_err();
    assert!(STEPS.into_iter().take(3).any(fails), "one of the steps to there and back fails");
}

/// \[gone\]
pub fn a_process_that_ended_is_gone(context: Context<'_>) {
    let checkpointer = context.checkpointer();
    for next in STEPS {
        let mut target = context.target();
        let pid = target.pid();
        go_to(&*checkpointer, next, pid);
        target.kill();
        expect_of_all(&*checkpointer, pid, &CheckpointErrorKind::NoSuchProcess);
    }
    let mut target = context.target();
    let pid = target.pid();
    target.ask("queue");
    let locked = thread::scope(|scope| {
        let locking = scope.spawn(|| checkpointer.lock(pid, LONG));
        thread::sleep(SHORT); // Most often it waits by now; the outcome is the same otherwise.
        target.kill();
        locking.join().unwrap()
    });
    assert_eq!(kind(locked), CheckpointErrorKind::NoSuchProcess);
}

/// \[gone\]: in the middle of a step.
pub fn a_process_killed_in_a_step_is_gone(context: Context<'_>) {
    if !context.setup.has_faults() {
        return;
    }
    let (checkpointer, hold) = (context.checkpointer(), context.setup.hold());
    for held in STEPS {
        hold.reset();
        let mut target = context.faulty(TargetFault::Holds(held));
        let pid = target.pid();
        go_to(&*checkpointer, held, pid);
        let done = thread::scope(|scope| {
            let stepping = scope.spawn(|| step(&*checkpointer, held, pid));
            eventually("the step is reached", || hold.is_reached());
            target.kill();
            stepping.join().unwrap()
        });
        assert_eq!(kind(done), CheckpointErrorKind::NoSuchProcess, "{held}");
    }
}

/// \[theirs\], \[undone\]: a caller that is killed in the middle of a step.
pub fn a_killed_caller_leaves_a_named_state(context: Context<'_>) {
    if !context.setup.has_faults() {
        return;
    }
    let (checkpointer, hold) = (context.checkpointer(), context.setup.hold());
    for held in STEPS {
        hold.reset();
        let mut target = context.faulty(TargetFault::Holds(held));
        let pid = target.pid();
        target.ask(&format!("fill {GRANULES}"));
        go_to(&*checkpointer, held, pid);
        let mut command = test_command(context.module, "the_caller", CALLER);
        command.env(CALL, format!("{pid} {held}"));
        command.envs(context.setup.variables());
        let mut caller = OwnedChild::start(command.stdout(Stdio::null()));
        eventually("the step is reached", || hold.is_reached());
        caller.end();
        hold.release();
        let ends = [held.begins().unwrap(), after(held)];
        eventually("the step ends in a state with a name", || {
            ends.contains(&checkpointer.state(pid).unwrap())
        });
        eventually("another caller goes on", || {
            if checkpointer.state(pid).unwrap() == ProcessState::Running {
                return true;
            }
            let _ = checkpointer.restore(pid);
            let _ = checkpointer.unlock(pid);
            false
        });
        assert_eq!(target.ask("verify"), "same", "{held}");
    }
}

/// What `the_caller` does: one step, until it is killed.
pub fn call_for_another<S: Setup>(open: impl Fn() -> Option<S>, _module: &str) {
    if child::role().as_deref() != Some(CALLER) {
        return;
    }
    let call = std::env::var(CALL).unwrap();
    let (pid, name) = call.split_once(' ').unwrap();
    let which = STEPS.into_iter().find(|step| step.to_string() == name).unwrap();
    let setup = open().unwrap();
    let _ = step(&*setup.checkpointer_within(None), which, pid.parse().unwrap());
}

/// \[answers\]
pub fn a_stopped_process_gives_no_answer(context: Context<'_>) {
    let checkpointer = context.setup.checkpointer_within(Some(SHORT));
    let mut target = context.target();
    let pid = target.pid();
    target.signal(Signal::STOP);
    for which in [CheckpointStep::State, CheckpointStep::Inspect, CheckpointStep::Lock] {
        let done = match which {
            CheckpointStep::Lock => checkpointer.lock(pid, SHORT),
            which => step(&*checkpointer, which, pid),
        };
        let error = kind(done);
        assert!(matches!(error, CheckpointErrorKind::NoAnswer { .. }), "{which}: {error:?}");
    }
    target.signal(Signal::CONT);
    let another = context.checkpointer();
    eventually("it runs on", || another.state(pid).is_ok_and(|state| state == ProcessState::Running));
    target.ask("begin");
    drop(expect_ended(target, 1));
}

/// \[threads\]
pub fn threads_take_processes_at_once(context: Context<'_>) {
    let checkpointer = context.checkpointer();
    let mut targets: Vec<HibernationTarget> = (0..3).map(|_| context.target()).collect();
    targets[0].ask("queue");
    let waiting = targets[0].pid();
    thread::scope(|scope| {
        let locking = scope.spawn(|| checkpointer.lock(waiting, LONG));
        let others: Vec<u32> = targets[1..].iter().map(HibernationTarget::pid).collect();
        let rounds: Vec<_> = others
            .into_iter()
            .map(|pid| {
                let checkpointer = &checkpointer;
                scope.spawn(move || {
                    for _ in 0..3 {
                        STEPS.into_iter().for_each(|which| step(&**checkpointer, which, pid).unwrap());
                    }
                })
            })
            .collect();
        rounds.into_iter().for_each(|round| round.join().unwrap());
        assert!(!locking.is_finished(), "a lock that waits");
        let state = scope.spawn(|| checkpointer.state(waiting)); // It may wait, too.
        targets[0].ask("finish");
        locking.join().unwrap().unwrap();
        let state = state.join().unwrap().unwrap();
        assert!(matches!(state, ProcessState::Running | ProcessState::Locked), "{state:?}");
    });
    checkpointer.unlock(waiting).unwrap();
    for target in &mut targets {
        assert_eq!(target.ask("verify"), "same");
    }
}
