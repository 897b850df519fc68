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
    /// Several values are invalid, in the order of the file.
    #[error("{}", lines(.0))]
    Several(Vec<ConfigError>),
}

impl ConfigError {
    /// Where the mistake is, or the first one.
    #[must_use]
    pub fn place(&self) -> Option<&FilePlace> {
        match self {
            Self::Read { .. } => None,
            Self::Syntax { place, .. } | Self::Invalid { place, .. } => place.as_ref(),
            Self::Several(all) => all.first()?.place(),
        }
    }

    /// Each mistake.
    #[must_use]
    pub fn mistakes(&self) -> &[Self] {
        match self {
            Self::Several(all) => all,
            one => std::slice::from_ref(one),
        }
    }

    pub(super) fn of_all(mut all: Vec<Self>) -> Self {
        match all.pop() {
            Some(only) if all.is_empty() => only,
            last => {
                all.extend(last);
                Self::Several(all)
            }
        }
    }
}

fn lines(all: &[ConfigError]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn at(place: Option<&FilePlace>) -> String {
    place.map(|place| format!("line {}, column {}: ", place.line, place.column)).unwrap_or_default()
}
