//! The name of this machine.

/// Where the system keeps it.
const HOSTNAME: &str = "/proc/sys/kernel/hostname";

/// The name of this machine; empty if the system does not say it.
#[must_use]
pub fn hostname() -> String {
    std::fs::read_to_string(HOSTNAME).unwrap_or_default().trim().to_owned()
}
