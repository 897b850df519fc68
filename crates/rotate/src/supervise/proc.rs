//! Which process is an engine that an earlier service started.

use std::io;
use std::time::Duration;

pub(super) use poorwill::proc::{
    ProcessEnvironment, ProcessKey as Identity, ProcessTable as Table, boot, is_alive, key as identity, table,
};

/// The process with `mark` (`NAME=VALUE`) in its environment: of several group leaders, the oldest.
pub(super) fn marked(mark: &str) -> io::Result<Option<Identity>> {
    let table = table()?;
    // Other users' environments cannot be read, and their processes do not matter.
    let has_it = |pid: u32| ProcessEnvironment::of(pid).has(mark);
    let leaders = table.iter().filter(|(pid, stat)| stat.group == **pid && !stat.is_gone && has_it(**pid));
    let first = leaders.min_by_key(|(_, stat)| stat.start_ticks);
    Ok(first.map(|(pid, stat)| Identity { pid: *pid, start_ticks: stat.start_ticks }))
}

/// What these processes have used of all cores. Those that have ended count no more.
pub(super) fn cpu_time(pids: &[u32]) -> Duration {
    let ticks = |pid: &u32| ticks_of(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?);
    let all: u64 = pids.iter().filter_map(ticks).sum();
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Duration::from_millis(all.saturating_mul(1000) / per_second)
}

/// The user's and the system's time of a line of `/proc/PID/stat`. The name, in parentheses, may have any text.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let mut fields = behind_name.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()?.saturating_add(next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_process_is_read_behind_its_name() {
        let line = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 250 50 9 9 20 0 1 0 100 1 1";
        assert_eq!(ticks_of(line), Some(300));
        assert_eq!(ticks_of("7 (a) S 1 7"), None);
        assert_eq!(cpu_time(&[]), Duration::ZERO);
    }
}
