//! Settings of the allocator that was recorded, as `PYTORCH_ALLOC_CONF` has them.

use super::view::View;
use crate::read::fault::{Fault, Location};
use crate::read::value::Value;

const PLACE: Location = Location::Key("allocator_settings");
/// More is PyTorch's word for no limit.
const SPLIT_BYTES_MAX: u64 = 1 << 60;
/// Of 64 bits.
const DIGITS_MAX: usize = 20;

/// The text that was set last. Where there is none, what its values would be set by.
pub(super) fn text(view: &View<'_>, settings: Value) -> Result<String, Fault> {
    if settings == Value::None {
        return Ok(String::new());
    }
    let keys = view.keys([
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "max_split_size",
        "expandable_segments",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
    ]);
    let [text, older, split, expandable, collect, roundup] = view.fields(settings, &keys, PLACE)?;
    let arena = view.arena();
    for text in [text, older].into_iter().filter_map(|text| arena.as_text(text)) {
        if !text.trim().is_empty() {
            return Ok(text.trim().to_owned());
        }
    }
    let mut all = Vec::new();
    if let Some(bytes) = arena.as_unsigned(split).filter(|bytes| (1..SPLIT_BYTES_MAX).contains(bytes)) {
        all.push(format!("max_split_size_mb:{}", bytes >> 20));
    }
    if expandable == Value::Bool(true) {
        all.push("expandable_segments:True".to_owned());
    }
    if let Some(part) = arena.as_float(collect).filter(|part| *part > 0.0 && part.is_finite()) {
        all.push(format!("garbage_collection_threshold:{part}"));
    }
    if roundup != Value::None {
        all.extend(roundup_text(view, roundup)?);
    }
    Ok(all.join(","))
}

/// `4` if all sizes have it, or `[256:1,512:2]`.
fn roundup_text(view: &View<'_>, roundup: Value) -> Result<Option<String>, Fault> {
    let mut all = Vec::new();
    for (size, divisions) in view.dict(roundup, PLACE)? {
        // A file may share a text of a megabyte as often as it likes.
        let size = view.arena().as_text(size).filter(|size| size.len() <= DIGITS_MAX);
        let Some(size) = size.and_then(|size| size.parse::<u64>().ok()) else { continue };
        all.push((size, view.unsigned(divisions, "roundup_power2_divisions", PLACE)?));
    }
    let Some((_, first)) = all.first().copied() else { return Ok(None) };
    let value = if all.iter().all(|(_, divisions)| *divisions == first) {
        if first <= 1 {
            return Ok(None);
        }
        first.to_string()
    } else {
        let all: Vec<_> = all.iter().map(|(size, divisions)| format!("{size}:{divisions}")).collect();
        format!("[{}]", all.join(","))
    };
    Ok(Some(format!("roundup_power2_divisions:{value}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::json;

    #[test]
    fn settings_are_those_of_the_environment() {
        for (settings, expected) in [
            ("null", ""),
            ("{}", ""),
            (
                r#"{"PYTORCH_CUDA_ALLOC_CONF": " max_split_size_mb:20 ", "max_split_size": -1}"#,
                "max_split_size_mb:20",
            ),
            (r#"{"PYTORCH_ALLOC_CONF": "a:b", "PYTORCH_CUDA_ALLOC_CONF": ""}"#, "a:b"),
            (
                r#"{"max_split_size": 20971520, "expandable_segments": true, "garbage_collection_threshold": 0.8}"#,
                "max_split_size_mb:20,expandable_segments:True,garbage_collection_threshold:0.8",
            ),
            (
                r#"{"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": 9223372036854775807,
                    "expandable_segments": false, "garbage_collection_threshold": 0.0,
                    "roundup_power2_divisions": {"1": 0, "2": 0}}"#,
                "",
            ),
            (
                r#"{"max_split_size": -1, "roundup_power2_divisions": {"1": 4, "2": 4}}"#,
                "roundup_power2_divisions:4",
            ),
            (r#"{"roundup_power2_divisions": {"000000000000000000001": 4}}"#, ""),
            (r#"{"roundup_power2_divisions": {"1": 0, "2": 4}}"#, "roundup_power2_divisions:[1:0,2:4]"),
        ] {
            let (arena, root) = json::read(settings.as_bytes()).unwrap();
            assert_eq!(text(&View::new(&arena), root).unwrap(), expected);
        }
        let (arena, root) = json::read(b"3").unwrap();
        assert_eq!(text(&View::new(&arena), root).unwrap_err().what, "this is no dict");
    }
}
