//! Which engines may hibernate, or came back from that, in memory and on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use crate::supervise::file_name;

/// Processes that may be off their GPUs, or came back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HibernationMark {
    pub(super) pids: Vec<u32>,
    /// Host memory that they take there.
    pub(super) host_bytes: u64,
}

/// By model. Without a folder they are forgotten with the service, as its engines are.
#[derive(Debug)]
pub(super) struct Marks {
    folder: Option<PathBuf>,
    /// The ending of their files.
    kind: &'static str,
    marks: Mutex<BTreeMap<String, HibernationMark>>,
}

impl Marks {
    /// With those that an earlier service left for these models.
    pub(super) fn read<'a>(
        folder: Option<&Path>,
        kind: &'static str,
        models: impl Iterator<Item = &'a str>,
    ) -> Self {
        let marks = Self { folder: folder.map(Path::to_path_buf), kind, marks: Mutex::default() };
        for model in models {
            drop(marks.of(model));
        }
        marks
    }

    pub(super) fn of(&self, model: &str) -> Option<HibernationMark> {
        let known = self.lock().get(model).cloned();
        known.or_else(|| {
            // Of a model that a reload added, too.
            let mark: HibernationMark = serde_json::from_slice(&fs::read(self.path(model)?).ok()?).ok()?;
            self.lock().insert(model.to_owned(), mark.clone());
            Some(mark)
        })
    }

    /// The sum of all others.
    pub(super) fn host_bytes_beside(&self, model: &str) -> u64 {
        let others = self.lock();
        let others = others.iter().filter(|(other, _)| *other != model);
        others.map(|(_, mark)| mark.host_bytes).fold(0, u64::saturating_add)
    }

    /// On disk first: a service that is killed between the two finds too many, and not too few.
    pub(super) fn set(&self, model: &str, mark: HibernationMark) -> io::Result<()> {
        if let Some(path) = self.path(model) {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            let new = path.with_extension(format!("{}.new", self.kind));
            fs::write(&new, serde_json::to_vec(&mark)?)?;
            fs::rename(new, path)?;
        }
        self.keep(model, mark);
        Ok(())
    }

    /// In memory only.
    pub(super) fn keep(&self, model: &str, mark: HibernationMark) {
        self.lock().insert(model.to_owned(), mark);
    }

    pub(super) fn remove(&self, model: &str) {
        if self.of(model).is_none() {
            return;
        }
        let Some(path) = self.path(model) else {
            self.lock().remove(model);
            return;
        };
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // It only has the next service ask the helper.
                tracing::warn!(path = %path.display(), %error, "cannot remove a mark of hibernation");
            }
            _ => {}
        }
        self.lock().remove(model);
    }

    fn path(&self, model: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(format!("{}.{}", file_name(model), self.kind)))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, HibernationMark>> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_service_finds_the_marks_of_its_models() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let models = ["org/one", "two"];
        let marks = Marks::read(Some(&state), "hibernating", models.into_iter());
        let mark = HibernationMark { pids: vec![7, 8], host_bytes: 5 };
        marks.set("org/one", mark.clone()).unwrap();
        marks.set("two", HibernationMark { host_bytes: 9, ..mark.clone() }).unwrap();
        assert_eq!((marks.host_bytes_beside("org/one"), marks.host_bytes_beside("three")), (9, 14));
        marks.remove("two");
        let next = Marks::read(Some(&state), "hibernating", models.into_iter());
        assert_eq!((next.of("org/one"), next.of("two")), (Some(mark), None));
        let later = Marks::read(Some(&state), "hibernating", ["two"].into_iter());
        assert!(later.of("org/one").is_some(), "a reload has added it");
        // Without a folder nothing is kept.
        let none = Marks::read(None, "hibernating", models.into_iter());
        none.set("two", HibernationMark { pids: vec![1], host_bytes: 1 }).unwrap();
        assert!(none.of("two").is_some());
        none.remove("two");
        assert_eq!(none.of("two"), None);
    }
}
