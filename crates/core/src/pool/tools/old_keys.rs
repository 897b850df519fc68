//! JSON keys under their old names, beside the new ones for one release.

use serde::Serializer;
use serde::ser::SerializeMap;

/// A function for `#[serde(flatten, serialize_with)]` that writes a value under both keys.
macro_rules! both {
    ($new:ident, $old:literal) => {
        pub(in crate::pool) fn $new<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = serializer.serialize_map(Some(2))?;
            map.serialize_entry(stringify!($new), bytes)?;
            map.serialize_entry($old, bytes)?;
            map.end()
        }
    };
}

both!(unchecked_bytes, "trusted_bytes");
both!(unaccounted_bytes, "uncovered_bytes");
both!(deferred_release_bytes, "owed_bytes");
