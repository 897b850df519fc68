//! Limits of this process's control groups on host memory and GPU memory.
//!
//! A group's limit and those of its ancestors apply, so the lowest counts. Both versions are read, also side
//! by side. In a container, the group's path is often the outer system's, and missing here. Then the mounted
//! root is the container's own group.

use std::path::{Component, Path, PathBuf};

use super::{PciAddress, System};

/// Mount points of version 2: alone, or beside version 1.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

const UNIFIED_HAS: &str = "cgroup.controllers";

const MEMORY: &str = "/sys/fs/cgroup/memory";

/// From here on, version 1 means no limit.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// Prefixes of a device's own memory regions; others are host memory it may use. NVIDIA says `vidmem`, the
/// kernel's drivers `vram`.
const OWN_MEMORY: [&str; 2] = ["vidmem", "vram"];

/// Host memory that control groups allow. Each figure is the lowest of all groups, `None` where no group has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// The limit, above which processes are killed.
    pub limit_bytes: Option<u64>,
    /// Where the kernel begins to throttle and reclaim (`memory.high`), if below the limit.
    pub high_bytes: Option<u64>,
    /// What is left below a limit. Cached files count as used.
    pub remaining_bytes: Option<u64>,
    /// What is left, counting inactive file caches as free.
    pub available_bytes: Option<u64>,
}

/// GPU memory that control groups allow, by version 2's `dmem` controller. Figures are as for
/// [`GroupMemory`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupDeviceMemory {
    /// The limit, above which allocations fail.
    pub limit_bytes: Option<u64>,
    /// What is left below a limit.
    pub remaining_bytes: Option<u64>,
}

impl System {
    /// Host memory that this process's groups allow.
    #[must_use]
    pub fn cgroup_memory(&self) -> GroupMemory {
        self.cgroup_memory_in(&self.own_cgroups())
    }

    /// Host memory that the groups of a process allow.
    #[must_use]
    pub fn cgroup_memory_of(&self, pid: u32) -> GroupMemory {
        self.cgroup_memory_in(&self.cgroups_of(pid))
    }

    /// The groups of a process, as the system writes them. Empty for a process that is gone.
    #[must_use]
    pub fn cgroups_of(&self, pid: u32) -> String {
        self.text(format!("/proc/{pid}/cgroup")).unwrap_or_default()
    }

    fn own_cgroups(&self) -> String {
        self.text("/proc/self/cgroup").unwrap_or_default()
    }

    fn cgroup_memory_in(&self, membership: &str) -> GroupMemory {
        let mut least = GroupMemory::default();
        let groups = [(self.unified(membership), &VERSION_2), (memory_groups(membership), &VERSION_1)];
        for (folders, files) in groups {
            for folder in folders {
                self.group_memory(&folder, files, &mut least);
            }
        }
        least.high_bytes =
            least.high_bytes.filter(|high| least.limit_bytes.is_none_or(|limit| *high < limit));
        least
    }

    /// Memory of this GPU that this process's groups allow.
    #[must_use]
    pub fn cgroup_device_memory(&self, gpu: PciAddress) -> GroupDeviceMemory {
        let mut least = GroupDeviceMemory::default();
        for folder in self.unified(&self.own_cgroups()) {
            let regions = |file| self.text(folder.join(file)).unwrap_or_default();
            let (limits, used) = (regions("dmem.max"), regions("dmem.current"));
            for (region, limit_bytes) in own_memory(&limits, gpu) {
                let used = own_memory(&used, gpu).find(|(used, _)| *used == region);
                lower(&mut least.limit_bytes, Some(limit_bytes));
                lower(&mut least.remaining_bytes, used.map(|(_, used)| limit_bytes.saturating_sub(used)));
            }
        }
        least
    }

    fn group_memory(&self, folder: &Path, files: &Files, least: &mut GroupMemory) {
        let bytes = |file: &str| self.number(folder.join(file)).filter(|bytes| *bytes < UNLIMITED_BYTES);
        lower(&mut least.high_bytes, files.high.and_then(bytes));
        let Some(limit_bytes) = bytes(files.limit) else { return };
        lower(&mut least.limit_bytes, Some(limit_bytes));
        let Some(used_bytes) = self.number(folder.join(files.used)) else { return };
        let statistics = self.text(folder.join("memory.stat")).unwrap_or_default();
        let cached = statistics.lines().find_map(|line| line.strip_prefix(files.cached)?.trim().parse().ok());
        let kept_bytes = used_bytes.saturating_sub(cached.unwrap_or_default());
        lower(&mut least.remaining_bytes, Some(limit_bytes.saturating_sub(used_bytes)));
        lower(&mut least.available_bytes, Some(limit_bytes.saturating_sub(kept_bytes)));
    }

    fn unified(&self, membership: &str) -> Vec<PathBuf> {
        let is_mounted = |mount: &&str| self.path(mount).join(UNIFIED_HAS).exists();
        let Some(mount) = UNIFIED.into_iter().find(is_mounted) else { return Vec::new() };
        groups(membership, mount, str::is_empty)
    }
}

fn memory_groups(membership: &str) -> Vec<PathBuf> {
    groups(membership, MEMORY, |controllers| controllers.split(',').any(|controller| controller == "memory"))
}

/// From lines of `/proc/PID/cgroup`: `4:cpu,memory:/a/b`, or `0::/a/b` in version 2.
fn groups(membership: &str, mount: &str, is_meant: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let groups = membership.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        is_meant(controllers).then_some(group)
    });
    groups.flat_map(|group| upwards(mount, group)).collect()
}

/// A group outside the mount (`/../a`) gives only the root.
fn upwards(mount: &str, group: &str) -> Vec<PathBuf> {
    let group = Path::new(group.trim_start_matches('/'));
    let is_inside = group.components().all(|component| matches!(component, Component::Normal(_)));
    let group = if is_inside { group } else { Path::new("") };
    group.ancestors().map(|group| Path::new(mount).join(group)).collect()
}

/// Lines on this GPU's own memory, as in `nvidia/0000:4e:00.0/vidmem 1048576`.
fn own_memory(regions: &str, gpu: PciAddress) -> impl Iterator<Item = (&str, u64)> {
    regions.lines().filter_map(move |line| {
        let mut words = line.split_whitespace();
        let (region, bytes) = (words.next()?, words.next()?.parse().ok()?);
        let mut parts = region.split('/').skip_while(|part| part.parse() != Ok(gpu)).skip(1);
        let is_own = parts.next().is_some_and(|part| OWN_MEMORY.iter().any(|own| part.starts_with(own)));
        (is_own && words.next().is_none()).then_some((region, bytes))
    })
}

fn lower(least: &mut Option<u64>, bytes: Option<u64>) {
    *least = least.iter().copied().chain(bytes).min();
}

struct Files {
    limit: &'static str,
    used: &'static str,
    high: Option<&'static str>,
    /// In `memory.stat`.
    cached: &'static str,
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    high: None,
    cached: "total_inactive_file ",
};

const VERSION_2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    high: Some("memory.high"),
    cached: "inactive_file ",
};

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    fn unified(mount: &str, membership: &str) -> Fake {
        let fake = Fake::new();
        fake.put(&format!("{mount}/{UNIFIED_HAS}"), "memory dmem\n");
        fake.put("/proc/self/cgroup", membership);
        fake
    }

    fn gpu() -> PciAddress {
        "00000000:4E:00.0".parse().unwrap()
    }

    #[test]
    fn a_group_above_may_allow_less() {
        for mount in UNIFIED {
            let fake = unified(mount, "0::/a/b\n");
            let put = |path: &str, text: &str| fake.put(&format!("{mount}/{path}"), text);
            let memory = || fake.system().cgroup_memory();
            assert_eq!(memory(), GroupMemory::default());
            put("a/b/memory.max", "max\n");
            put("a/b/memory.current", "1024\n");
            assert_eq!(memory(), GroupMemory::default());
            put("a/memory.max", "1048576\n");
            put("a/c/memory.max", "4096\n");
            assert_eq!(memory(), GroupMemory { limit_bytes: Some(1 << 20), ..GroupMemory::default() });
            put("a/b/memory.max", "2097152\n");
            assert_eq!(memory().limit_bytes, Some(1 << 20));
            assert_eq!(memory().remaining_bytes, Some((2 << 20) - 1024));
            put("a/memory.current", "786432\n");
            assert_eq!(memory().remaining_bytes, Some(256 << 10));
            put("a/memory.current", "9999999\n");
            assert_eq!(memory().remaining_bytes, Some(0));
        }
    }

    #[test]
    fn cached_files_give_way() {
        let fake = unified(UNIFIED[0], "0::/a");
        fake.put("/sys/fs/cgroup/a/memory.max", "1000");
        fake.put("/sys/fs/cgroup/a/memory.current", "900");
        fake.put("/sys/fs/cgroup/a/memory.stat", "file 700\nactive_file 100\ninactive_file 600\n");
        let memory = fake.system().cgroup_memory();
        assert_eq!((memory.remaining_bytes, memory.available_bytes), (Some(100), Some(700)));
        fake.put("/sys/fs/cgroup/a/memory.stat", "inactive_file x\n");
        assert_eq!(fake.system().cgroup_memory().available_bytes, Some(100));
    }

    #[test]
    fn throttling_is_reported_where_it_comes_first() {
        let fake = unified(UNIFIED[0], "0::/a/b");
        let high = || fake.system().cgroup_memory().high_bytes;
        fake.put("/sys/fs/cgroup/a/b/memory.high", "max\n");
        assert_eq!(high(), None);
        fake.put("/sys/fs/cgroup/a/memory.high", "2000\n");
        assert_eq!(high(), Some(2000));
        fake.put("/sys/fs/cgroup/a/b/memory.max", "3000\n");
        assert_eq!(high(), Some(2000));
        fake.put("/sys/fs/cgroup/a/b/memory.max", "1000\n");
        assert_eq!(high(), None);
    }

    #[test]
    fn limits_of_the_first_version() {
        let fake = Fake::new();
        let memory = |membership: &str| {
            fake.put("/proc/self/cgroup", membership);
            fake.system().cgroup_memory()
        };
        fake.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        fake.put("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2097152\n");
        fake.put("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "1048576\n");
        fake.put("/sys/fs/cgroup/memory/x/memory.stat", "inactive_file 1\ntotal_inactive_file 524288\n");
        assert_eq!(memory("9:cpu:/x\n4:memory:/y\n0::/\n"), GroupMemory::default());
        let expected = GroupMemory {
            limit_bytes: Some(2 << 20),
            high_bytes: None,
            remaining_bytes: Some(1 << 20),
            available_bytes: Some(3 << 19),
        };
        assert_eq!(memory("9:cpu:/\n4:hugetlb,memory:/x\n0::/\n"), expected);
        for nonsense in ["", "memory", "4:memory", "::", ":::", "4:memory:/../../..", "4:memory:/x/../../y"] {
            assert_eq!(memory(nonsense), GroupMemory::default(), "{nonsense}");
        }

        // Groups of version 2 may also apply.
        fake.put("/sys/fs/cgroup/unified/cgroup.controllers", "");
        fake.put("/sys/fs/cgroup/unified/z/memory.max", "1024\n");
        assert_eq!(memory("4:memory:/x\n0::/z\n").limit_bytes, Some(1024));
    }

    #[test]
    fn in_a_container_the_top_is_its_own() {
        for membership in ["0::/\n", "0::/system.slice/docker-0123.scope\n", "0::/../../kubepods/pod1\n"] {
            let fake = unified(UNIFIED[0], membership);
            fake.put("/sys/fs/cgroup/memory.max", "4096\n");
            fake.put("/sys/fs/cgroup/dmem.max", "nvidia/0000:4e:00.0/vidmem 1024\n");
            assert_eq!(fake.system().cgroup_memory().limit_bytes, Some(4096), "{membership}");
            assert_eq!(fake.system().cgroup_device_memory(gpu()).limit_bytes, Some(1024), "{membership}");
        }
    }

    #[test]
    fn memory_of_a_gpu() {
        let fake = unified(UNIFIED[0], "0::/pod/container\n");
        let memory = || fake.system().cgroup_device_memory(gpu());
        let root = "/sys/fs/cgroup";
        fake.put(
            &format!("{root}/dmem.capacity"),
            "nvidia/0000:4e:00.0/vidmem 9000\ndrm/0000:03:00.0/vram0 7\n",
        );
        assert_eq!(memory(), GroupDeviceMemory::default(), "what there is to divide is no limit");
        fake.put(
            &format!("{root}/pod/dmem.max"),
            "drm/0000:03:00.0/vram0 5\nnvidia/0000:4E:00.0/vidmem 4000\n",
        );
        fake.put(
            &format!("{root}/pod/dmem.current"),
            "drm/0000:03:00.0/vram0 1\nnvidia/0000:4E:00.0/vidmem 3500\n",
        );
        fake.put(&format!("{root}/pod/container/dmem.max"), "nvidia/0000:4e:00.0/vidmem max\n");
        fake.put(&format!("{root}/pod/container/dmem.current"), "nvidia/0000:4e:00.0/vidmem 300\n");
        let expected = |limit_bytes, remaining_bytes| GroupDeviceMemory {
            limit_bytes: Some(limit_bytes),
            remaining_bytes: Some(remaining_bytes),
        };
        assert_eq!(memory(), expected(4000, 500));
        // The group's own limit may be lower, and its usage higher.
        fake.put(&format!("{root}/pod/container/dmem.max"), "nvidia/0000:4e:00.0/vidmem 600\n");
        assert_eq!(memory(), expected(600, 300));
        fake.put(&format!("{root}/pod/container/dmem.current"), "nvidia/0000:4e:00.0/vidmem 601\n");
        assert_eq!(memory(), expected(600, 0));
    }

    #[test]
    fn only_lines_about_the_gpus_own_memory_count() {
        let lines = |text: &'static str| own_memory(text, gpu()).collect::<Vec<_>>();
        for line in [
            "",
            "nvidia/0000:4e:00.0/vidmem",
            "nvidia/0000:4e:00.0/vidmem max",
            "nvidia/0000:4e:00.0/vidmem -1",
            "nvidia/0000:4e:00.0/vidmem 1 2",
            "nvidia/0000:4e:00.0/vidmem 18446744073709551616",
            "nvidia/0000:4e:00.1/vidmem 1",
            "nvidia/0001:4e:00.0/vidmem 1",
            "drm/0000:4e:00.0/stolen 1",
            "0000:4e:00.0 1",
            "1 nvidia/0000:4e:00.0/vidmem",
        ] {
            assert_eq!(lines(line), [], "{line}");
        }
        assert_eq!(lines("drm/0000:4e:00.0/vram0 1\n\nx\n"), [("drm/0000:4e:00.0/vram0", 1)]);
        assert_eq!(lines("drm/00000000:4E:00.0/vram 2"), [("drm/00000000:4E:00.0/vram", 2)]);
        assert_eq!(lines("0000:4e:00.0/vidmem 3"), [("0000:4e:00.0/vidmem", 3)]);
    }
}
