//! NUMA nodes.

use std::collections::BTreeSet;

use super::System;

/// More than any kernel supports; bounds the length of a list.
const NODES_MAX: u32 = 1 << 16;

/// NUMA nodes, by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NumaNodes {
    /// Nodes with processors.
    pub with_cpus: Vec<u32>,
    /// Nodes with memory only: that of a GPU which the system manages, or of another device.
    pub without_cpus: Vec<u32>,
}

impl System {
    /// The nodes; `None` where the kernel does not report them.
    #[must_use]
    pub fn numa_nodes(&self) -> Option<NumaNodes> {
        let list = |name| self.text(format!("/sys/devices/system/node/{name}")).map(|text| numbers(&text));
        let with_cpus = list("has_cpu")?;
        let with_memory = list("has_memory").unwrap_or_default();
        let without_cpus = with_memory.difference(&with_cpus).copied().collect();
        Some(NumaNodes { with_cpus: with_cpus.into_iter().collect(), without_cpus })
    }
}

/// Parses a list like `0-1,4`.
fn numbers(list: &str) -> BTreeSet<u32> {
    let ranges = list.split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last < NODES_MAX).then_some(first..=last)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::super::Fake;
    use super::*;

    #[test]
    fn lists_of_numbers() {
        for (list, expected) in [
            ("0", &[0][..]),
            ("0-1,4", &[0, 1, 4]),
            ("0, 2-3\n", &[0, 2, 3]),
            ("", &[]),
            ("3-1", &[]),
            ("x,1,2-,-", &[1]),
            ("0-4294967295,7", &[7]),
        ] {
            assert_eq!(numbers(list).into_iter().collect::<Vec<_>>(), expected, "{list}");
        }
    }

    #[test]
    fn memory_of_gpus_has_no_cpus() {
        let fake = Fake::new();
        fake.put("/sys/devices/system/node/has_cpu", "0-1\n");
        fake.put("/sys/devices/system/node/has_memory", "0-1,4,12\n");
        let nodes = fake.system().numa_nodes();
        assert_eq!(nodes, Some(NumaNodes { with_cpus: vec![0, 1], without_cpus: vec![4, 12] }));
    }
}
