//! `poorwill rotate import`: the configuration that llama-swap's YAML becomes.
//!
//! Nothing is dropped silently: what has no counterpart is in a comment of the new file, and in a warning.

mod address;
mod command;
mod convert;
mod macros;
mod matrix;
mod model;
mod names;
mod ports;
mod selector;
mod warnings;
mod yaml;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use poorwill_rotate::config::{ConfigError, read_text};
use serde::Serialize;

use self::yaml::Mistake;
use super::draft;
use poorwill_local::failure::{CommandOutput, Failure};

#[derive(Debug, Serialize)]
pub(crate) struct ImportReport {
    /// The written file. Without one, the configuration is the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// The names of the models.
    models: Vec<String>,
    /// What was not carried over, or changes.
    warnings: Vec<String>,
    /// Its text, where no file was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    configuration: Option<String>,
}

impl CommandOutput for ImportReport {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        let Some(file) = &self.file else { return self.configuration.clone().unwrap_or_default() };
        let (file, count) = (file.display(), self.models.len());
        let models = if count == 1 { "1 model".to_owned() } else { format!("{count} models") };
        format!("wrote {file}: {models}\nnext: poorwill rotate check --config {file}\n")
    }
}

/// Writes the file, or returns its text without one.
pub(super) fn run(source: &Path, path: Option<&Path>) -> Result<ImportReport, Failure> {
    let text = text_of(source)?;
    let in_source =
        |mistake: Mistake| Failure::new(format!("{}: {}: {}", source.display(), mistake.place, mistake.text));
    let converted = yaml::parsed(&text).and_then(|file| convert::converted(&file)).map_err(in_source)?;
    let text = converted.draft.text()?;
    for warning in &converted.warnings {
        // Without standard error there is no place for it.
        let _ = writeln!(io::stderr(), "warning: {}: {warning}", source.display());
    }
    if let Some(path) = path {
        draft::write_new(path, &text)?;
    }
    Ok(ImportReport {
        models: converted.draft.models.iter().map(|model| model.name.clone()).collect(),
        warnings: converted.warnings,
        configuration: path.is_none().then_some(text),
        file: path.map(Path::to_path_buf),
    })
}

fn text_of(source: &Path) -> Result<String, Failure> {
    read_text(source).map_err(|error| match error {
        ConfigError::Read { source: reason, .. } => {
            Failure::new(format!("cannot read {}: {reason}", source.display()))
        }
        error => Failure::new(format!("{}: {error}", source.display())),
    })
}
