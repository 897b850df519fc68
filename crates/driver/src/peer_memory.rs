//! How much of another device is idle.

/// What copies leave free there, as a part of all: what that device's own processes take without asking.
const FREE_PART: u64 = 8;

pub(crate) fn idle_of(free_bytes: u64, total_bytes: u64) -> u64 {
    free_bytes.saturating_sub(total_bytes / FREE_PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eighth_stays_free() {
        assert_eq!([idle_of(80, 80), idle_of(11, 80), idle_of(10, 80), idle_of(0, 80)], [70, 1, 0, 0]);
    }
}
