//! Where a broker's socket lies: in a folder that belongs to this user alone.
//!
//! The name of the socket has the protocol's version, so that brokers of several versions live side by side.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::protocol::VERSION;

/// A folder in which the broker's socket cannot lie.
#[derive(Debug, thiserror::Error)]
#[error("the broker's socket cannot lie in {}: {why}; mend that, or choose another path", path.display())]
pub struct FolderError {
    path: PathBuf,
    why: String,
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
    let folder = match socket.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let fails = |why: String| FolderError { path: folder.to_owned(), why };
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(fails(format!("it cannot be made: {error}"))),
    }
    let metadata =
        folder.symlink_metadata().map_err(|error| fails(format!("it cannot be looked at: {error}")))?;
    let (owner, user, mode) = (metadata.uid(), user(), metadata.mode() & 0o7777);
    if !metadata.is_dir() {
        return Err(fails("it is a file or a link".into()));
    }
    if owner != user {
        return Err(fails(format!("it belongs to user {owner}, and the broker to user {user}")));
    }
    if mode & 0o022 != 0 {
        return Err(fails(format!("other users may write to it, its mode is {mode:o}; `chmod 700` it")));
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
        let refused = |socket: &Path, why: &str| {
            let text = prepare_folder(socket).unwrap_err().to_string();
            let folder = socket.parent().unwrap().to_str().unwrap();
            assert!(text.contains(folder) && text.contains(why), "{text}");
        };
        refused(&socket, "its mode is 770");
        let link = top.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        refused(&link.join("socket"), "a file or a link");
        refused(&top.path().join("a/b/socket"), "cannot be made");
        if user() == 0 {
            std::os::unix::fs::chown(&folder, Some(65534), None).unwrap();
            refused(&socket, "belongs to user 65534");
        } else {
            refused(Path::new("/usr/socket"), "belongs to user 0");
        }
    }
}
