//! Which processes a hibernator works on.

use std::path::PathBuf;

/// Which processes can be named.
///
/// ```
/// use poorwill::hibernation::Processes;
///
/// assert_eq!(Processes::default(), Processes::Cuda);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Processes {
    /// Those that use NVIDIA's GPUs.
    #[default]
    Cuda,
    /// Those that use the host device and are registered in this folder.
    Host(PathBuf),
}
