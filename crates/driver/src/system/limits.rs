//! Resource limits of this process.

use super::System;

/// Its bit in a set of capabilities.
const CAP_SYS_PTRACE: u32 = 19;

/// A resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// A limit in bytes.
    Bytes(u64),
    /// No limit.
    Unlimited,
    /// The system does not report it.
    Unknown,
}

impl Limit {
    /// The bytes, unless unlimited or unknown.
    #[must_use]
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Unlimited | Self::Unknown => None,
        }
    }
}

/// Memory that a process may lock itself, as with `mlock` and for `io_uring`. Page-locking by NVIDIA's driver
/// does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockedMemory {
    /// The limit in force.
    pub soft: Limit,
    /// The maximum to which the process may raise it.
    pub hard: Limit,
}

impl System {
    /// Memory that this process may lock, without `CAP_IPC_LOCK`.
    #[must_use]
    pub fn locked_memory(&self) -> LockedMemory {
        locked_memory(&self.text("/proc/self/limits").unwrap_or_default())
    }

    /// Which processes the kernel lets others trace (Yama): 0 those of the same user, 1 only children, 2 with a
    /// capability, 3 none. `None` without that limit.
    #[must_use]
    pub fn ptrace_scope(&self) -> Option<u64> {
        self.number("/proc/sys/kernel/yama/ptrace_scope")
    }

    /// Whether this process may trace any other one (`CAP_SYS_PTRACE`).
    #[must_use]
    pub fn has_ptrace_capability(&self) -> bool {
        let status = self.text("/proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
        bits.unwrap_or_default() >> CAP_SYS_PTRACE & 1 == 1
    }

    /// Mappings that a process may have.
    #[must_use]
    pub fn max_map_count(&self) -> Option<u64> {
        self.number("/proc/sys/vm/max_map_count")
    }
}

/// Parses a line like `Max locked memory 8388608 unlimited bytes`.
fn locked_memory(limits: &str) -> LockedMemory {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let mut words = line.unwrap_or_default().split_whitespace();
    let mut limit = || match words.next() {
        Some("unlimited") => Limit::Unlimited,
        Some(bytes) => bytes.parse().map_or(Limit::Unknown, Limit::Bytes),
        None => Limit::Unknown,
    };
    LockedMemory { soft: limit(), hard: limit() }
}

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    #[test]
    fn memory_that_may_be_locked() {
        for (line, soft, hard) in [
            ("8388608   8388608   bytes", Limit::Bytes(8 << 20), Limit::Bytes(8 << 20)),
            ("65536   unlimited   bytes", Limit::Bytes(64 << 10), Limit::Unlimited),
            ("unlimited unlimited bytes", Limit::Unlimited, Limit::Unlimited),
            ("0 -1 bytes", Limit::Bytes(0), Limit::Unknown),
            ("", Limit::Unknown, Limit::Unknown),
        ] {
            let limits = format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {line}\nMax x 1 1\n"
            );
            assert_eq!(locked_memory(&limits), LockedMemory { soft, hard }, "{line}");
        }
        assert_eq!(Limit::Bytes(7).bytes(), Some(7));
        assert_eq!((Limit::Unlimited.bytes(), Limit::Unknown.bytes()), (None, None));
    }

    #[test]
    fn who_may_trace() {
        let fake = Fake::new();
        assert_eq!((fake.system().ptrace_scope(), fake.system().has_ptrace_capability()), (None, false));
        fake.put("/proc/sys/kernel/yama/ptrace_scope", "1\n");
        for (bits, may_trace) in [("0000000000080000", true), ("000001fffff7ffff", false), ("x", false)] {
            fake.put("/proc/self/status", &format!("Name:\tx\nCapEff:\t{bits}\n"));
            assert_eq!(
                (fake.system().ptrace_scope(), fake.system().has_ptrace_capability()),
                (Some(1), may_trace)
            );
        }
    }

    #[test]
    fn mappings() {
        let fake = Fake::new();
        fake.put("/proc/sys/vm/max_map_count", "65530\n");
        assert_eq!(fake.system().max_map_count(), Some(65530));
    }
}
