//! Processes by `/proc`.
//!
//! A process id together with its start time is unique until the machine restarts; ids alone are reused.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};

use rustix::io::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Identity {
    pub(super) pid: u32,
    /// Clock ticks from the machine's start.
    pub(super) started_ticks: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) started_ticks: u64,
    /// 0 where there is none, as for a process that the kernel is removing.
    pub(super) parent: u32,
    /// As `parent`.
    pub(super) group: u32,
    /// Whether it holds no resources and only waits to be reaped.
    pub(super) is_gone: bool,
}

/// By process id.
pub(super) type Table = BTreeMap<u32, Stat>;

/// `None` if the id is free.
pub(super) fn stat(pid: u32) -> io::Result<Option<Stat>> {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => parse(&text).map(Some).ok_or_else(|| {
            let words = format!("/proc/{pid}/stat is not understood");
            io::Error::new(ErrorKind::InvalidData, words)
        }),
        Err(error) if has_ended(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a read failed because the process has ended.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

pub(super) fn identity(pid: u32) -> io::Result<Option<Identity>> {
    Ok(stat(pid)?.map(|stat| Identity { pid, started_ticks: stat.started_ticks }))
}

/// Whether it runs and holds resources.
pub(super) fn is_alive(one: Identity) -> io::Result<bool> {
    Ok(stat(one.pid)?.is_some_and(|stat| stat.started_ticks == one.started_ticks && !stat.is_gone))
}

/// All processes visible to this user. Takes milliseconds for some hundreds of them.
pub(super) fn table() -> io::Result<Table> {
    let mut table = Table::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        match stat(pid) {
            Ok(Some(stat)) => drop(table.insert(pid, stat)),
            Ok(None) => {}
            // Another user's process, on systems that hide those.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
            Err(error) => return Err(error),
        }
    }
    Ok(table)
}

/// The process with `mark` (`NAME=VALUE`) in its environment: of several group leaders, the oldest.
pub(super) fn marked(mark: &str) -> io::Result<Option<Identity>> {
    let has_it = |pid: u32| {
        // Other users' environments cannot be read, and their processes do not matter.
        let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    let table = table()?;
    let leaders = table.iter().filter(|(pid, stat)| stat.group == **pid && !stat.is_gone && has_it(**pid));
    let first = leaders.min_by_key(|(_, stat)| stat.started_ticks);
    Ok(first.map(|(pid, stat)| Identity { pid: *pid, started_ticks: stat.started_ticks }))
}

/// The id of this boot; empty where the system has none.
pub(super) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().into())
}

/// Parses `PID (NAME) STATE PARENT GROUP …`; the name may contain anything.
fn parse(text: &[u8]) -> Option<Stat> {
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(text.get(end + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let threads: i64 = fields.get(17)?.parse().ok()?;
    // While the kernel removes a reaped process, it has neither parent nor group.
    let is_taken_away = *fields.get(2)? == "-1";
    Some(Stat {
        started_ticks: fields.get(19)?.parse().ok()?,
        parent: fields.get(1)?.parse().ok()?,
        group: if is_taken_away { 0 } else { fields.get(2)?.parse().ok()? },
        // The first thread may end before the others, which still hold the memory.
        is_gone: is_taken_away || matches!(*fields.first()?, "Z" | "X" | "x") && threads <= 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str, state: &str, threads: u32) -> String {
        format!(
            "41 ({name}) {state} 7 40 3 0 -1 4 9 0 0 0 0 0 0 0 20 0 {threads} 0 3175199 3133440 360 1 2\n"
        )
    }

    #[test]
    fn names_may_have_anything_in_them() {
        for name in ["cat", "a) Z 1 2 3", "(", ") ) (", "\u{e9}"] {
            let stat = parse(line(name, "S", 1).as_bytes()).unwrap();
            let expected = Stat { started_ticks: 3_175_199, parent: 7, group: 40, is_gone: false };
            assert_eq!(stat, expected, "{name}");
        }
        assert!(parse(b"41 (\xff\xfe) R 7 40 3 0 -1 4 9 0 0 0 0 0 0 0 20 0 1 0 5 1 1").is_some());
    }

    #[test]
    fn one_whose_other_threads_go_on_is_not_gone() {
        let is_gone = |state, threads| parse(line("x", state, threads).as_bytes()).unwrap().is_gone;
        assert!(is_gone("Z", 1) && is_gone("X", 0));
        assert!(!is_gone("Z", 2) && !is_gone("D", 1) && !is_gone("T", 1));
    }

    /// As the kernel shows processes that were just reaped.
    #[test]
    fn one_that_is_taken_away_is_gone() {
        for state in ["X", "Z", "R"] {
            let text =
                format!("41 (x) {state} 0 -1 -1 0 -1 4 9 0 0 0 0 0 0 0 20 0 0 0 3175199 0 0 360 1 2\n");
            let expected = Stat { started_ticks: 3_175_199, parent: 0, group: 0, is_gone: true };
            assert_eq!(parse(text.as_bytes()), Some(expected), "{state}");
        }
    }

    #[test]
    fn a_truncated_stat_is_no_process() {
        let whole = line("x", "S", 1);
        let whole = whole.trim_end();
        for end in 0..whole.find("3175199").unwrap() {
            assert_eq!(parse(&whole.as_bytes()[..end]), None, "{end}");
        }
    }

    #[test]
    fn this_process_is_found() {
        let own = std::process::id();
        let one = identity(own).unwrap().unwrap();
        assert!(is_alive(one).unwrap() && table().unwrap().contains_key(&own));
        let other = Identity { started_ticks: one.started_ticks + 1, ..one };
        assert!(!is_alive(other).unwrap());
    }
}
