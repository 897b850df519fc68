//! A decision between processes: a folder in which one file changes its name once.
//!
//! The file is called `undecided`, and then `commit` or `undo`. Renaming is atomic, so the first proposal wins. Where
//! none of the three names is there, the folder was removed. Then reading it is an error, and never "undecided": the
//! verdict may have been there before. The processes share a machine, or a file system that renames
//! atomically.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use poorwill_core::{Decision, DecisionError, Verdict};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

use super::config::default_folder;
use super::error::RanksError;
use crate::private_folder;

const UNDECIDED: &str = "undecided";
const PREFIX: &str = "decision-";

/// Names of the marks begin with this.
const MARK: &str = "staged-";

/// What a coordinator that has ended left behind is removed when it is older: than any rank waits, on clocks that disagree by days.
const LEFTOVER_AGE: Duration = Duration::from_secs(4 * 24 * 60 * 60);

static MADE: AtomicU64 = AtomicU64::new(0);

/// A decision that several processes of this user read and make.
///
/// ```
/// use poorwill::decision::{Decision, Verdict};
/// use poorwill::ranks::FileDecision;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let coordinator = FileDecision::create(Some(folder))?;
/// let participant = FileDecision::open(coordinator.path())?; // In another process.
/// assert_eq!(participant.verdict()?, None);
/// assert_eq!(participant.decide(Verdict::Undo)?, Verdict::Undo);
/// assert_eq!(coordinator.decide(Verdict::Commit)?, Verdict::Undo); // The first holds.
/// coordinator.remove()?; // When all participants have ended.
/// assert!(participant.verdict().is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FileDecision {
    path: PathBuf,
    /// The folder itself, whatever has its name.
    folder: OwnedFd,
}

impl FileDecision {
    /// Makes one in this folder. `None`: `poorwill/ranks` in `$XDG_RUNTIME_DIR`, or `/dev/shm/poorwill-UID/ranks`.
    ///
    /// Removes decisions there that are older than four days.
    ///
    /// # Errors
    /// The folder cannot be used: it is another user's, or others may write into it.
    pub fn create(folder: Option<&Path>) -> Result<Self, RanksError> {
        let folder = folder.map_or_else(default_folder, Path::to_owned);
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        private_folder::make(&folder)
            .map_err(|(action, source)| RanksError::folder(action, &folder, source))?;
        remove_leftovers(&folder);
        let path = Self::make(&folder)?;
        let failed = |error: Errno| RanksError::folder("make a decision in", &path, error.into());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let decision = Self { folder: open_folder(&path).map_err(failed)?, path: path.clone() };
        openat(&decision.folder, UNDECIDED, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        Ok(decision)
    }

    fn make(folder: &Path) -> Result<PathBuf, RanksError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        loop {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("{PREFIX}{}-{since:x}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(path),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(RanksError::folder("make", &path, error)),
            }
        }
    }

    /// Opens one that a coordinator has made.
    ///
    /// # Errors
    /// `DecisionGone`: it was removed, or never made. `Folder`: it is another user's, or cannot be opened.
    pub fn open(path: &Path) -> Result<Self, RanksError> {
        let failed = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => RanksError::DecisionGone { path: path.to_owned() },
            _ => RanksError::folder("open the decision", path, error),
        };
        private_folder::check(path).map_err(failed)?;
        let folder = open_folder(path).map_err(|error| failed(error.into()))?;
        let decision = Self { path: path.to_owned(), folder };
        match decision.read() {
            Ok(Some(_)) => Ok(decision),
            Ok(None) => Err(RanksError::DecisionGone { path: path.to_owned() }),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// For the participants.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it. Call it when all participants have ended: one that has not keeps what it staged for good.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self) -> Result<(), RanksError> {
        let removed = remove(&self.folder, &self.path);
        removed.map_err(|error| RanksError::folder("remove the decision", &self.path, error.into()))
    }

    /// `None`: the folder was removed.
    fn read(&self) -> Result<Option<Option<Verdict>>, Errno> {
        // In the order in which the names change.
        for standing in [None, Some(Verdict::Commit), Some(Verdict::Undo)] {
            match statat(&self.folder, name_of(standing), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => return Ok(Some(standing)),
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn standing(&self) -> Result<Option<Verdict>, DecisionError> {
        match self.read() {
            Ok(Some(standing)) => Ok(standing),
            Ok(None) => {
                Err(self.problem("it was removed, so its verdict is lost; end this process, or keep waiting"))
            }
            Err(error) => Err(self.unread(error)),
        }
    }

    /// A rank is staged.
    pub(super) fn mark(&self, rank: u32) -> Result<(), DecisionError> {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = openat(&self.folder, mark_of(rank), flags, Mode::RUSR | Mode::WUSR);
        made.map(drop).map_err(|error| self.unwritten(error))
    }

    pub(super) fn has_marks_of_all(&self, world_size: u32) -> Result<bool, DecisionError> {
        for rank in 0..world_size {
            match statat(&self.folder, mark_of(rank), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => {}
                Err(Errno::NOENT) => return Ok(false),
                Err(error) => return Err(self.unread(error)),
            }
        }
        Ok(true)
    }

    fn unread(&self, error: Errno) -> DecisionError {
        self.problem(&format!("it cannot be read: {}", io::Error::from(error)))
    }

    fn unwritten(&self, error: Errno) -> DecisionError {
        self.problem(&format!("it cannot be written: {}", io::Error::from(error)))
    }

    fn problem(&self, what: &str) -> DecisionError {
        DecisionError { problem: format!("the decision {}: {what}", self.path.display()) }
    }
}

impl Decision for FileDecision {
    fn decide(&self, proposed: Verdict) -> Result<Verdict, DecisionError> {
        let written = renameat(&self.folder, UNDECIDED, &self.folder, name_of(Some(proposed)));
        match written {
            Ok(()) => Ok(proposed),
            Err(Errno::NOENT) => self.standing()?.ok_or_else(|| self.problem("it changes; look again")),
            Err(error) => Err(self.unwritten(error)),
        }
    }

    fn verdict(&self) -> Result<Option<Verdict>, DecisionError> {
        self.standing()
    }
}

fn name_of(standing: Option<Verdict>) -> &'static str {
    match standing {
        None => UNDECIDED,
        Some(Verdict::Commit) => "commit",
        Some(Verdict::Undo) => "undo",
    }
}

fn mark_of(rank: u32) -> String {
    format!("{MARK}{rank}")
}

fn open_folder(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    openat(CWD, path, flags, Mode::empty())
}

fn remove(folder: &OwnedFd, path: &Path) -> Result<(), Errno> {
    for standing in [None, Some(Verdict::Commit), Some(Verdict::Undo)] {
        match unlinkat(folder, name_of(standing), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if entry.file_name().to_bytes().starts_with(MARK.as_bytes()) {
            match unlinkat(folder, entry.file_name(), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    // Another one of this name has its file, and stays.
    match unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// What cannot be removed hinders no new decision.
fn remove_leftovers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_decision = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        let modified = entry.metadata().and_then(|found| found.modified()).ok();
        let age = modified.and_then(|at| SystemTime::now().duration_since(at).ok());
        if is_decision && age.is_some_and(|age| age > LEFTOVER_AGE) {
            let path = entry.path();
            let _ = open_folder(&path).and_then(|folder| remove(&folder, &path));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_first_of_many_wins_and_all_read_it() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let made = FileDecision::create(Some(folder.path())).unwrap();
            let start = Barrier::new(8);
            let verdicts: Vec<Verdict> = thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|nth| {
                        let (start, path) = (&start, made.path());
                        scope.spawn(move || {
                            let own = FileDecision::open(path).unwrap();
                            start.wait();
                            let proposed = if nth % 2 == 0 { Verdict::Commit } else { Verdict::Undo };
                            let verdict = own.decide(proposed).unwrap();
                            assert_eq!(own.verdict(), Ok(Some(verdict)));
                            verdict
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]), "{round}: {verdicts:?}");
            made.remove().unwrap();
        }
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn what_was_removed_is_never_undecided() {
        let folder = tempfile::tempdir().unwrap();
        for verdict in [None, Some(Verdict::Commit), Some(Verdict::Undo)] {
            let made = FileDecision::create(Some(folder.path())).unwrap();
            let (path, late) = (made.path().to_owned(), FileDecision::open(made.path()).unwrap());
            verdict.map(|verdict| made.decide(verdict).unwrap());
            assert_eq!(late.verdict(), Ok(verdict));
            made.remove().unwrap();
            // Another decision of that name is not this one.
            for again in [false, true] {
                if again {
                    fs::create_dir(&path).unwrap();
                    fs::write(path.join(UNDECIDED), "").unwrap();
                }
                for said in [late.verdict().unwrap_err(), late.decide(Verdict::Undo).unwrap_err()] {
                    assert!(said.to_string().contains("its verdict is lost"), "{said}");
                }
            }
            assert!(path.join(UNDECIDED).exists());
            late.remove().unwrap();
            assert!(path.join(UNDECIDED).exists(), "the other one stays");
            fs::remove_dir_all(&path).unwrap();
            let error = FileDecision::open(&path).unwrap_err();
            assert!(matches!(error, RanksError::DecisionGone { .. }), "{error}");
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            let error = FileDecision::open(&path).unwrap_err();
            assert!(matches!(error, RanksError::DecisionGone { .. }), "it is empty: {error}");
            fs::remove_dir(&path).unwrap();
        }
    }

    /// Whatever removes it, in whatever order, meanwhile.
    #[test]
    fn removing_it_meanwhile_never_lets_a_second_verdict_in() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let made = FileDecision::create(Some(folder.path())).unwrap();
            let late = FileDecision::open(made.path()).unwrap();
            made.decide(Verdict::Commit).unwrap();
            thread::scope(|scope| {
                let remover = scope.spawn(|| fs::remove_dir_all(made.path()).unwrap());
                loop {
                    match (late.verdict(), late.decide(Verdict::Undo)) {
                        (Ok(verdict), Ok(decided)) => {
                            assert_eq!(
                                (verdict, decided),
                                (Some(Verdict::Commit), Verdict::Commit),
                                "{round}"
                            );
                        }
                        (Ok(verdict), Err(_)) => assert_eq!(verdict, Some(Verdict::Commit)),
                        (Err(_), Err(_)) => break,
                        (Err(error), Ok(_)) => panic!("{round}: it came back after {error}"),
                    }
                }
                remover.join().unwrap();
            });
        }
    }

    #[test]
    fn old_ones_are_removed_and_young_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let (old, young) =
            (FileDecision::create(Some(folder.path())), FileDecision::create(Some(folder.path())));
        let (old, young) = (old.unwrap(), young.unwrap());
        let two_days_ago = SystemTime::now() - 2 * LEFTOVER_AGE;
        fs::File::open(old.path()).unwrap().set_modified(two_days_ago).unwrap();
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::File::open(&other).unwrap().set_modified(two_days_ago).unwrap();
        let new = FileDecision::create(Some(folder.path())).unwrap();
        assert!(!old.path().exists() && other.exists());
        assert_eq!((young.verdict(), new.verdict()), (Ok(None), Ok(None)));
        assert!(old.verdict().is_err());
    }

    #[test]
    fn folders_that_cannot_be_trusted_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let made = FileDecision::create(Some(&folder.path().join("made/below"))).unwrap();
        let refused = |result: Result<FileDecision, RanksError>, word: &str| {
            let error = poorwill_core::chain(&result.unwrap_err());
            assert!(error.contains(word), "{word}: {error}");
        };
        fs::set_permissions(made.path(), fs::Permissions::from_mode(0o777)).unwrap();
        refused(FileDecision::open(made.path()), "others may write");
        fs::set_permissions(made.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let link = folder.path().join("link");
        symlink(made.path(), &link).unwrap();
        refused(FileDecision::open(&link), "not a directory");
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        refused(FileDecision::create(Some(&open)), "others may write");
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        refused(FileDecision::create(Some(&file)), "make the folder");
        refused(FileDecision::open(&file), "not a directory");
    }
}
