//! Resource limits of this process.

use super::System;

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
    fn mappings() {
        let fake = Fake::new();
        fake.put("/proc/sys/vm/max_map_count", "65530\n");
        assert_eq!(fake.system().max_map_count(), Some(65530));
    }
}
