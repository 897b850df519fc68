//! What the operating system reports on this machine, its control groups and GPUs, and what the environment
//! says on sharing a GPU.
//!
//! [`System`] reads Linux's files below `/proc` and `/sys`, each time anew, since limits and free memory
//! change. It does not fail: missing values are `None`, and unreadable lines are skipped. [`proc`] has the
//! processes.
//!
//! ```
//! use poorwill_driver::system::System;
//!
//! let system = System::here();
//! if let (Some(total), Some(available)) = (system.memory().total_bytes, system.memory().available_bytes) {
//!     assert!(available <= total);
//! }
//! ```

mod cgroups;
pub mod direct;
mod limits;
mod memory;
mod nodes;
mod pci;
pub mod proc;
pub mod slices;

use std::fs;
use std::path::{Path, PathBuf};

pub use cgroups::{GroupDeviceMemory, GroupMemory};
pub use limits::{Limit, LockedMemory};
pub use memory::SystemMemory;
pub use nodes::NumaNodes;
pub use pci::{InvalidPciAddress, PciAddress, PciLink};

/// The files of an operating system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct System {
    root: PathBuf,
}

impl System {
    /// The system of this process.
    #[must_use]
    pub fn here() -> Self {
        Self::at("/")
    }

    /// A system whose `/proc`, `/sys` and `/etc` are in this folder, for tests.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Memory available without swapping, in bytes: the lower of the system's figure and what the control
    /// groups leave.
    #[must_use]
    pub fn available_bytes(&self) -> Option<u64> {
        self.memory().available_bytes.into_iter().chain(self.cgroup_memory().available_bytes).min()
    }

    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Without trailing whitespace.
    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }
}

#[cfg(test)]
#[derive(Debug)]
struct Fake {
    folder: tempfile::TempDir,
}

#[cfg(test)]
impl Fake {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn system(&self) -> System {
        System::at(self.folder.path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lie_below_the_root() {
        let fake = Fake::new();
        fake.put("/proc/a", " 17 \n\n");
        fake.put("/proc/b", "x\n");
        let system = fake.system();
        assert_eq!(system.text("/proc/a").as_deref(), Some(" 17"));
        assert_eq!((system.number("/proc/a"), system.number("proc/a")), (Some(17), Some(17)));
        assert_eq!((system.number("/proc/b"), system.number("/proc/c")), (None, None));
        assert_eq!(system.text("/proc"), None);
        assert_eq!(System::here().path("/proc/self"), Path::new("/proc/self"));
    }

    #[test]
    fn a_system_that_tells_nothing() {
        let system = Fake::new().system();
        assert_eq!(
            system.memory(),
            SystemMemory { page_bytes: system.memory().page_bytes, ..SystemMemory::default() }
        );
        assert_eq!(system.cgroup_memory(), GroupMemory::default());
        let gpu = "0000:4e:00.0".parse().unwrap();
        assert_eq!(system.cgroup_device_memory(gpu), GroupDeviceMemory::default());
        assert_eq!(system.locked_memory(), LockedMemory { soft: Limit::Unknown, hard: Limit::Unknown });
        assert_eq!((system.max_map_count(), system.numa_nodes(), system.numa_node(gpu)), (None, None, None));
        assert_eq!(system.pci_link(gpu), PciLink::default());
    }

    #[test]
    fn this_one_tells_something() {
        let system = System::here();
        assert!(system.memory().total_bytes.is_some_and(|bytes| bytes > 1 << 20));
        assert!(system.max_map_count().is_some_and(|count| count > 0));
        assert_ne!(system.locked_memory().soft, Limit::Unknown);
        let group = system.cgroup_memory();
        assert!(group.remaining_bytes <= group.available_bytes);
    }
}
