//! The name, size and place of a group.

use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::error::{RanksError, SOCKET_PATH_BYTES_MAX};

/// Longest name, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// A group of ranks: the same for each of them and for the coordinator.
///
/// ```
/// use poorwill::ranks::GroupConfig;
///
/// let group = GroupConfig::new("job-17", 8)?.in_folder("/run/user/1000/engines");
/// assert_eq!((group.name(), group.world_size()), ("job-17", 8));
/// assert!(GroupConfig::new("no/slash", 8).is_err());
/// # Ok::<(), poorwill::ranks::RanksError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    name: String,
    world_size: u32,
    folder: Option<PathBuf>,
}

impl GroupConfig {
    /// A group of this name, with ranks 0 to `world_size` - 1.
    ///
    /// # Errors
    /// `Name`: 1 to 64 ASCII letters, digits, `_`, `-` and `.` are allowed, and no `.` first. `WorldSize` for none.
    pub fn new(name: &str, world_size: u32) -> Result<Self, RanksError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        if name.is_empty()
            || name.len() > NAME_BYTES_MAX
            || name.starts_with('.')
            || !name.bytes().all(allowed)
        {
            return Err(RanksError::Name { name: name.escape_debug().take(2 * NAME_BYTES_MAX).collect() });
        }
        if world_size == 0 {
            return Err(RanksError::WorldSize);
        }
        Ok(Self { name: name.to_owned(), world_size, folder: None })
    }

    /// Sets the folder with the groups. Otherwise it is `poorwill/ranks` in `$XDG_RUNTIME_DIR`, or
    /// `/dev/shm/poorwill-UID/ranks`.
    #[must_use]
    pub fn in_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many ranks it has.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Where its ranks serve.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        let folder = self.folder.clone().unwrap_or_else(default_folder);
        std::path::absolute(&folder).unwrap_or(folder).join(&self.name)
    }

    /// Where a rank serves.
    ///
    /// # Errors
    /// `Rank`: the group has no such rank. `PathTooLong` for a socket.
    pub fn socket(&self, rank: u32) -> Result<PathBuf, RanksError> {
        if rank >= self.world_size {
            return Err(RanksError::Rank { rank, name: self.name.clone(), world_size: self.world_size });
        }
        let path = self.folder().join(format!("rank-{rank}.sock"));
        let bytes = path.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES_MAX { Err(RanksError::PathTooLong { path, bytes }) } else { Ok(path) }
    }
}

pub(super) fn default_folder() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|folder| folder.is_absolute() && folder.is_dir());
    let own = || Path::new("/dev/shm").join(format!("poorwill-{}", geteuid().as_raw()));
    runtime.map_or_else(own, |folder| folder.join("poorwill")).join("ranks")
}
