//! Configuration files: TOML with macros, values with units, and errors that say where a mistake is.
//!
//! API keys are never in a file, only where they are [stored](Secret). Errors and excerpts show no secret.

mod error;
mod listeners;
mod macros;
mod masked;
mod place;
mod source;
mod tables;
mod text;
mod tls;
mod url;
mod values;

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;

use crate::settings::{Mistake, Mistakes};

pub use self::error::ConfigError;
pub use self::listeners::{RawControl, RawFront};
pub use self::place::FilePlace;
pub use self::source::{Secret, from_source};
pub use self::tables::TableKeys;
pub use self::text::read;
pub use self::tls::{client_files, server_files};
pub use self::url::{check_secure_url, check_url};
pub use self::values::{Size, Wait, is_priority, nearest};

/// Reads the text of a file, with its macros replaced. `tables` explain a key that belongs to another table.
///
/// # Errors
/// It is not TOML, or has an unknown key or a value of another type.
pub fn parse<T: DeserializeOwned>(
    text: &str,
    secret: Secret<'_>,
    tables: &[TableKeys],
) -> Result<T, ConfigError> {
    let table = toml::Deserializer::from(macros::parsed(text, secret, None)?);
    T::deserialize(table).map_err(|error| values::explained(text, &error, tables))
}

/// Reads one table of a file. What only the others mention, such as variables, need not be there.
///
/// # Errors
/// As [`parse`].
pub fn parse_table<T: DeserializeOwned>(
    text: &str,
    secret: Secret<'_>,
    table: &str,
) -> Result<T, ConfigError> {
    let table = toml::Deserializer::from(macros::parsed(text, secret, Some(table))?);
    T::deserialize(table).map_err(|error| values::explained(text, &error, &[]))
}

/// `checked`, if there are no mistakes.
///
/// # Errors
/// All mistakes, in the order of the file of this text, each with its place. A rule of every model may be a mistake of
/// each, and is reported once.
pub fn without_mistakes<T>(
    checked: Option<T>,
    mistakes: Mistakes,
    text: &str,
    secret: Secret<'_>,
) -> Result<T, ConfigError> {
    let mistakes = mistakes.all();
    if let (Some(checked), true) = (checked, mistakes.is_empty()) {
        return Ok(checked);
    }
    let file = macros::parsed(text, secret, None).or_else(|_| macros::unreplaced(text)).ok();
    let placed = |Mistake { section, reason }| {
        let file = file.as_ref();
        let place = file.map(|file| FilePlace::of_reason(text, file.get_ref(), &section, &reason));
        ConfigError::Invalid { section, reason, place }
    };
    let mut all: Vec<ConfigError> = mistakes.into_iter().map(placed).collect();
    all.sort_by_key(|error| error.place().map_or((usize::MAX, 0), |place| (place.line, place.column)));
    let mut reported = BTreeSet::new();
    all.retain(|error| match error {
        ConfigError::Invalid { reason, place: Some(place), .. } => {
            reported.insert((place.line, place.column, reason.clone()))
        }
        _ => true,
    });
    Err(ConfigError::of_all(all))
}
