//! Memory of this process.

use std::fs;

/// Where the system reports it.
pub(crate) fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

/// A page that was never written has no memory.
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
