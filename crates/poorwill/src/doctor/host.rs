//! The computer's memory, and the kernel settings for mapping and page-locking it.

use std::thread;

use poorwill_core::ByteSize;
#[cfg(target_os = "linux")]
use poorwill_driver::system::{System, proc};
use serde::Serialize;

/// Linux's default, which is enough.
const MAP_COUNT_MIN: u64 = 65530;

/// A computer. `None` where its system reports nothing.
///
/// ```
/// use poorwill::doctor::{Plan, examine};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let plan = Plan::default().on("host:1GiB".parse::<poorwill::DeviceSpec>()?);
/// assert!(examine(&plan)?.host.page_bytes >= 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostReport {
    /// Operating system, as in `linux`.
    pub os: String,
    /// Kernel release.
    pub kernel: Option<String>,
    /// As in `x86_64`.
    pub architecture: String,
    /// Processors of this process.
    pub cpus: Option<usize>,
    /// Memory, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Memory available without swapping.
    pub memory_available_bytes: Option<u64>,
    /// Smallest limit of this process's control groups; `None` without one.
    pub cgroup_memory_limit_bytes: Option<u64>,
    /// Least memory left below such a limit, after reclaiming cached files.
    pub cgroup_memory_remaining_bytes: Option<u64>,
    /// Memory that this process may lock; `None` without a limit.
    pub memlock_bytes: Option<u64>,
    /// Page size.
    pub page_bytes: u64,
    /// `always`, `madvise` or `never`; `None` without transparent huge pages.
    pub transparent_huge_pages: Option<String>,
    /// Reserved and unused huge pages.
    pub reserved_huge_pages_bytes: Option<u64>,
    /// NUMA nodes with processors.
    pub numa_nodes: Option<usize>,
    /// NUMA nodes with memory but no processors: GPU memory that the system manages.
    pub numa_nodes_without_cpus: Vec<u32>,
    /// Mappings a process may have.
    pub max_map_count: Option<u64>,
    /// Version of this library.
    pub poorwill_version: String,
}

impl HostReport {
    pub(super) fn examine() -> Self {
        let report = Self {
            os: std::env::consts::OS.into(),
            kernel: None,
            architecture: std::env::consts::ARCH.into(),
            cpus: thread::available_parallelism().ok().map(usize::from),
            memory_total_bytes: None,
            memory_available_bytes: None,
            cgroup_memory_limit_bytes: None,
            cgroup_memory_remaining_bytes: None,
            memlock_bytes: None,
            page_bytes: rustix::param::page_size() as u64,
            transparent_huge_pages: None,
            reserved_huge_pages_bytes: None,
            numa_nodes: None,
            numa_nodes_without_cpus: Vec::new(),
            max_map_count: None,
            poorwill_version: env!("CARGO_PKG_VERSION").into(),
        };
        #[cfg(target_os = "linux")]
        let report = report.with(&System::here());
        report
    }

    #[cfg(target_os = "linux")]
    fn with(self, system: &System) -> Self {
        let (memory, group) = (system.memory(), system.cgroup_memory());
        let nodes = system.numa_nodes();
        Self {
            kernel: proc::kernel(),
            memory_total_bytes: memory.total_bytes,
            memory_available_bytes: memory.available_bytes,
            cgroup_memory_limit_bytes: group.limit_bytes,
            cgroup_memory_remaining_bytes: group.available_bytes,
            memlock_bytes: system.locked_memory().soft.bytes(),
            transparent_huge_pages: memory.transparent_huge_pages,
            reserved_huge_pages_bytes: memory.huge_pages_free_bytes,
            numa_nodes: nodes.as_ref().map(|nodes| nodes.with_cpus.len()),
            numa_nodes_without_cpus: nodes.map(|nodes| nodes.without_cpus).unwrap_or_default(),
            max_map_count: system.max_map_count(),
            ..self
        }
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let (Some(limit), Some(available)) = (self.cgroup_memory_limit_bytes, self.memory_available_bytes)
        {
            let left = self.cgroup_memory_remaining_bytes.unwrap_or(limit).min(limit);
            if left < available {
                warnings.push(format!(
                    "the control group of this process leaves it {} of a limit of {}, and the computer has {} \
                     available; what sleeps at level 1 must fit in what is left",
                    ByteSize(left),
                    ByteSize(limit),
                    ByteSize(available)
                ));
            }
        }
        if !matches!(self.transparent_huge_pages.as_deref(), Some("always" | "madvise")) {
            warnings.push(
                "the kernel uses no transparent huge pages, so host memory takes longer to get and to pin; write \
                 `madvise` to /sys/kernel/mm/transparent_hugepage/enabled"
                    .into(),
            );
        }
        if let Some(count) = self.max_map_count
            && count < MAP_COUNT_MIN
        {
            warnings.push(format!(
                "a process may have {count} mappings, and the host device needs one for each piece of memory; \
                 raise it with `sysctl vm.max_map_count={MAP_COUNT_MIN}`"
            ));
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obstacles_are_warnings() {
        let good = HostReport {
            cgroup_memory_limit_bytes: None,
            memory_available_bytes: Some(8 << 30),
            transparent_huge_pages: Some("madvise".into()),
            max_map_count: Some(65530),
            ..HostReport::examine()
        };
        assert_eq!(good.warnings(), [""; 0]);
        assert_eq!(
            HostReport { cgroup_memory_limit_bytes: Some(8 << 30), ..good.clone() }.warnings(),
            [""; 0]
        );
        for (bad, words) in [
            (
                HostReport { cgroup_memory_limit_bytes: Some(1 << 30), ..good.clone() },
                ["limit", "1 GiB", "8 GiB"],
            ),
            (
                HostReport { transparent_huge_pages: None, ..good.clone() },
                ["huge pages", "madvise", "/enabled"],
            ),
            (
                HostReport { transparent_huge_pages: Some("never".into()), ..good.clone() },
                ["huge pages", "madvise", "/enabled"],
            ),
            (
                HostReport { max_map_count: Some(1000), ..good.clone() },
                ["1000", "sysctl", "vm.max_map_count=65530"],
            ),
        ] {
            let warnings = bad.warnings();
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert!(words.iter().all(|word| warnings[0].contains(word)), "{warnings:?}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_report_follows_the_system() {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [
            (
                "proc/meminfo",
                "MemTotal: 8 kB\nMemAvailable: 4 kB\nHugePages_Free: 2\nHugepagesize: 2048 kB\n",
            ),
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/limits", "Max locked memory 65536 unlimited bytes\n"),
            ("proc/sys/vm/max_map_count", "100\n"),
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/a/memory.max", "4096\n"),
            ("sys/fs/cgroup/a/memory.current", "1024\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
            ("sys/devices/system/node/has_cpu", "0-1\n"),
            ("sys/devices/system/node/has_memory", "0-2\n"),
        ] {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let here = HostReport::examine();
        let expected = HostReport {
            memory_total_bytes: Some(8192),
            memory_available_bytes: Some(4096),
            cgroup_memory_limit_bytes: Some(4096),
            cgroup_memory_remaining_bytes: Some(3072),
            memlock_bytes: Some(64 << 10),
            transparent_huge_pages: Some("never".into()),
            reserved_huge_pages_bytes: Some(4 << 20),
            numa_nodes: Some(2),
            numa_nodes_without_cpus: vec![2],
            max_map_count: Some(100),
            ..here.clone()
        };
        assert_eq!(here.with(&System::at(root.path())), expected);
    }
}
