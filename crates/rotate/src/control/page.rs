//! The web page: one file without dependencies, and its content security policy.

use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName};

const PAGE: &str = include_str!("page.html");

/// Only the style and script in the page may load, by their SHA-256. A test computes both hashes.
const POLICY: &str = concat!(
    "default-src 'none'; ",
    "style-src 'sha256-yuJNYjCtql6o7HQ7hi0Km4xxp6THHTUFB4HlLvqUFvs='; ",
    "script-src 'sha256-JHl3LM5OYHpPLfqo7zm3MLpQtCzcS6xT1KKNMfbCR7w='; ",
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; ",
    "require-trusted-types-for 'script'"
);

pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
    ];
    (headers, PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine as _};
    use sha2::{Digest as _, Sha256};

    use super::*;

    /// The tag occurs once.
    fn inside(tag: &str) -> &'static str {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        assert_eq!((PAGE.matches(&open).count(), PAGE.matches(&close).count()), (1, 1), "{tag}");
        PAGE.split_once(&open).unwrap().1.split_once(&close).unwrap().0
    }

    #[test]
    fn the_policy_lets_this_style_and_this_script_run_and_no_other() {
        for tag in ["style", "script"] {
            assert_eq!(PAGE.matches(&format!("<{tag}")).count(), 1, "one {tag}, without attributes");
            let hash = BASE64_STANDARD.encode(Sha256::digest(inside(tag)));
            let source = format!("{tag}-src 'sha256-{hash}';");
            assert!(POLICY.contains(&source), "the page was changed; it has to be {source}");
        }
        assert!(POLICY.starts_with("default-src 'none';") && POLICY.contains("frame-ancestors 'none'"));
        assert!(!POLICY.contains("unsafe"), "{POLICY}");
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_makes_no_markup_of_text() {
        for part in
            ["http:", "https:", "//cdn", "src=", "@import", "url(", " style=", " onclick=", "javascript:"]
        {
            assert!(!PAGE.contains(part), "{part}");
        }
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "Function(",
            "EventSource(",
        ] {
            assert!(!inside("script").contains(way), "{way}");
        }
        let links: Vec<&str> = PAGE.match_indices("href=").map(|(at, _)| &PAGE[at..at + 13]).collect();
        assert_eq!(links, ["href=\"data:,\""]);
    }

    #[test]
    fn every_part_that_the_script_looks_for_is_there_once() {
        let asked = inside("script").split("at(\"").skip(1).map(|rest| rest.split_once('"').unwrap().0);
        let mut count = 0;
        for id in asked {
            assert_eq!(PAGE.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
            count += 1;
        }
        assert!(count > 20, "{count}");
    }
}
