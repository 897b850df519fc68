//! What a target does in its steps, for tests: as text, in an environment variable.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::CheckpointStep;

/// What happens in a step of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetFault {
    /// It fails once.
    Fails(CheckpointStep),
    /// It fails, and the process loses its device.
    Loses(CheckpointStep),
    /// It waits for [`Hold::release`].
    Holds(CheckpointStep),
    /// The target cannot be taken off its device, and shows it.
    Obstacle,
}

/// The steps that change a state, in their order.
pub const STEPS: [CheckpointStep; 4] =
    [CheckpointStep::Lock, CheckpointStep::Checkpoint, CheckpointStep::Restore, CheckpointStep::Unlock];

/// A step that waits, in another process: by the files `NAME.reached` and `NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold(PathBuf);

impl Hold {
    /// The hold of a folder.
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self(folder.join("hold"))
    }

    /// Its path, for the variable.
    ///
    /// # Panics
    /// For a folder whose name is no text.
    #[must_use]
    pub fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// Whether a step waits.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        self.0.with_extension("reached").exists()
    }

    /// For another target.
    pub fn reset(&self) {
        for path in [&self.0, &self.0.with_extension("reached")] {
            let _ = fs::remove_file(path);
        }
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn release(&self) {
        fs::write(&self.0, "").unwrap();
    }

    /// What the step does.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn wait(&self) {
        fs::write(self.0.with_extension("reached"), "").unwrap();
        while !self.0.exists() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
