//! What the command and the helper ask of the hibernator.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use poorwill::hibernation::{
    HibernateError, HibernateRequest, Hibernator, HibernatorOptions, Processes, ResumeReport,
};

use super::outcomes::RecoveredSets;
use crate::failure;

/// The folder of processes on the host device, for engines that are started without arguments of ours.
pub(super) const HOST_PROCESSES: &str = "POORWILL_HOST_PROCESSES";

pub(super) fn request(
    wait_max: Duration,
    host_bytes_max: Option<u64>,
    without_space_check: bool,
) -> HibernateRequest {
    let request = HibernateRequest::within(wait_max).limited_to(host_bytes_max);
    if without_space_check { request.without_space_check() } else { request }
}

pub(super) fn resume(
    hibernator: &Hibernator,
    pids: &[u32],
    without_space_check: bool,
) -> Result<ResumeReport, HibernateError> {
    if without_space_check { hibernator.resume_without_space_check(pids) } else { hibernator.resume(pids) }
}

pub(super) fn options(processes: Option<PathBuf>, journal: Option<PathBuf>) -> HibernatorOptions {
    let folder = processes
        .or_else(|| std::env::var_os(HOST_PROCESSES).filter(|name| !name.is_empty()).map(PathBuf::from));
    let options = HibernatorOptions::of(folder.map_or(Processes::Cuda, Processes::Host));
    match journal {
        Some(journal) => options.remembering_in(journal),
        None => options,
    }
}

/// Entries that were warned of. A process has one hibernator.
static WARNED_OF: AtomicUsize = AtomicUsize::new(0);

/// Of those that came since the last call.
pub(super) fn warn_of_unreadable(hibernator: &Hibernator) {
    let entries = hibernator.unreadable_entries();
    let known = WARNED_OF.fetch_max(entries.len(), Ordering::Relaxed);
    for path in entries.iter().skip(known) {
        failure::warn(&format!(
            "an entry of the journal is not understood, and was set aside: {}; its processes may still hibernate, or be \
             locked: have it readable under a name that ends in .set, and recover with the version that wrote it",
            path.display()
        ));
    }
}

pub(super) fn recover(hibernator: &Hibernator) -> Result<RecoveredSets, HibernateError> {
    let recovered = hibernator.recover()?;
    warn_of_unreadable(hibernator);
    Ok(RecoveredSets { recovered, set_aside: hibernator.unreadable_entries() })
}
