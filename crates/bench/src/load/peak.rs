//! The most memory that something takes while it runs: by the control group's own count, which has the page cache in it,
//! and by the process's.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, thread};

use crate::process::resident_bytes;

/// How often both are looked at.
const LOOK: Duration = Duration::from_millis(2);

/// The most that was taken, beyond what there was before, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peak {
    /// By the control group of this process; none where it has none that counts.
    pub(super) group_bytes: Option<u64>,
    /// Pages of the process's own.
    pub(super) resident_bytes: Option<u64>,
    /// How the group's count was taken, or why it was not.
    pub(super) how: String,
}

/// Where a group says what it uses, and what it has used at most.
struct Group {
    used: String,
    most: String,
}

impl Group {
    /// The group of this process, as the system or a container shows it.
    fn of_this_process() -> Option<Self> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let mut places = Vec::new();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
            let group = group.trim_end_matches('/');
            if controllers.split(',').any(|controller| controller == "memory") {
                let files = ["memory.usage_in_bytes", "memory.max_usage_in_bytes"];
                // In a container its own group is what is mounted, whatever it is called outside.
                places.extend([group, ""].map(|group| (format!("/sys/fs/cgroup/memory{group}"), files)));
            } else if controllers.is_empty() {
                let files = ["memory.current", "memory.peak"];
                places.extend([group, ""].map(|group| (format!("/sys/fs/cgroup{group}"), files)));
            }
        }
        let groups = places.into_iter().map(|(folder, [used, most])| Self {
            used: format!("{folder}/{used}"),
            most: format!("{folder}/{most}"),
        });
        groups.into_iter().find(|group| number(&group.used).is_some())
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// What something came to, and the most memory that was taken meanwhile.
pub(super) fn during<T>(action: impl FnOnce() -> T) -> (T, Peak) {
    during_looks(|_| action())
}

/// The same, where the action is told how often was looked.
fn during_looks<T>(action: impl FnOnce(&AtomicUsize) -> T) -> (T, Peak) {
    let group = Group::of_this_process();
    let used = || group.as_ref().and_then(|group| number(&group.used));
    let most = || group.as_ref().and_then(|group| number(&group.most));
    let (used_before, most_before, resident_before) = (used(), most(), resident_bytes());
    let (is_over, looks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let look = || {
        let (mut used_most, mut resident_most) = (None, None);
        loop {
            // Once more when it is over.
            let is_last = is_over.load(Ordering::Relaxed);
            used_most = used_most.max(used());
            resident_most = resident_most.max(resident_bytes());
            looks.fetch_add(1, Ordering::Relaxed);
            if is_last {
                return (used_most, resident_most);
            }
            thread::sleep(LOOK);
        }
    };
    let (outcome, (used_most, resident_most)) = thread::scope(|scope| {
        let looking = thread::Builder::new().spawn_scoped(scope, look);
        let outcome = action(&looks);
        is_over.store(true, Ordering::Relaxed);
        let looked = looking.ok().and_then(|looking| looking.join().ok());
        (outcome, looked.unwrap_or_else(|| (used(), resident_bytes())))
    });
    // Where the group's own mark has moved, that is what was reached, and else at least what was seen.
    let marked = most().filter(|most| most_before.is_some_and(|before| *most > before));
    let group_bytes = marked.or(used_most).zip(used_before).map(|(most, before)| most.saturating_sub(before));
    let how = match (&group, marked) {
        (None, _) => "no control group counts this process's memory".to_owned(),
        (Some(group), Some(_)) => format!("{}, less what was used before", group.most),
        (Some(group), None) => format!("{}, looked at every 2 ms, less what was used before", group.used),
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
        let (sum, peak) = during_looks(|looks| {
            let mut taken = vec![0u8; BYTES];
            taken.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            // A look may have begun before all of it was taken; the next one has not.
            let enough = looks.load(Ordering::Relaxed) + 2;
            while looks.load(Ordering::Relaxed) < enough {
                thread::yield_now();
            }
            taken.iter().step_by(4096).map(|byte| usize::from(*byte)).sum::<usize>()
        });
        assert_eq!(sum, BYTES / 4096);
        let resident = usize::try_from(peak.resident_bytes.unwrap()).unwrap();
        // Others run in this process, and give back while this goes on.
        assert!(resident >= BYTES / 2, "{peak:?}");
        assert!(!peak.how.is_empty());
    }
}
