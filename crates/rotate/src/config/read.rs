//! Reads a configuration, and checks all of it, or only what operators' commands use.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use poorwill_front::file::{self, RawControl};
use poorwill_front::settings::{Control, Mistakes};
use serde::Deserialize;

use super::raw::{self, File};
use super::{Config, ConfigError};

/// The file, without its other tables.
#[derive(Debug, Default, Deserialize)]
struct ControlFile {
    #[serde(default)]
    control: RawControl,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&file::read(path)?, &file::from_source)
    }

    /// Reads only the listener for operators. Keys and variables of other tables need not be there.
    ///
    /// # Errors
    /// The file is not TOML, or something is wrong with `[control]`.
    pub fn read_control(path: &Path) -> Result<Control, ConfigError> {
        let text = file::read(path)?;
        let ControlFile { control } = file::parse_table(&text, &file::from_source, "control")?;
        let mut mistakes = Mistakes::default();
        let control = control.alone(&file::from_source, &mut mistakes.of("control"));
        file::without_mistakes(Some(control), mistakes, &text, &file::from_source)
    }

    /// Parses a file. `secret` resolves the source of a key, `env:NAME` or `file:PATH`, and `${env.NAME}`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let file: File = file::parse(text, secret, &raw::tables())?;
        let mut mistakes = Mistakes::default();
        let variables = RefCell::new(BTreeSet::new());
        let recorded = |source: &str| {
            variables.borrow_mut().extend(source.strip_prefix("env:").map(str::to_owned));
            secret(source)
        };
        let mut config = file.checked(&recorded, &mut mistakes);
        config.secret_variables = variables.take();
        file::without_mistakes(Some(config), mistakes, text, secret)
    }
}
