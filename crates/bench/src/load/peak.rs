//! Peak memory of an action, by the control group (with the page cache) and by the process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use poorwill_driver::system::System;

use crate::process::resident_bytes;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);

/// Peak above the memory at the start, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peak {
    /// Of this process's control group; `None` without one that counts memory.
    pub(super) group_bytes: Option<u64>,
    /// Of this process's own pages.
    pub(super) resident_bytes: Option<u64>,
    /// How the group was measured, or why it was not.
    pub(super) how: String,
}

struct ControlGroup {
    used: String,
    peak: String,
}

impl ControlGroup {
    /// As the system or a container shows it.
    fn of_this_process() -> Option<Self> {
        let membership = System::here().cgroups_of(std::process::id());
        let mut paths = Vec::new();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
            let group = group.trim_end_matches('/');
            if controllers.split(',').any(|controller| controller == "memory") {
                let files = ["memory.usage_in_bytes", "memory.max_usage_in_bytes"];
                // In a container its own group is at the root.
                paths.extend([group, ""].map(|group| (format!("/sys/fs/cgroup/memory{group}"), files)));
            } else if controllers.is_empty() {
                let files = ["memory.current", "memory.peak"];
                paths.extend([group, ""].map(|group| (format!("/sys/fs/cgroup{group}"), files)));
            }
        }
        let groups = paths.into_iter().map(|(folder, [used, peak])| Self {
            used: format!("{folder}/{used}"),
            peak: format!("{folder}/{peak}"),
        });
        groups.into_iter().find(|group| number(&group.used).is_some())
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(super) fn measure<T>(action: impl FnOnce() -> T) -> (T, Peak) {
    measure_sampled(|_| action())
}

fn measure_sampled<T>(action: impl FnOnce(&AtomicUsize) -> T) -> (T, Peak) {
    let group = ControlGroup::of_this_process();
    let used = || group.as_ref().and_then(|group| number(&group.used));
    let peak = || group.as_ref().and_then(|group| number(&group.peak));
    let (used_before, peak_before, resident_before) = (used(), peak(), resident_bytes());
    let (is_over, samples) = (AtomicBool::new(false), AtomicUsize::new(0));
    let sample = || {
        let (mut used_most, mut resident_most) = (None, None);
        loop {
            // One more sample after the end.
            let is_last = is_over.load(Ordering::Relaxed);
            used_most = used_most.max(used());
            resident_most = resident_most.max(resident_bytes());
            samples.fetch_add(1, Ordering::Relaxed);
            if is_last {
                return (used_most, resident_most);
            }
            thread::sleep(SAMPLE_INTERVAL);
        }
    };
    let (outcome, (used_most, resident_most)) = thread::scope(|scope| {
        let sampler = thread::Builder::new().spawn_scoped(scope, sample);
        let outcome = action(&samples);
        is_over.store(true, Ordering::Relaxed);
        let sampled = sampler.ok().and_then(|sampler| sampler.join().ok());
        (outcome, sampled.unwrap_or_else(|| (used(), resident_bytes())))
    });
    // A grown peak of the group is exact; otherwise the samples are a lower bound.
    let grown_peak = peak().filter(|peak| peak_before.is_some_and(|before| *peak > before));
    let group_bytes =
        grown_peak.or(used_most).zip(used_before).map(|(most, before)| most.saturating_sub(before));
    let how = match (&group, grown_peak) {
        (None, _) => "no control group counts this process's memory".to_owned(),
        (Some(group), Some(_)) => format!("{}, less what was used before", group.peak),
        (Some(group), None) => format!("{}, sampled every 2 ms, less what was used before", group.used),
    };
    let resident_bytes = resident_most.zip(resident_before).map(|(most, before)| most.saturating_sub(before));
    (outcome, Peak { group_bytes, resident_bytes, how })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_and_given_back_is_seen() {
        const BYTES: usize = 256 << 20;
        let (sum, peak) = measure_sampled(|samples| {
            let mut taken = vec![0u8; BYTES];
            taken.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            // A sample may have begun before all of it was touched.
            let enough = samples.load(Ordering::Relaxed) + 2;
            while samples.load(Ordering::Relaxed) < enough {
                thread::yield_now();
            }
            taken.iter().step_by(4096).map(|byte| usize::from(*byte)).sum::<usize>()
        });
        assert_eq!(sum, BYTES / 4096);
        let resident = usize::try_from(peak.resident_bytes.unwrap()).unwrap();
        // Other tests in this process release memory meanwhile.
        assert!(resident >= BYTES / 2, "{peak:?}");
        assert!(!peak.how.is_empty());
    }
}
