//! Reads a configuration, and checks all of it.

use std::fs;
use std::path::Path;

use poorwill_front::file;
use poorwill_front::settings::Mistakes;

use super::raw::File;
use super::{Config, ConfigError};

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong; see [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
        Self::parse(&text, &file::from_source)
    }

    /// Parses a file. `secret` resolves the source of a key, `env:NAME` or `file:PATH`, and `${env.NAME}`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str, secret: &dyn Fn(&str) -> Result<String, String>) -> Result<Self, ConfigError> {
        let file: File = file::parse(text, secret)?;
        let mut mistakes = Mistakes::default();
        let config = file.checked(secret, &mut mistakes);
        file::without_mistakes(Some(config), mistakes, text, secret)
    }
}
