//! Memory of this process: what it has, as the operating system tells, and how to have it.

use std::fs;

/// Host memory that this process has resident, in bytes, where the system tells.
pub(crate) fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

/// Writes to every page: those that were never written to are no memory.
pub(crate) fn touch(buffer: &mut [u8]) {
    buffer.iter_mut().step_by(rustix::param::page_size()).for_each(|byte| *byte = 1);
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_somewhere() {
        assert!(resident_bytes().unwrap() >= 64 << 10);
    }
}
