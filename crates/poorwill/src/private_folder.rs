//! Folders of this user alone, where others can put nothing in their place.

use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use rustix::process::geteuid;

/// Makes it if there is none, and the folders above it. An error says which step failed.
pub(crate) fn make(folder: &Path) -> Result<(), (&'static str, io::Error)> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|source| ("make the folder", source))?;
    check(folder).map_err(|source| ("use the folder", source))
}

/// Whether it is this user's, and out of the reach of others.
pub(crate) fn check(folder: &Path) -> io::Result<()> {
    check_above(folder)?;
    // Others who can write there could pass for this user's processes.
    check_owner(&fs::symlink_metadata(folder)?, &[geteuid().as_raw()])
}

/// Below a folder in which everybody may make others, as `/tmp`: each is this user's or root's, and no link.
fn check_above(folder: &Path) -> io::Result<()> {
    let mut above: Vec<_> =
        folder.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
    above.reverse();
    let mut is_below = false;
    for folder in above {
        let found = fs::symlink_metadata(folder)?;
        if is_below && !is_for_all(found.mode()) {
            check_owner(&found, &[0, geteuid().as_raw()]).map_err(|error| {
                io::Error::new(error.kind(), format!("{} above it: {error}", folder.display()))
            })?;
        }
        is_below |= is_for_all(fs::metadata(folder)?.mode());
    }
    Ok(())
}

/// Everybody may make files there, and remove only their own.
fn is_for_all(mode: u32) -> bool {
    mode & 0o1002 == 0o1002
}

fn check_owner(found: &Metadata, owners: &[u32]) -> io::Result<()> {
    let own = geteuid().as_raw();
    let refused = |reason: String| Err(io::Error::new(ErrorKind::PermissionDenied, reason));
    if !found.is_dir() {
        return Err(ErrorKind::NotADirectory.into());
    }
    if !owners.contains(&found.uid()) {
        return refused(format!("it belongs to user {}, and this process to user {own}", found.uid()));
    }
    if found.mode() & 0o022 != 0 {
        return refused(format!("others may write into it: it has mode {:o}", found.mode() & 0o777));
    }
    Ok(())
}
