//! Why a configuration cannot be used.

use std::path::PathBuf;

use super::place::FilePlace;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of another type.
    #[error("{}{text}", at(place.as_ref()))]
    Syntax {
        /// The mistake, and what would be right.
        text: String,
        /// Where it is.
        place: Option<FilePlace>,
    },
    /// A value is invalid.
    #[error("{}{section}: {reason}", at(place.as_ref()))]
    Invalid {
        /// The section or model.
        section: String,
        /// The mistake and what would help.
        reason: String,
        /// The key, or else the section; `None` if the file has neither.
        place: Option<FilePlace>,
    },
}

impl ConfigError {
    /// Where the mistake is.
    #[must_use]
    pub fn place(&self) -> Option<&FilePlace> {
        match self {
            Self::Read { .. } => None,
            Self::Syntax { place, .. } | Self::Invalid { place, .. } => place.as_ref(),
        }
    }
}

fn at(place: Option<&FilePlace>) -> String {
    place.map(|place| format!("line {}, column {}: ", place.line, place.column)).unwrap_or_default()
}

/// A value of this section that is invalid.
#[must_use]
pub fn invalid(section: &str, reason: &str) -> ConfigError {
    ConfigError::Invalid { section: section.to_owned(), reason: reason.to_owned(), place: None }
}
