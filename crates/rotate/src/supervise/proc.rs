//! Which process is an engine that an earlier service started.

use std::io;

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
