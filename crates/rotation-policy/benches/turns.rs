//! Tables of the policy under traffic, in virtual time: `turns` compares rules over ten models, `hibernation` over twenty,
//! `starts` over six that are stopped and started, and `slices` over ten with long answers. They take minutes;
//! docs/benchmarks has them.

#![allow(clippy::unwrap_used)]

#[path = "../tests/policy/traffic/compared.rs"]
mod compared;
#[path = "../tests/policy/traffic/machine.rs"]
mod machine;

use std::process::ExitCode;
use std::time::Duration;

use poorwill_rotation_policy::Rules;

use compared::{
    ALONE, CONFIGURED_MIB, MEASURED_MIB, MIXED, Outcome, Run, by_cost, by_slices, by_time, hibernates,
    long_answers, outcome, six_started, twenty_models,
};
use machine::Traffic;

fn main() -> ExitCode {
    // Cargo adds `--bench`.
    let names: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["turns"] => table_of_turns(),
        ["hibernation"] => table_of_hibernation(),
        ["starts"] => table_of_starts(),
        ["slices"] => table_of_slices(),
        [] => println!("name a table: `turns`, `hibernation`, `starts` or `slices`"),
        _ => {
            eprintln!("there are four tables, one at a time: `turns`, `hibernation`, `starts` and `slices`");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Whether 99 in 100 requests were admitted before their time was over.
fn keeps_up(of: &Outcome) -> bool {
    of.refused * 99 <= of.answered
}

/// The most requests a second with which it keeps up, to one in a hundred.
fn capacity(needs_gib: [u64; 10], run: Run, change: fn(&mut Rules)) -> f64 {
    let (mut low, mut high) = (1.0, 64.0);
    while high > low * 1.01 {
        let middle = f64::midpoint(low, high);
        if keeps_up(&outcome(needs_gib, middle, run, change)) { low = middle } else { high = middle }
    }
    low
}

fn table_of_turns() {
    let run = Run { traces: 20, time: Duration::from_secs(600) };
    println!("| models | rules | requests/s | tokens/s | in swaps | wait p50 | p99 | longest |");
    println!("|---|---|---|---|---|---|---|---|");
    for (name, needs) in [("one fits", ALONE), ("one to four fit", MIXED)] {
        let keeps_up = [by_time as fn(&mut Rules), by_cost].map(|change| capacity(needs, run, change));
        let row = |rules: &str, per_second: f64, change: fn(&mut Rules)| {
            let of = outcome(needs, per_second, run, change);
            let seconds = |time: Duration| time.as_secs_f64();
            println!(
                "| {name} | {rules} | {per_second:.2} | {:.0} | {:.3} | {:.1} | {:.1} | {:.1} |",
                seconds(of.served) * 100.0 / (20.0 * seconds(run.time)),
                of.in_swaps,
                seconds(of.wait(50)),
                seconds(of.wait(99)),
                seconds(of.wait(100))
            );
        };
        row("by time", keeps_up[0], by_time);
        row("by cost", keeps_up[0], by_cost);
        row("by cost", keeps_up[1], by_cost);
        row("by time", keeps_up[1], by_time);
    }
}

fn table_of_starts() {
    let (traces, time) = (3, Duration::from_secs(1000));
    println!(
        "| needs | turn_per_swap | starts a minute | in starts | in starts and stops | wait p50 | p99 | longest |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, needs) in [("as measured", MEASURED_MIB), ("as configured", CONFIGURED_MIB)] {
        for (turns, change) in [
            (1, (|rules| rules.turn_per_swap = 1) as fn(&mut Rules)),
            (2, |rules| rules.turn_per_swap = 2),
            (3, by_cost),
            (4, |rules| (rules.turn_per_swap, rules.turn_max) = (4, Duration::from_secs(20))),
        ] {
            let all: Vec<_> = (0..traces).map(|seed| six_started(seed, time, needs, change)).collect();
            let mut waits: Vec<Duration> = all.iter().flat_map(Traffic::waits).collect();
            waits.sort_unstable();
            let wait = |percent: usize| waits[(waits.len() - 1) * percent / 100].as_secs_f64();
            let whole = time.as_secs_f64() * f64::from(u32::try_from(traces).unwrap());
            let share = |of: Duration| of.as_secs_f64() / whole;
            let starts: u64 = all.iter().map(|traffic| traffic.swaps).sum();
            println!(
                "| {name} | {turns} | {:.1} | {:.3} | {:.3} | {:.1} s | {:.1} s | {:.1} s |",
                f64::from(u32::try_from(starts).unwrap()) * 60.0 / whole,
                share(all.iter().map(|traffic| traffic.coming).sum()),
                share(all.iter().map(|traffic| traffic.swapping).sum()),
                wait(50),
                wait(99),
                wait(100)
            );
        }
    }
}

fn table_of_slices() {
    let run = Run { traces: 10, time: Duration::from_secs(1800) };
    println!(
        "| requests/s | rules | answered | refused | aborted | served/s | in swaps | wait p50 | p99 | largest gap |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for per_second in [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4] {
        for (name, change) in [("by cost", by_cost as fn(&mut Rules)), ("slices of 2 s", by_slices)] {
            let of = long_answers(per_second, run, change);
            println!(
                "| {per_second} | {name} | {} | {} | {} | {:.2} | {:.3} | {:.1} | {:.1} | {:.1} |",
                of.answered,
                of.refused,
                of.aborted,
                of.served.as_secs_f64() / (10.0 * 1800.0),
                of.in_swaps,
                of.wait(50).as_secs_f64(),
                of.wait(99).as_secs_f64(),
                of.largest_gap.as_secs_f64()
            );
        }
    }
}

fn hibernates_after(rules: &mut Rules) {
    (rules.can_hibernate, rules.hibernate_after) = (true, Some(Duration::from_secs(60)));
}

fn hibernates_at_once(rules: &mut Rules) {
    (rules.can_hibernate, rules.hibernate_after) = (true, Some(Duration::ZERO));
}

fn table_of_hibernation() {
    println!(
        "| need of each | rules | awake at most | swaps | moving | answered | wait p50 | p99 | longest |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for need_gib in [15, 20, 28, 33, 40, 45, 60, 68, 115] {
        for (name, change) in [
            ("asleep", (|_| {}) as fn(&mut Rules)),
            ("hibernate where memory is short", hibernates),
            ("hibernate after 1 min", hibernates_after),
            ("hibernate at once", hibernates_at_once),
        ] {
            let traffic = twenty_models(need_gib, Duration::from_secs(3600), change);
            let waits = traffic.waits();
            let seconds = |share: usize| waits[(waits.len() - 1) * share / 100].as_secs_f64();
            println!(
                "| {need_gib} GiB | {name} | {} | {} | {:.3} | {} | {:.2} s | {:.2} s | {:.2} s |",
                traffic.most_awake,
                traffic.swaps,
                traffic.swapping.as_secs_f64() / 3600.0,
                traffic.answered,
                seconds(50),
                seconds(99),
                seconds(100)
            );
        }
    }
}
