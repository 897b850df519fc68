//! What every command of `rotate` begins with: the configuration, and threads.

use std::io;
use std::path::Path;

use poorwill::chain;
use poorwill_local::failure::Failure;
use poorwill_rotate::config::{Config, ConfigError};
use tokio::runtime::{Builder, Runtime};

pub(super) fn read(path: &Path) -> Result<Config, Failure> {
    Config::read(path).map_err(|error| match error {
        ConfigError::Read { .. } => Failure::new(chain(&error)),
        _ => {
            let excerpt = error.place().and_then(|place| place.excerpt.clone());
            Failure::new(format!("{}: {}", path.display(), chain(&error))).with_excerpt(excerpt)
        }
    })
}

pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let failed = |error: io::Error| Failure::new(format!("cannot start threads: {error}"));
    Builder::new_multi_thread().enable_all().build().map_err(failed)
}
