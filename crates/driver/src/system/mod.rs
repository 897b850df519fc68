//! What the operating system tells about this computer, its control groups and its GPUs, and what the environment
//! says about how a GPU is sliced.
//!
//! [`System`] reads the files that Linux keeps below `/proc` and `/sys`, each time anew: limits and free memory
//! change. Nothing here fails and nothing is remembered: what a system does not tell is `None`, and a line that
//! cannot be read is skipped. What the environment says is told apart by [`slices`], where nothing is skipped: a
//! limit that somebody wrote down and nobody can read is reported with its text.
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
mod limits;
mod memory;
mod nodes;
mod pci;
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
    /// The one that this process runs on.
    #[must_use]
    pub fn here() -> Self {
        Self::at("/")
    }

    /// One whose `/proc`, `/sys` and `/etc` lie in this folder, for tests.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Memory that can be had without swapping, in bytes: what the system tells, and what the control groups of this
    /// process leave, whichever is less. `None` where neither tells.
    #[must_use]
    pub fn available_bytes(&self) -> Option<u64> {
        self.memory().available_bytes.into_iter().chain(self.cgroup_memory().available_bytes).min()
    }

    /// Where the file with this path, from `/`, lies.
    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// A short file, without the end of its last line.
    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }

    /// A file that holds a number and nothing else.
    fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }
}

/// A folder that plays an operating system.
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

    /// Writes the file with this path, from `/`.
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
