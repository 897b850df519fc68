//! A service that is killed in each phase of a swap, and its successor. The successor finds awake models by
//! requests and measurements. Every model gives the same answers as before, and no engine is lost or left
//! over.
//!
//! Engines hang where the phase would be too short. A hang ends with the kill, or goes on; a quick run tries
//! only the first where both are tested.

use std::ops::RangeInclusive;
use std::thread::{self, Scope, sleep};
use std::time::{Duration, Instant};

use poorwill_testkit::effort::Effort;

use super::fixture::{self, Fixture, Model, Rotator, until};
use super::watch::{Scales, Watch, assert_fit, last_stage};

const NAMES: [&str; 2] = ["amber", "birch"];
const PROMPTS: [&str; 2] = ["Tell me of a river.", "Tell me of a stone."];
/// What an engine holds while it is awake, in MiB, as the system counts it.
const HELD: RangeInclusive<u64> = 60..=68;
/// For how long is waited for what hangs.
const SHORT: &str = "[model.rules]\nsleep_max = \"500ms\"\nrelease_max = \"500ms\"\nwake_max = \"500ms\"\n\
                     canary_max = \"500ms\"\n";
/// How often a phase is tried to be met.
const TRIES: usize = 4;

type Truth = [Vec<String>; 2];

/// How engines are when the next rotation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engines {
    /// As if nothing had been: none is started again.
    Well,
    /// What hung goes on.
    GoOn,
    /// One is being ended, or started.
    Change,
    /// What hangs does so for as long as the engine is there.
    HangOn,
}

#[test]
fn a_kill_while_a_model_goes_is_made_up_for() {
    of_all(&[
        ("draining", Engines::Well),
        ("draining", Engines::HangOn),
        ("falling asleep", Engines::GoOn),
        ("falling asleep", Engines::HangOn),
        ("releasing memory", Engines::HangOn),
        ("stopping", Engines::Change),
    ]);
}

#[test]
fn a_kill_while_a_model_comes_is_made_up_for() {
    of_all(&[
        ("finding memory", Engines::Well),
        ("waking", Engines::Well),
        ("waking", Engines::HangOn),
        ("starting", Engines::Change),
        ("confirming", Engines::Well),
        ("canary", Engines::Well),
        ("canary", Engines::HangOn),
        ("ready", Engines::Well),
        ("ready", Engines::HangOn),
    ]);
}

fn of_all(phases: &[(&'static str, Engines)]) {
    let mut phases = phases.to_vec();
    if Effort::of_this_run() == Effort::Quick {
        phases.dedup_by_key(|(phase, _)| *phase);
    }
    let fixture = Fixture::of_two();
    let truth = NAMES.map(|name| fixture.truth(name, &PROMPTS, fixture::TOKENS));
    thread::scope(|scope| {
        for some in phases.chunks(2) {
            let truth = &truth;
            // A panic names the thread.
            let thread = thread::Builder::new().name(format!("{some:?}"));
            let run = move || some.iter().for_each(|(phase, engines)| killed_in(phase, *engines, truth));
            thread.spawn_scoped(scope, run).unwrap();
        }
    });
}

fn killed_in(phase: &'static str, engines: Engines, truth: &Truth) {
    let was = (0..TRIES).any(|_| was_killed_in(phase, engines, truth));
    assert!(was, "the rotation was never {phase} when it was killed");
}

/// Whether it was in that phase when it was killed.
fn was_killed_in(phase: &'static str, engines: Engines, truth: &Truth) -> bool {
    let mut fixture = Fixture::of_two();
    match phase {
        "starting" => fixture.models[1].is_held = true,
        // A sleeping model has more than that.
        "finding memory" => fixture.models[1].need = "127MiB",
        _ => {}
    }
    let scales = Scales::of(&fixture);
    let goes = ["draining", "falling asleep", "releasing memory", "stopping", "ready"].contains(&phase);
    let who = if goes { "amber" } else { "birch" };
    let was_there = thread::scope(|scope| {
        let rotator = fixture.start(&[]);
        let watch = Watch::of(&fixture);
        let is_there = lead(&fixture, phase, &rotator, &watch, scope, truth);
        if ["confirming", "stopping"].contains(&phase) {
            // The system ends those that are held up when who started them ends, so they go on before, unnoticed.
            rotator.signal("STOP");
            NAMES.iter().filter_map(|name| fixture.engine(name)).for_each(|pid| fixture::signal("CONT", pid));
        }
        rotator.kill();
        let events = watch.ended();
        assert_fit(&events, 1);
        is_there && last_stage(&events, who) == phase
    });
    if !was_there {
        return false;
    }
    let engines_before = fixture.processes();
    let has_engine = NAMES.map(|name| fixture.engine(name).is_some());
    for (model, has_engine) in fixture.models.iter_mut().zip(has_engine) {
        if has_engine && [Engines::Well, Engines::GoOn].contains(&engines) {
            model.faults(&[]);
        }
        if (phase, engines) == ("waking", Engines::Well) && model.name == "birch" {
            let began = Instant::now();
            while model.is_sleeping() != Some(false) {
                assert!(began.elapsed() < fixture::HANGS, "it does not wake, though it may");
                sleep(Duration::from_millis(10));
            }
        }
        model.need = "80MiB";
        if engines == Engines::HangOn {
            model.lines = SHORT.to_owned();
        }
    }

    let rotator = fixture.start(&[]);
    let watch = Watch::of(&fixture);
    fixture.open_latch();
    for (model, turn) in [(1, 0), (0, 1), (1, 1)] {
        let name = fixture.models[model].name;
        let output = if engines == Engines::HangOn {
            fixture.say_at_last(name, PROMPTS[turn])
        } else {
            fixture.say(name, PROMPTS[turn])
        };
        assert_eq!(output, truth[model][turn], "{phase} {engines:?}: {}", rotator.log());
    }
    let engines_now = fixture.processes();
    // The rotation, and an engine for each model at most.
    assert!(engines_now.len() <= 3, "{phase} {engines:?}: {engines_now:?}: {}", rotator.log());
    if engines == Engines::Well {
        let is_there = |pid| engines_now.contains(pid);
        assert!(engines_before.iter().all(is_there), "{phase}: an engine was lost: {}", rotator.log());
    }
    rotator.end();
    fixture.assert_empty();
    assert_fit(&watch.ended(), 1);
    scales.assert_within(HELD);
    true
}

/// Leads a rotation to a phase, and says whether it got there.
fn lead<'scope>(
    fixture: &'scope Fixture,
    phase: &'static str,
    rotator: &Rotator,
    watch: &Watch,
    scope: &'scope Scope<'scope, '_>,
    truth: &'scope Truth,
) -> bool {
    let [amber, birch] = [&fixture.models[0], &fixture.models[1]];
    let ask = |model: usize| {
        scope.spawn(move || {
            // Most of them break off with the rotation.
            if let Some(answer) =
                fixture.ask(fixture.models[model].name, PROMPTS[0]).ok().filter(|one| one.status == 200)
            {
                assert_eq!(fixture::text_of(&answer), truth[model][0]);
            }
        });
    };
    if !["starting", "finding memory"].contains(&phase) {
        fixture.say("birch", PROMPTS[0]);
    }
    fixture.say("amber", PROMPTS[0]);
    let from = watch.len();
    // A stage is reported before its engine knows.
    let hangs = |model: &Model, fault| until(rotator, "its engine hangs", || model.has_injected(fault));
    let sees = |model, stage| watch.sees(rotator, from, model, stage);
    match phase {
        "draining" | "ready" => {
            amber.faults(&["hangs-in-answer"]);
            ask(0);
            until(rotator, "it runs", || fixture.now("amber")["running"] == 1);
            if phase == "ready" {
                return watch.stage("amber") == "ready";
            }
            ask(1);
        }
        "falling asleep" => {
            amber.faults(&["hangs-in-sleep"]);
            ask(1);
            hangs(amber, "hangs-in-sleep");
        }
        "releasing memory" => {
            amber.faults(&["keeps-memory"]);
            ask(1);
        }
        "stopping" => {
            fixture::signal("STOP", fixture.engine("amber").unwrap());
            fixture.order(&["restart", "amber"]).succeeded();
        }
        "finding memory" | "starting" => ask(1),
        "waking" => {
            birch.faults(&["hangs-in-wake"]);
            ask(1);
            hangs(birch, "hangs-in-wake");
        }
        "confirming" => {
            birch.faults(&["hangs-in-wake"]);
            ask(1);
            hangs(birch, "hangs-in-wake");
            // It wakes while its reply is not read, and then reports nothing.
            rotator.signal("STOP");
            birch.faults(&[]);
            until(rotator, "it has answered", || fixture::has_unread_from(birch.port));
            fixture::signal("STOP", fixture.engine("birch").unwrap());
            rotator.signal("CONT");
        }
        "canary" => {
            birch.faults(&["hangs-in-answer"]);
            ask(1);
            hangs(birch, "hangs-in-answer");
        }
        _ => panic!("{phase} is no phase"),
    }
    let goes = ["draining", "falling asleep", "releasing memory", "stopping"].contains(&phase);
    sees(if goes { "amber" } else { "birch" }, phase)
}
