//! Files that are whole or not there: written beside, then renamed. A full disk leaves no empty file, and the old one.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

/// As of any new file; the user's mask takes from it.
const MODE: u32 = 0o666;

/// Writes a file that is not there yet.
///
/// # Errors
/// It is there, or it cannot be written; then there is none.
pub fn create(path: &Path, text: &str) -> io::Result<()> {
    beside(path, text, MODE)?.persist_noclobber(path)?;
    Ok(())
}

/// Writes a file, in place of the one that may be there. What is no file, such as a terminal, is written to.
///
/// # Errors
/// It cannot be written; then the old one is as it was.
pub fn replace(path: &Path, text: &str) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(old) if !old.is_file() => fs::write(path, text),
        Ok(old) => {
            // A link stays one.
            let path = fs::canonicalize(path)?;
            beside(&path, text, old.permissions().mode() & 0o777)?.persist(path)?;
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            beside(path, text, MODE)?.persist(path)?;
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Removed again unless it is renamed.
fn beside(path: &Path, text: &str, mode: u32) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = Builder::new().permissions(Permissions::from_mode(mode)).tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one");
        create(&path, "first").unwrap();
        assert_eq!(create(&path, "second").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("one", &link).unwrap();
        replace(&link, "third").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "third");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        replace(&folder.path().join("new"), "x").unwrap();
        // What cannot be written beside leaves nothing.
        assert!(create(&folder.path().join("none/one"), "x").is_err());
        assert!(replace(Path::new("/dev/full"), "x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
