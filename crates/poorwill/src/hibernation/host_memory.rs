//! Host memory for checkpoints: compared with what there is before anything is locked.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use poorwill_driver::system::System;

use super::error::{HibernateError, HostMemorySource};

/// What running checkpoints of this process take.
#[derive(Debug)]
pub(super) struct HostMemoryPlan {
    system: System,
    promised_bytes: Mutex<u64>,
}

/// Host memory that a set takes, until it is dropped.
#[derive(Debug)]
pub(super) struct Promise<'a> {
    plan: &'a HostMemoryPlan,
    known_bytes: u64,
    total_bytes: Option<u64>,
}

impl Default for HostMemoryPlan {
    fn default() -> Self {
        Self { system: System::here(), promised_bytes: Mutex::default() }
    }
}

impl HostMemoryPlan {
    /// Compares what each process needs with the request's limit, the machine and the control groups.
    ///
    /// Processes without a figure count where a limit was set: then they are refused.
    pub(super) fn promise(
        &self,
        needs: &[(u32, Option<u64>)],
        limit_bytes: Option<u64>,
    ) -> Result<Promise<'_>, HibernateError> {
        let known_bytes = sum(needs.iter().filter_map(|(_, bytes)| *bytes));
        let unknown = needs.iter().find(|(_, bytes)| bytes.is_none()).map(|(pid, _)| *pid);
        let mut promised_bytes = self.promised_bytes();
        if let Some(limit_bytes) = limit_bytes {
            expect(known_bytes, Some(limit_bytes), HostMemorySource::Request)?;
            if let Some(pid) = unknown {
                return Err(HibernateError::UnknownHostMemory { pid, limit_bytes });
            }
        }
        let left = |bytes: u64| bytes.saturating_sub(*promised_bytes);
        expect(known_bytes, self.system.memory().available_bytes.map(left), HostMemorySource::System)?;
        for (pid, bytes) in self.by_group(needs) {
            let available = self.system.cgroup_memory_of(pid).available_bytes;
            expect(bytes, available, HostMemorySource::ControlGroup)?;
        }
        *promised_bytes += known_bytes;
        let total_bytes = unknown.is_none().then_some(known_bytes);
        Ok(Promise { plan: self, known_bytes, total_bytes })
    }

    /// What the processes of each control group need, with one of them.
    fn by_group(&self, needs: &[(u32, Option<u64>)]) -> Vec<(u32, u64)> {
        let mut groups: BTreeMap<String, (u32, u64)> = BTreeMap::new();
        for &(pid, bytes) in needs {
            let group = groups.entry(self.system.cgroups_of(pid)).or_insert((pid, 0));
            group.1 = group.1.saturating_add(bytes.unwrap_or_default());
        }
        groups.into_values().collect()
    }

    fn promised_bytes(&self) -> MutexGuard<'_, u64> {
        self.promised_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Promise<'_> {
    /// What all of them take. `None` if one has no figure.
    pub(super) fn total_bytes(&self) -> Option<u64> {
        self.total_bytes
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        *self.plan.promised_bytes() -= self.known_bytes;
    }
}

fn expect(
    needed_bytes: u64,
    available: Option<u64>,
    source_of: HostMemorySource,
) -> Result<(), HibernateError> {
    match available {
        Some(available_bytes) if needed_bytes > available_bytes => {
            Err(HibernateError::HostMemory { needed_bytes, available_bytes, source_of })
        }
        _ => Ok(()),
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A machine with 100 MiB, and a group of 10 MiB for process 2.
    fn machine() -> (tempfile::TempDir, HostMemoryPlan) {
        let root = tempfile::tempdir().unwrap();
        put(root.path(), "proc/meminfo", "MemAvailable: 102400 kB\n");
        put(root.path(), "sys/fs/cgroup/cgroup.controllers", "memory\n");
        put(root.path(), "sys/fs/cgroup/small/memory.max", "10485760\n");
        put(root.path(), "sys/fs/cgroup/small/memory.current", "0\n");
        for (pid, group) in [(1, "/"), (2, "/small"), (3, "/small")] {
            put(root.path(), &format!("proc/{pid}/cgroup"), &format!("0::{group}\n"));
        }
        let plan = HostMemoryPlan { system: System::at(root.path()), promised_bytes: Mutex::default() };
        (root, plan)
    }

    #[test]
    fn both_figures_are_named() {
        let (_root, plan) = machine();
        for (needs, limit, available, source) in [
            (vec![(1, Some(101 * MIB))], None, 100 * MIB, HostMemorySource::System),
            (vec![(1, Some(8 * MIB)), (2, Some(11 * MIB))], None, 10 * MIB, HostMemorySource::ControlGroup),
            (vec![(2, Some(6 * MIB)), (3, Some(6 * MIB))], None, 10 * MIB, HostMemorySource::ControlGroup),
            (vec![(1, Some(3 * MIB)), (2, Some(2 * MIB))], Some(4 * MIB), 4 * MIB, HostMemorySource::Request),
        ] {
            let error = plan.promise(&needs, limit).unwrap_err();
            let HibernateError::HostMemory { needed_bytes, available_bytes, source_of } = error else {
                panic!("{error}");
            };
            assert!(needed_bytes > available, "{needs:?}");
            assert_eq!((available_bytes, source_of), (available, source), "{needs:?}");
        }
        assert_eq!(*plan.promised_bytes(), 0);
    }

    #[test]
    fn sets_at_the_same_time_share_what_there_is() {
        let (_root, plan) = machine();
        let first = plan.promise(&[(1, Some(60 * MIB))], None).unwrap();
        assert!(plan.promise(&[(1, Some(60 * MIB))], None).is_err());
        drop(first);
        assert_eq!(plan.promise(&[(1, Some(60 * MIB))], None).unwrap().total_bytes(), Some(60 * MIB));
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let (_root, plan) = machine();
        let needs = [(1, Some(MIB)), (2, None)];
        assert_eq!(plan.promise(&needs, None).unwrap().total_bytes(), None);
        let error = plan.promise(&needs, Some(2 * MIB)).unwrap_err();
        assert!(matches!(error, HibernateError::UnknownHostMemory { pid: 2, .. }), "{error}");
    }
}
