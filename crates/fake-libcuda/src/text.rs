//! Numbers and sizes, as the settings write them.

use poorwill_core::ByteSize;

pub(crate) fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|error| format!("`{text}`: {error}"))
}

pub(crate) fn size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.0).map_err(|error| error.to_string())
}
