//! The computer: its memory, and the settings of its kernel that matter for mapping and pinning it.

use std::path::Path;
use std::thread;

use poorwill_core::ByteSize;
use serde::Serialize;

use crate::machine::{page_bytes, text};

/// Linux's own default, which is enough.
const MAP_COUNT_MIN: u64 = 65530;

/// Where version 1 of control groups begins to mean that there is no limit.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// A computer. What its system does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostReport {
    /// Operating system, as in `linux`.
    pub os: String,
    /// Release of its kernel.
    pub kernel: Option<String>,
    /// Architecture, as in `x86_64`.
    pub architecture: String,
    /// Processors that this process may use.
    pub cpus: Option<usize>,
    /// Memory, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Memory that can be had without swapping, in bytes.
    pub memory_available_bytes: Option<u64>,
    /// Least limit of memory among the control groups of this process, in bytes. None where there is none.
    pub cgroup_memory_limit_bytes: Option<u64>,
    /// Size of a page, in bytes.
    pub page_bytes: u64,
    /// When the kernel uses transparent huge pages: `always`, `madvise` or `never`. None where it has none.
    pub transparent_huge_pages: Option<String>,
    /// How many mappings a process may have.
    pub max_map_count: Option<u64>,
    /// Version of this library.
    pub poorwill_version: String,
}

impl HostReport {
    /// Looks at this one.
    pub(super) fn examine() -> Self {
        let memory = text("/proc/meminfo").unwrap_or_default();
        let groups = text("/proc/self/cgroup").unwrap_or_default();
        let huge_pages = text("/sys/kernel/mm/transparent_hugepage/enabled");
        Self {
            os: std::env::consts::OS.into(),
            kernel: text("/proc/sys/kernel/osrelease"),
            architecture: std::env::consts::ARCH.into(),
            cpus: thread::available_parallelism().ok().map(usize::from),
            memory_total_bytes: meminfo_bytes(&memory, "MemTotal"),
            memory_available_bytes: meminfo_bytes(&memory, "MemAvailable"),
            cgroup_memory_limit_bytes: cgroup_limit_bytes(Path::new("/sys/fs/cgroup"), &groups),
            page_bytes: page_bytes(),
            transparent_huge_pages: huge_pages.and_then(|modes| chosen(&modes)),
            max_map_count: text("/proc/sys/vm/max_map_count").and_then(|count| count.parse().ok()),
            poorwill_version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    /// What about it will get in the way.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let (Some(limit), Some(available)) = (self.cgroup_memory_limit_bytes, self.memory_available_bytes)
            && limit < available
        {
            warnings.push(format!(
                "the memory limit of this process's control group is {}, and the computer has {} available; what \
                 sleeps at level 1 must fit in the limit",
                ByteSize(limit),
                ByteSize(available)
            ));
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

/// A line like `MemTotal:  16384 kB`.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let mut named = meminfo.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib: u64 = named.next()?.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// The one in brackets, as in `always [madvise] never`.
fn chosen(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    rest.split_once(']').map(|(mode, _)| mode.to_owned())
}

/// The least limit on the way from a process's groups up to the roots. `membership` is its `/proc/self/cgroup`.
fn cgroup_limit_bytes(root: &Path, membership: &str) -> Option<u64> {
    let limits = membership.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let (folder, file) = if controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            return None;
        };
        let groups = Path::new(group.trim_start_matches('/')).ancestors();
        groups.filter_map(|group| text(folder.join(group).join(file))?.parse::<u64>().ok()).min()
    });
    limits.min().filter(|bytes| *bytes < UNLIMITED_BYTES)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn figures_of_meminfo() {
        let meminfo =
            "MemTotal:       24684092 kB\nMemFree:   1 kB\nMemAvailable: 24122660 kB\nHugePages_Total: 3\n";
        assert_eq!(meminfo_bytes(meminfo, "MemTotal"), Some(24_684_092 << 10));
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable"), Some(24_122_660 << 10));
        for name in ["Mem", "HugePages_Total", "Swap", ""] {
            assert_eq!(meminfo_bytes(meminfo, name), None, "{name}");
        }
        assert_eq!(meminfo_bytes("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
    }

    #[test]
    fn the_chosen_mode() {
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always madvise never"), None);
        assert_eq!(chosen("[never").as_deref(), None);
    }

    #[test]
    fn limits_of_control_groups() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let limit = |membership: &str| cgroup_limit_bytes(root.path(), membership);
        assert_eq!(limit("0::/a/b\n"), None);
        put("a/b/memory.max", "max\n");
        assert_eq!(limit("0::/a/b\n"), None);
        // A group above may allow less than one's own.
        put("a/memory.max", "1048576\n");
        put("a/c/memory.max", "4194304\n");
        assert_eq!(limit("0::/a/b\n"), Some(1 << 20));
        assert_eq!(limit("0::/a/c"), Some(1 << 20));
        assert_eq!(limit("0::/"), None);

        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        put("memory/x/memory.limit_in_bytes", "2097152\n");
        assert_eq!(limit("9:cpu:/x\n4:memory:/y\n0::/\n"), None);
        assert_eq!(limit("9:cpu:/\n4:hugetlb,memory:/x\n0::/\n"), Some(2 << 20));
        for nonsense in ["", "memory", "4:memory", "::", ":::", "4:memory:/../../.."] {
            assert_eq!(limit(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn what_gets_in_the_way_is_said() {
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
}
