//! Drivers on which the end of a process that came back from hibernation hangs the machine.
//!
//! NVIDIA/cuda-checkpoint#53 reports 595.71.05 with the open kernel modules. Four of four ends hung the machine, and none where the
//! process had been taken off its GPUs again before its end. Which other versions do is not known. All of branch 595 are
//! treated alike, since taking off costs about a second. Other drivers, and those whose version is not known, are not.

/// The first and the last branch of each range.
const HANGING: [(u32, u32); 1] = [(595, 595)];

/// By a version such as `595.71.05`.
pub(super) fn hangs_at_end(version: &str) -> bool {
    let branch = version.split('.').next().and_then(|branch| branch.trim().parse().ok());
    branch.is_some_and(|branch: u32| HANGING.iter().any(|(first, last)| (*first..=*last).contains(&branch)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_branch_decides() {
        for (version, hangs) in [
            ("595.71.05", true),
            ("595.45", true),
            ("594.99", false),
            ("596.01", false),
            ("580.159.04", false),
            ("", false),
            ("open", false),
        ] {
            assert_eq!(hangs_at_end(version), hangs, "{version}");
        }
    }
}
