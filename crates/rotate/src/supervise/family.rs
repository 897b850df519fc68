//! The processes of an engine.
//!
//! Promises: a process counts only if it was seen in the family with the same start time, or if its group or parent
//! belongs now. A group id that was reused does not count. A process that left the group *and* lost its parent before a
//! scan is not found.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::proc::{Identity, Table};

/// A group id is not reused within this time after the last sign of the group.
const ROUND: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Family {
    leader: Identity,
    /// At the last scan: process id and start time.
    known: BTreeMap<u32, u64>,
    /// When the group last provably belonged to the engine.
    group_seen: Instant,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Members {
    /// Processes that hold resources, by ascending id.
    pub(super) alive: Vec<Identity>,
    /// Those outside the group.
    pub(super) strays: Vec<Identity>,
}

impl Family {
    /// For a process that ran at `now`.
    pub(super) fn of(leader: Identity, now: Instant) -> Self {
        Self { leader, known: BTreeMap::from([(leader.pid, leader.start_ticks)]), group_seen: now }
    }

    pub(super) fn leader(&self) -> Identity {
        self.leader
    }

    /// At the last scan.
    pub(super) fn known(&self) -> Vec<u32> {
        self.known.keys().copied().collect()
    }

    /// The leader was alive in its group.
    pub(super) fn saw_leader(&mut self, now: Instant) {
        self.group_seen = now;
    }

    /// By a process table read at `now`.
    pub(super) fn scan(&mut self, table: &Table, now: Instant) -> Members {
        let Identity { pid: group, start_ticks } = self.leader;
        let is_same = |pid: u32, start: u64| table.get(&pid).is_some_and(|stat| stat.start_ticks == start);
        self.known.retain(|pid, start| is_same(*pid, *start));

        let is_taken = table.get(&group).is_some_and(|stat| stat.start_ticks != start_ticks);
        let has_known = self.known.keys().any(|pid| table[pid].group == group);
        let is_recent = now.saturating_duration_since(self.group_seen) < ROUND;
        let is_ours = !is_taken && (has_known || is_recent);
        for (pid, stat) in table.iter().filter(|(_, stat)| is_ours && stat.group == group) {
            self.known.insert(*pid, stat.start_ticks);
            self.group_seen = now;
        }
        loop {
            let is_new =
                |pid: &u32, parent: u32| !self.known.contains_key(pid) && self.known.contains_key(&parent);
            let children: Vec<(u32, u64)> = table
                .iter()
                .filter(|(pid, stat)| is_new(pid, stat.parent))
                .map(|(pid, stat)| (*pid, stat.start_ticks))
                .collect();
            if children.is_empty() {
                break;
            }
            self.known.extend(children);
        }

        let mut found = Members::default();
        for (pid, start_ticks) in &self.known {
            let stat = table[pid];
            // This process is never a member.
            if stat.is_gone || *pid == std::process::id() {
                continue;
            }
            let one = Identity { pid: *pid, start_ticks: *start_ticks };
            found.alive.push(one);
            if !is_ours || stat.group != group {
                found.strays.push(one);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poorwill::proc::ProcessStat;

    /// Process id, start time, parent, group.
    fn table(all: &[(u32, u64, u32, u32)]) -> Table {
        let entry = |(pid, start_ticks, parent, group): &(u32, u64, u32, u32)| {
            let (start_ticks, parent, group) = (*start_ticks, *parent, *group);
            let (has_ended, is_gone, is_exiting) = (false, false, false);
            (*pid, ProcessStat { start_ticks, parent, group, has_ended, is_gone, is_exiting })
        };
        all.iter().map(entry).collect()
    }

    fn pids(found: &[Identity]) -> Vec<u32> {
        found.iter().map(|one| one.pid).collect()
    }

    const LEADER: Identity = Identity { pid: 4_000_100, start_ticks: 50 };
    const L: u32 = LEADER.pid;

    #[test]
    fn descendants_are_members_in_any_group() {
        let now = Instant::now();
        let mut family = Family::of(LEADER, now);
        let all =
            table(&[(1, 1, 0, 1), (L, 50, 1, L), (7, 60, L, L), (8, 61, 7, 8), (6, 62, 8, 8), (9, 63, 1, 9)]);
        let found = family.scan(&all, now);
        assert_eq!((pids(&found.alive), pids(&found.strays)), (vec![6, 7, 8, L], vec![6, 8]));
        // A known process stays known without its parents.
        let found = family.scan(&table(&[(1, 1, 0, 1), (6, 62, 1, 8), (7, 60, 1, L)]), now + 10 * ROUND);
        assert_eq!((pids(&found.alive), pids(&found.strays)), (vec![6, 7], vec![6]));
        // Unless the id was reused.
        let found = family.scan(&table(&[(6, 70, 1, 8), (7, 71, 1, L)]), now + 20 * ROUND);
        assert_eq!(found, Members::default());
    }

    #[test]
    fn a_reused_group_id_is_not_the_engine() {
        let now = Instant::now();
        let mut family = Family::of(LEADER, now);
        family.scan(&table(&[(L, 50, 1, L), (7, 60, L, L)]), now);
        // The leader's id was reused.
        let found = family.scan(&table(&[(L, 51, 1, L), (8, 61, 1, L)]), now);
        assert_eq!(found, Members::default());
        // No member is known, and the id may have been reused.
        let found = family.scan(&table(&[(8, 61, 1, L)]), now + ROUND);
        assert_eq!(found, Members::default());
    }

    #[test]
    fn recent_orphans_are_members() {
        let now = Instant::now();
        let mut family = Family::of(LEADER, now);
        let found = family.scan(&table(&[(8, 61, 1, L)]), now + ROUND / 2);
        assert_eq!((pids(&found.alive), pids(&found.strays)), (vec![8], vec![]));
        let found = family.scan(&table(&[(8, 61, 1, L), (9, 62, 1, L)]), now + 10 * ROUND);
        assert_eq!(pids(&found.alive), [8, 9]);
    }

    #[test]
    fn this_process_is_never_a_member() {
        let now = Instant::now();
        let own = std::process::id();
        let found = Family::of(LEADER, now).scan(&table(&[(L, 50, 1, L), (own, 60, L, L)]), now);
        assert_eq!(pids(&found.alive), [L]);
    }
}
