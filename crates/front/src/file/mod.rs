//! Configuration files: TOML with macros, values with units, and errors that say where a mistake is.
//!
//! API keys are never in a file, only where they are [stored](Secret). Errors and excerpts show no secret.

mod error;
mod listeners;
mod macros;
mod masked;
mod place;
mod source;
mod tls;
mod url;
mod values;

use serde::de::DeserializeOwned;

pub use self::error::{ConfigError, invalid};
pub use self::listeners::{RawControl, RawFront};
pub use self::place::FilePlace;
pub use self::source::{Secret, from_source};
pub use self::tls::{client_files, server_files};
pub use self::url::{check_secure_url, check_url};
pub use self::values::{Size, Wait, is_priority, nearest};

/// Reads the text of a file, with its macros replaced.
///
/// # Errors
/// It is not TOML, or has an unknown key or a value of another type.
pub fn parse<T: DeserializeOwned>(text: &str, secret: Secret<'_>) -> Result<T, ConfigError> {
    let table = toml::Deserializer::from(macros::parsed(text, secret)?);
    T::deserialize(table).map_err(|error| values::explained(text, &error))
}

/// A mistake with its place in the file of this text.
#[must_use]
pub fn placed(error: ConfigError, text: &str, secret: Secret<'_>) -> ConfigError {
    match error {
        ConfigError::Invalid { section, reason, place: None } => {
            let file = macros::parsed(text, secret).ok();
            let place = file.and_then(|file| FilePlace::of_reason(text, file.get_ref(), &section, &reason));
            ConfigError::Invalid { section, reason, place }
        }
        other => other,
    }
}
