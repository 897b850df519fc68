//! Where a broker's socket lies: in a folder that belongs to this user alone.
//!
//! The name of the socket has the protocol's version, so that brokers of several versions live side by side.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::protocol::VERSION;

/// What is wrong with a socket's folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// It can neither be made nor looked at.
    #[error("cannot use the folder {} of the broker's socket; choose another path", path.display())]
    Unusable {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is a file or a link.
    #[error("{} is no folder, so the broker's socket cannot lie in it; remove it or choose another path", path.display())]
    NoFolder {
        /// What was taken for a folder.
        path: PathBuf,
    },
    /// Another user could put a socket of its own there.
    #[error(
        "the folder {} belongs to user {owner}, and the broker to user {user}; choose another path",
        path.display()
    )]
    Owner {
        /// The folder.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
        /// Who we are.
        user: u32,
    },
    /// Others may write to it.
    #[error("other users may write to the folder {} (mode {mode:o}); `chmod 700` it", path.display())]
    Mode {
        /// The folder.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// The path of this user's broker: below `$XDG_RUNTIME_DIR` if that is a folder of this user, else below `/tmp`.
#[must_use]
pub fn default_path() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    path_in(runtime.as_deref(), user())
}

fn path_in(runtime: Option<&Path>, user: u32) -> PathBuf {
    let is_ours = |folder: &&Path| {
        folder.is_absolute()
            && folder.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user)
    };
    let folder = match runtime.filter(is_ours) {
        Some(runtime) => runtime.join("poorwill"),
        None => PathBuf::from(format!("/tmp/poorwill-{user}")),
    };
    folder.join(format!("broker-v{VERSION}.sock"))
}

/// Makes the folder of a socket, for this user alone, or checks the one that is there.
pub(crate) fn prepare_folder(socket: &Path) -> Result<(), FolderError> {
    let path = match socket.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let unusable = |source| FolderError::Unusable { path: path.clone(), source };
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(unusable(error)),
    }
    let metadata = path.symlink_metadata().map_err(unusable)?;
    let (owner, user, mode) = (metadata.uid(), user(), metadata.mode() & 0o7777);
    if !metadata.is_dir() {
        return Err(FolderError::NoFolder { path });
    }
    if owner != user {
        return Err(FolderError::Owner { path, owner, user });
    }
    if mode & 0o022 != 0 {
        return Err(FolderError::Mode { path, mode });
    }
    Ok(())
}

/// The user of this process.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_runtime_folder_serves_if_it_is_ours() {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("broker-v{VERSION}.sock");
        let below_tmp = |user: u32| PathBuf::from(format!("/tmp/poorwill-{user}/{name}"));
        let (ours, path) = (user(), folder.path());
        assert_eq!(path_in(Some(path), ours), path.join("poorwill").join(&name));
        assert_eq!(path_in(Some(path), ours + 1), below_tmp(ours + 1));
        assert_eq!(path_in(None, ours), below_tmp(ours));
        assert_eq!(path_in(Some(Path::new("")), ours), below_tmp(ours));
        assert_eq!(path_in(Some(&path.join("none")), ours), below_tmp(ours));
    }

    #[test]
    fn a_folder_is_made_for_one_user_and_one_of_others_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("made");
        let socket = folder.join("socket");
        prepare_folder(&socket).unwrap();
        assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
        prepare_folder(&socket).unwrap();
        set_permissions(&folder, Permissions::from_mode(0o770)).unwrap();
        let error = prepare_folder(&socket).unwrap_err();
        assert!(matches!(&error, FolderError::Mode { path, .. } if *path == folder), "{error}");
        let link = top.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(matches!(prepare_folder(&link.join("socket")), Err(FolderError::NoFolder { .. })));
        assert!(matches!(prepare_folder(&top.path().join("a/b/socket")), Err(FolderError::Unusable { .. })));
        if user() != 0 {
            assert!(matches!(prepare_folder(Path::new("/usr/socket")), Err(FolderError::Owner { .. })));
        }
    }
}
