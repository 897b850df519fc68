//! Paths as they are written, and as they are meant.

use super::api_error::ApiError;
use crate::settings::paths::decoded;

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

/// Whether a path climbs, as written or once it is decoded. Below an engine's own path all else is that engine's.
pub(super) fn climbs(path: &str) -> bool {
    let is_up = |path: &str| path.split(['/', '\\']).any(|part| matches!(part, "." | ".."));
    is_up(path) || decoded(path).is_none_or(|path| is_up(&path))
}

fn encodes_no_way(path: &str) -> bool {
    path.split('%').skip(1).all(|rest| {
        let byte = rest.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        byte.is_some_and(|byte| !matches!(byte, b'/' | b'\\' | b'.' | b'%') && !byte.is_ascii_control())
    })
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
    fn a_path_of_an_engine_does_not_climb() {
        for path in ["/", "/a//b/?x=..", "/a%2Fb", "/a..b/...", "/.a"] {
            assert!(!climbs(path.split('?').next().unwrap()), "{path}");
        }
        for path in
            ["/..", "/../a", "/a/../b", "/a/.", "/%2e%2E/a", "/a%2f..%2fb", "/a\\..\\b", "/a%5c..", "/%"]
        {
            assert!(climbs(path), "{path}");
        }
    }
}
