//! Paths as they are written, and as they are meant.

use super::api_error::ApiError;

/// Paths are forwarded as written. One that another server could read differently is refused.
pub(super) fn check_path(rest: &str) -> Result<(), ApiError> {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'\\';
    let is_way = |segment: &str| !segment.is_empty() && segment != "." && segment != "..";
    let is_fine = rest.bytes().all(is_plain) && rest.split('/').all(is_way) && encodes_no_way(rest);
    is_fine.then_some(()).ok_or_else(|| {
        ApiError::bad(
            "a path has no empty parts, no `.` and `..`, no backslash, and none of those and no slash and percent sign \
             encoded",
        )
    })
}

pub(super) fn is_listed<'a>(path: &str, mut listed: impl Iterator<Item = &'a str>) -> bool {
    listed.any(|one| if one.ends_with('/') { path.starts_with(one) } else { path == one })
}

fn encodes_no_way(path: &str) -> bool {
    path.split('%').skip(1).all(|rest| {
        let byte = rest.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        byte.is_some_and(|byte| !matches!(byte, b'/' | b'\\' | b'.' | b'%') && !byte.is_ascii_control())
    })
}

/// Percent-decodes.
pub(super) fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(part.get(2..)?.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_as_they_are_written() {
        for path in ["chat/completions", "a", "a.b/c", "x%20y", "responses/resp_1/cancel"] {
            assert!(check_path(path).is_ok(), "{path}");
        }
        for path in [
            "", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "%2e%2e/a", "a%2Fb", "a%5cb", "%252e", "%",
            "%zz", "%0a", "a\u{e4}",
        ] {
            assert!(check_path(path).is_err(), "{path}");
        }
    }

    #[test]
    fn names_in_paths_may_be_encoded() {
        assert_eq!(decoded("a%2Fb c").as_deref(), Some("a/b c"));
        assert_eq!(decoded("a%2"), None);
        assert_eq!(decoded("%ff"), None);
    }
}
