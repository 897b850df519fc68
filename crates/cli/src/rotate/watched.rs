//! Notices that a file has changed, by looking at it now and then.
//!
//! What counts is the file to which the path leads. So it is noticed that an editor has put another file there. It is
//! also noticed that a link on the way leads elsewhere, as with volumes of Kubernetes. A file that is still being written
//! is left alone until two looks find it the same.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A file that may change.
#[derive(Debug)]
pub(super) struct Watched {
    path: PathBuf,
    /// What was used last.
    used: Version,
    /// At the last look.
    seen: Version,
}

/// `None` where no file is.
type Version = Option<[i128; 5]>;

impl Watched {
    /// From its version now on: call it before the file is read.
    pub(super) fn new(path: PathBuf) -> Self {
        let now = version(&path);
        Self { path, used: now, seen: now }
    }

    /// Whether it has another version than the one that was used. True once for each.
    fn look(&mut self) -> bool {
        let now = version(&self.path);
        let is_steady = std::mem::replace(&mut self.seen, now) == now;
        let is_new = is_steady && self.used != now;
        if is_new {
            self.used = now;
        }
        is_new
    }

    /// Notifies of each change.
    pub(super) async fn notify(mut self, changed: Arc<Notify>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            // A file system may take its time.
            let looked = tokio::task::spawn_blocking(move || {
                let is_new = self.look();
                (self, is_new)
            });
            let Ok((watched, is_new)) = looked.await else { return };
            self = watched;
            if is_new {
                tracing::info!(path = %self.path.display(), "the file of the configuration has changed");
                changed.notify_one();
            }
        }
    }
}

fn version(path: &Path) -> Version {
    let file = fs::metadata(path).ok()?;
    let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
    let (modified, changed) =
        (nanoseconds(file.mtime(), file.mtime_nsec()), nanoseconds(file.ctime(), file.ctime_nsec()));
    Some([file.dev().into(), file.ino().into(), file.len().into(), modified, changed])
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn every_way_to_change_a_file_is_noticed_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let write = |name: &str, text: &str| fs::write(at(name), text).unwrap();
        // As Kubernetes does: the file is a link through a link to a folder.
        for (version, text) in [("v1", "one"), ("v2", "one")] {
            fs::create_dir(at(version)).unwrap();
            write(&format!("{version}/rotation.toml"), text);
        }
        symlink("v1", at("data")).unwrap();
        symlink("data/rotation.toml", at("rotation.toml")).unwrap();
        let mut watched = Watched::new(at("rotation.toml"));
        let changes: [(&str, &dyn Fn()); 6] = [
            ("a link leads elsewhere", &|| {
                symlink("v2", at("new")).unwrap();
                fs::rename(at("new"), at("data")).unwrap();
            }),
            ("another file is put there", &|| {
                write("new", "one");
                fs::rename(at("new"), at("rotation.toml")).unwrap();
            }),
            ("it is written over", &|| write("rotation.toml", "longer than before")),
            ("it has the same length, at another time", &|| {
                let file = File::options().write(true).open(at("rotation.toml")).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            }),
            ("it is removed", &|| fs::remove_file(at("rotation.toml")).unwrap()),
            ("it is there again", &|| write("rotation.toml", "again")),
        ];
        assert!(!watched.look() && !watched.look(), "nothing has changed");
        for (what, change) in changes {
            change();
            assert!(!watched.look(), "{what}, and may not be complete");
            assert!(watched.look(), "{what}");
            assert!(!watched.look(), "{what} once");
        }
        write("rotation.toml", "half");
        assert!(!watched.look());
        write("rotation.toml", "half and half");
        assert!(!watched.look(), "it is still being written");
        assert!(watched.look());
    }

    #[test]
    fn a_file_that_is_away_for_a_moment_has_not_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rotation.toml");
        fs::write(&path, "one").unwrap();
        let linked = folder.path().join("link");
        symlink(&path, &linked).unwrap();
        let mut watched = Watched::new(linked.clone());
        fs::remove_file(&linked).unwrap();
        assert!(!watched.look());
        symlink(&path, &linked).unwrap();
        assert!(!watched.look() && !watched.look());
    }
}
