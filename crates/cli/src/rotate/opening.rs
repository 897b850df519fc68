//! What every command of `rotate` begins with: the configuration, and threads.

use std::io;
use std::path::Path;

use poorwill::chain;
use poorwill_local::failure::Failure;
use poorwill_rotate::config::{Config, ConfigError, Control};
use tokio::runtime::{Builder, Runtime};

pub(super) fn read(path: &Path) -> Result<Config, Failure> {
    Config::read(path).map_err(|error| config_failure(path, &error))
}

/// Only the listener for operators: commands to a rotation that runs need no key of the front, and no other variable.
pub(super) fn read_control(path: &Path) -> Result<Control, Failure> {
    Config::read_control(path).map_err(|error| config_failure(path, &error))
}

/// All mistakes of the file.
pub(crate) fn config_failure(path: &Path, error: &ConfigError) -> Failure {
    let mut all = error.mistakes().iter().map(|mistake| match mistake {
        ConfigError::Read { .. } => Failure::new(chain(mistake)),
        _ => {
            let excerpt = mistake.place().and_then(|place| place.excerpt.clone());
            Failure::new(format!("{}: {}", path.display(), chain(mistake))).with_excerpt(excerpt)
        }
    });
    match all.next() {
        Some(first) => first.with_others(all.collect()),
        None => Failure::new(chain(error)),
    }
}

pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let failed = |error: io::Error| Failure::new(format!("cannot start threads: {error}"));
    Builder::new_multi_thread().enable_all().build().map_err(failed)
}
