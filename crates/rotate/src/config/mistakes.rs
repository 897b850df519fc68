//! The mistakes of a configuration, which are reported all at once.

use super::{ConfigError, invalid};

/// All that were found so far.
#[derive(Debug, Default)]
pub(super) struct Mistakes(Vec<ConfigError>);

/// Those of one section.
#[derive(Debug)]
pub(super) struct SectionMistakes<'a> {
    section: String,
    all: &'a mut Mistakes,
}

impl Mistakes {
    pub(super) fn of(&mut self, section: impl Into<String>) -> SectionMistakes<'_> {
        SectionMistakes { section: section.into(), all: self }
    }

    /// `checked`, if there are none.
    pub(super) fn none_or<T>(self, checked: Option<T>) -> Result<T, ConfigError> {
        match checked {
            Some(checked) if self.0.is_empty() => Ok(checked),
            _ => Err(ConfigError::of_all(self.0)),
        }
    }
}

impl SectionMistakes<'_> {
    pub(super) fn add(&mut self, reason: impl AsRef<str>) {
        self.all.0.push(invalid(&self.section, reason.as_ref()));
    }

    pub(super) fn add_if(&mut self, is_wrong: bool, reason: impl AsRef<str>) {
        if is_wrong {
            self.add(reason);
        }
    }

    /// The value, unless it is a mistake, which is added.
    pub(super) fn right<T>(&mut self, checked: Result<T, String>) -> Option<T> {
        checked.map_err(|reason| self.add(reason)).ok()
    }
}
