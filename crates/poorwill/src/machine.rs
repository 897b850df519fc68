//! What the operating system tells about this computer and this process.
//!
//! Nothing here fails: what a system does not tell is `None`.

use std::fs;
use std::path::Path;

/// Size of a page of host memory.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Host memory that this process has resident.
pub(crate) fn resident_bytes() -> Option<u64> {
    let pages: u64 = text("/proc/self/statm")?.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_bytes())
}

/// A short file, without the end of its last line.
pub(crate) fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_somewhere() {
        assert!(page_bytes().is_power_of_two() && page_bytes() >= 4096);
        assert!(resident_bytes().unwrap() >= 64 << 10);
        assert_eq!(text("/nowhere"), None);
    }
}
