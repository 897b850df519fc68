//! The machine's memory and page sizes.

use super::System;

/// Memory of a machine. `None` where the system does not report it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SystemMemory {
    /// All memory, in bytes.
    pub total_bytes: Option<u64>,
    /// Memory available without swapping, in bytes.
    pub available_bytes: Option<u64>,
    /// Page size, in bytes.
    pub page_bytes: u64,
    /// Mode of transparent huge pages: `always`, `madvise` or `never`. `None` where the kernel has none.
    pub transparent_huge_pages: Option<String>,
    /// Default size of a reserved huge page, in bytes.
    pub huge_page_bytes: Option<u64>,
    /// Reserved huge pages of that size that are free and not promised, in bytes.
    pub huge_pages_free_bytes: Option<u64>,
}

impl System {
    /// Reads the current figures.
    #[must_use]
    pub fn memory(&self) -> SystemMemory {
        let meminfo = self.text("/proc/meminfo").unwrap_or_default();
        let modes = self.text("/sys/kernel/mm/transparent_hugepage/enabled");
        let huge_page_bytes = bytes(&meminfo, "Hugepagesize");
        let huge_pages_free = count(&meminfo, "HugePages_Free").map(|free| {
            let promised = count(&meminfo, "HugePages_Rsvd").unwrap_or_default();
            free.saturating_sub(promised)
        });
        SystemMemory {
            total_bytes: bytes(&meminfo, "MemTotal"),
            available_bytes: bytes(&meminfo, "MemAvailable"),
            page_bytes: rustix::param::page_size() as u64,
            transparent_huge_pages: modes.and_then(|modes| chosen(&modes)),
            huge_page_bytes,
            huge_pages_free_bytes: huge_pages_free
                .zip(huge_page_bytes)
                .and_then(|(pages, bytes)| pages.checked_mul(bytes)),
        }
    }
}

/// Parses a line like `MemTotal: 16384 kB`.
fn bytes(meminfo: &str, name: &str) -> Option<u64> {
    let kib: u64 = value(meminfo, name)?.strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Parses a line like `HugePages_Free: 3`.
fn count(meminfo: &str, name: &str) -> Option<u64> {
    value(meminfo, name)?.parse().ok()
}

fn value<'a>(meminfo: &'a str, name: &str) -> Option<&'a str> {
    let mut named = meminfo.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    named.next().map(str::trim)
}

/// The mode in brackets, as in `always [madvise] never`.
fn chosen(modes: &str) -> Option<String> {
    let (_, rest) = modes.split_once('[')?;
    rest.split_once(']').map(|(mode, _)| mode.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    #[test]
    fn figures_of_meminfo() {
        let meminfo =
            "MemTotal:       24684092 kB\nMemFree:   1 kB\nMemAvailable: 24122660 kB\nHugePages_Total: 3\n";
        assert_eq!(bytes(meminfo, "MemTotal"), Some(24_684_092 << 10));
        assert_eq!(bytes(meminfo, "MemAvailable"), Some(24_122_660 << 10));
        assert_eq!(count(meminfo, "HugePages_Total"), Some(3));
        for name in ["Mem", "HugePages_Total", "Swap", ""] {
            assert_eq!(bytes(meminfo, name), None, "{name}");
        }
        assert_eq!(count(meminfo, "MemTotal"), None);
        assert_eq!(bytes("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
    }

    #[test]
    fn the_chosen_mode() {
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always madvise never"), None);
        assert_eq!(chosen("[never").as_deref(), None);
    }

    #[test]
    fn reserved_huge_pages_that_are_left() {
        for (meminfo, left) in [
            ("HugePages_Free: 3\nHugePages_Rsvd: 1\nHugepagesize: 2048 kB\n", Some(4 << 20)),
            ("HugePages_Free: 1\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n", Some(0)),
            ("HugePages_Free: 3\nHugepagesize: 1048576 kB\n", Some(3 << 30)),
            ("HugePages_Free: 18446744073709551615\nHugepagesize: 2048 kB\n", None),
            ("HugePages_Free: 3\n", None),
            ("Hugepagesize: 2048 kB\n", None),
        ] {
            let fake = Fake::new();
            fake.put("/proc/meminfo", meminfo);
            assert_eq!(fake.system().memory().huge_pages_free_bytes, left, "{meminfo}");
        }
    }

    #[test]
    fn a_computer() {
        let fake = Fake::new();
        fake.put("/proc/meminfo", "MemTotal: 8 kB\nMemAvailable: 4 kB\nHugepagesize: 2048 kB\n");
        fake.put("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
        let memory = fake.system().memory();
        assert_eq!((memory.total_bytes, memory.available_bytes), (Some(8192), Some(4096)));
        assert_eq!(memory.transparent_huge_pages.as_deref(), Some("always"));
        assert_eq!(memory.huge_page_bytes, Some(2 << 20));
        assert!(memory.page_bytes.is_power_of_two() && memory.page_bytes >= 4096);
    }
}
