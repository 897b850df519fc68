//! Memory of this process.

/// Where the system reports it.
pub(crate) fn resident_bytes() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return poorwill_driver::system::proc::resident_bytes();
    #[cfg(not(target_os = "linux"))]
    return None;
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
