//! What the operating system tells about this computer.
//!
//! Nothing here fails: what a system does not tell is `None`.

use std::fs;
use std::path::Path;

/// Size of a page of host memory.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// A short file, without the end of its last line.
pub(crate) fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim_end().to_owned())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pages_have_a_size_and_no_file_has_no_text() {
        assert!(page_bytes().is_power_of_two() && page_bytes() >= 4096);
        assert_eq!(text("/nowhere"), None);
    }
}
