//! The text of a configuration file, or in words what the file is instead.

use std::fs;
use std::path::Path;

use super::error::ConfigError;
use super::place::FilePlace;

/// Bytes of a file that are looked at for zeros.
const LOOKED_AT: usize = 64;

/// Reads a file that has to be UTF-8.
///
/// # Errors
/// It cannot be read, has nothing in it, or has another encoding.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    let bytes = fs::read(path).map_err(|source| ConfigError::Read { path: path.to_path_buf(), source })?;
    text_of(bytes)
}

fn text_of(bytes: Vec<u8>) -> Result<String, ConfigError> {
    if is_wide(&bytes) {
        let reason = "the file is UTF-16, as some editors save text; save it as UTF-8";
        return Err(at_the_start(reason));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let bytes = error.into_bytes();
        let wrong = bytes.get(valid).copied().unwrap_or_default();
        let before = String::from_utf8_lossy(&bytes[..valid]);
        ConfigError::Syntax {
            text: format!("the byte 0x{wrong:02X} is no UTF-8; save the file as UTF-8"),
            place: Some(FilePlace::without_excerpt(&before, before.len())),
        }
    })?;
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    if text.trim().is_empty() {
        return Err(at_the_start("the file is empty; write a configuration into it, or name another file"));
    }
    Ok(text)
}

/// UTF-16 or UTF-32, with a mark at the beginning or not: configurations have letters of ASCII, each with zeros.
fn is_wide(bytes: &[u8]) -> bool {
    let has_mark = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
    let looked_at = &bytes[..bytes.len().min(LOOKED_AT)];
    let zeros = looked_at.iter().filter(|byte| **byte == 0).count();
    has_mark || looked_at.len() > 1 && zeros * 3 > looked_at.len()
}

fn at_the_start(reason: &str) -> ConfigError {
    ConfigError::Syntax { text: reason.to_owned(), place: Some(FilePlace::without_excerpt("", 0)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_text_is_named_in_words() {
        let utf16 = |text: &str, bytes: fn(u16) -> [u8; 2]| text.encode_utf16().flat_map(bytes).collect();
        let (plain, marked) = ("[[model]]\nname = \"x\"\n", "\u{feff}[[model]]\nname = \"x\"\n");
        for (bytes, place, words) in [
            (Vec::new(), (1, 1), "the file is empty"),
            (b" \r\n\t\n".to_vec(), (1, 1), "the file is empty"),
            ("\u{feff}".as_bytes().to_vec(), (1, 1), "the file is empty"),
            (utf16(plain, u16::to_le_bytes), (1, 1), "UTF-16"),
            (utf16(plain, u16::to_be_bytes), (1, 1), "UTF-16"),
            (utf16(marked, u16::to_le_bytes), (1, 1), "UTF-16"),
            (utf16(marked, u16::to_be_bytes), (1, 1), "UTF-16"),
            (b"a = 1\nn = \"\xc3\xa9\xe4\"\n".to_vec(), (2, 7), "the byte 0xE4 is no UTF-8"),
        ] {
            let error = text_of(bytes.clone()).expect_err(words);
            let at = error.place().map(|place| (place.line, place.column));
            assert_eq!(at, Some(place), "{bytes:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(text_of(marked.as_bytes().to_vec()).unwrap(), plain);
    }
}
