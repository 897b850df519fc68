//! Processes that hibernate, resume, or were found in the journal.

use poorwill::hibernation::{HibernateReport, HibernatedProcess, ProcessState, ResumeReport, ResumedProcess};

use super::outcomes::{Inspections, RecoveredSets, States};
use crate::failure::CommandOutput;
use crate::text::{size, table};

fn hibernated(report: &HibernateReport) -> String {
    let mut table = table(["process", "released", "lock", "checkpoint"]);
    for HibernatedProcess { pid, released_bytes, lock_ms, checkpoint_ms, .. } in &report.processes {
        table.add_row([pid.to_string(), known(*released_bytes), ms(*lock_ms), ms(*checkpoint_ms)]);
    }
    format!(
        "{table}\nHibernating after {}, with {} of host memory.\n",
        ms(report.total_ms),
        known(report.host_bytes)
    )
}

fn resumed(report: &ResumeReport) -> String {
    let mut table = table(["process", "restore", "unlock"]);
    for ResumedProcess { pid, restore_ms, unlock_ms, .. } in &report.processes {
        table.add_row([pid.to_string(), ms(*restore_ms), ms(*unlock_ms)]);
    }
    format!("{table}\nRunning after {}.\n", ms(report.total_ms))
}

fn states(states: &States) -> String {
    states.processes.iter().map(|process| format!("process {} is {}\n", process.pid, process.state)).collect()
}

fn inspected(inspections: &Inspections) -> String {
    let mut table = table(["process", "state", "device", "holds", "in the way"]);
    for process in &inspections.processes {
        let obstacles: Vec<String> = process.inspection.obstacles.iter().map(ToString::to_string).collect();
        let (pid, state) = (process.pid.to_string(), process.inspection.state.to_string());
        let obstacles = if obstacles.is_empty() { "–".to_owned() } else { obstacles.join("; ") };
        if process.inspection.held.is_empty() {
            table.add_row([&pid, &state, "–", "–", &obstacles]);
        }
        for held in &process.inspection.held {
            table.add_row([&pid, &state, &held.uuid, &known(held.used_bytes), &obstacles]);
        }
    }
    let takes = match inspections.host_bytes {
        Some(bytes) => format!("Hibernating takes {} of host memory.", size(bytes)),
        None => "What hibernating takes of host memory is not known: the driver has no figure.".to_owned(),
    };
    format!("{table}\n{takes}\n")
}

fn recovered(sets: &RecoveredSets) -> String {
    let RecoveredSets { recovered, set_aside } = sets;
    if recovered.is_empty() && set_aside.is_empty() {
        return "Nothing was left behind.\n".to_owned();
    }
    let recovered = recovered.iter().map(|process| format!("{process}\n"));
    let set_aside =
        set_aside.iter().map(|path| format!("not understood, and set aside: {}\n", path.display()));
    recovered.chain(set_aside).collect()
}

/// In JSON `unknown` where it cannot be read.
pub(super) fn state_name(state: Option<ProcessState>) -> &'static str {
    state.map_or("unknown", ProcessState::as_str)
}

fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unknown".to_owned(), size)
}

fn ms(ms: f64) -> String {
    format!("{ms:.1}\u{a0}ms")
}

macro_rules! shown {
    ($($outcome:ty: $show:expr;)+) => {
        $(impl CommandOutput for $outcome {
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
    HibernateReport: hibernated;
    ResumeReport: resumed;
    States: states;
    Inspections: inspected;
    RecoveredSets: recovered;
}
