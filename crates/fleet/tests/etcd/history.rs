//! What placements were written in which order, and whether one controller wrote at a time.

use std::fmt::Debug;

use poorwill_fleet::etcd::{Etcd, Event, Watched};
use poorwill_fleet::keys::{self, Key};
use poorwill_fleet::name::FleetName;
use poorwill_fleet::records::{Placement, Reading, read};
use tokio::time::timeout;

use super::support::LONG_TTL;

/// A change of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) revision: u64,
    pub(crate) key: String,
    /// `None` if it was removed.
    pub(crate) fence: Option<u64>,
}

/// All changes of placements that there ever were.
pub(crate) async fn of(etcd: &Etcd, fleet: &FleetName) -> Vec<Step> {
    let prefix = format!("{}placements/", keys::prefix(fleet));
    // Behind the last of them.
    let marker = format!("{prefix}end");
    let end = super::support::put(etcd, &marker, "", None).await.revision;
    let mut watch = etcd.watch(&prefix, 1).await.unwrap();
    let mut steps = Vec::new();
    loop {
        let watched = timeout(LONG_TTL, watch.next()).await.unwrap().unwrap();
        let Watched::Changes(changes) = watched else { panic!("all is there from revision 1 on") };
        for change in changes {
            if change.revision() == end {
                super::support::delete(etcd, &marker).await;
                return steps;
            }
            steps.extend(step(fleet, change).filter(|step| step.key != marker));
        }
    }
}

fn step(fleet: &FleetName, change: Event) -> Option<Step> {
    let revision = change.revision();
    match change {
        Event::Removed { key, .. } => Some(Step { revision, key, fence: None }),
        Event::Put(entry) => {
            let key = Key::parse(fleet, &entry.key).ok()?;
            let Ok(Reading::Known(Placement { fence, .. })) = read(&key, &entry.value) else { return None };
            Some(Step { revision, key: entry.key, fence: Some(fence) })
        }
    }
}

/// What is wrong with a history: its controllers took turns if fences only grow.
pub(crate) fn problems(steps: &[Step]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut last: Option<&Step> = None;
    for step in steps {
        if let Some(fence) = step.fence {
            if fence >= step.revision {
                problems.push(format!("it is written before its election: {step:?}"));
            }
            if let Some(last) = last.filter(|last| last.fence > step.fence) {
                problems.push(format!("an older controller writes {step:?} behind {last:?}"));
            }
            last = Some(step);
        }
    }
    if !steps.is_sorted_by_key(|step| step.revision) {
        problems.push("revisions go back".to_owned());
    }
    problems
}

/// Panics unless it is a history of controllers that took turns. Returns how many of them wrote.
pub(crate) fn check(steps: &[Step]) -> usize {
    let problems = problems(steps);
    assert!(problems.is_empty(), "{}\nin {steps:#?}", problems.join("\n"));
    let fences: std::collections::BTreeSet<u64> = steps.iter().filter_map(|step| step.fence).collect();
    fences.len()
}

#[test]
fn broken_histories_are_noticed() {
    let history = |steps: &[(u64, Option<u64>)]| -> Vec<Step> {
        let step = |(revision, fence): &(u64, Option<u64>)| Step {
            revision: *revision,
            key: "a".to_owned(),
            fence: *fence,
        };
        steps.iter().map(step).collect()
    };
    let one = |steps: &[(u64, Option<u64>)], words: &str| {
        let problems = problems(&history(steps));
        assert!(matches!(&problems[..], [problem] if problem.contains(words)), "{problems:?}");
    };
    let right = history(&[(5, Some(4)), (5, Some(4)), (6, None), (9, Some(4)), (12, Some(10)), (13, None)]);
    assert_eq!(check(&right), 2);
    one(&[(5, Some(4)), (12, Some(10)), (13, Some(4))], "an older controller");
    one(&[(5, Some(4)), (12, Some(10)), (13, None), (14, Some(4)), (15, Some(11))], "an older controller");
    one(&[(5, Some(5))], "before its election");
    one(&[(7, Some(4)), (6, None)], "go back");
}
