//! Where secrets are kept: never in the file itself.

use std::env::VarError;
use std::fs;

/// Resolves the source of a secret, or says why it cannot.
pub type Secret<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// What is at `env:NAME` or `file:PATH`.
///
/// # Errors
/// There is nothing, or the source is of another kind.
pub fn from_source(source: &str) -> Result<String, String> {
    if let Some(name) = source.strip_prefix("env:") {
        return std::env::var(name).map_err(|error| match error {
            VarError::NotPresent => {
                format!("the environment variable {name} is not set; set it before, or name another source")
            }
            VarError::NotUnicode(_) => format!("the environment variable {name} is not Unicode"),
        });
    }
    if let Some(path) = source.strip_prefix("file:") {
        return fs::read_to_string(path)
            .map_err(|error| format!("{path}: {error}; name a file that this user can read"));
    }
    // The value may be the key itself, so the message does not repeat it.
    Err("keys are not written here; use env:NAME or file:PATH".to_owned())
}
