//! The web pages of a node and of a router: one file each without dependencies, and its content security policy.
//!
//! Both have one style and one script in common, and a script of their own.

use axum::response::{IntoResponse, Response};
use http::header::{self, HeaderName};

/// A page and its policy.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    html: &'static str,
    policy: &'static str,
}

/// From a title, a body, and its script.
macro_rules! html {
    ($title:literal, $body:literal, $script:literal) => {
        concat!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>",
            $title,
            "</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n",
            include_str!("page/shared.css"),
            "</style>\n</head>\n<body>\n",
            include_str!($body),
            "<script>\n",
            include_str!("page/shared.js"),
            "</script>\n<script>\n",
            include_str!($script),
            "</script>\n</body>\n</html>\n",
        )
    };
}

/// Only the style and scripts in the page may load, by their SHA-256. A test computes all hashes.
macro_rules! policy {
    ($script:literal) => {
        concat!(
            "default-src 'none'; ",
            "style-src 'sha256-xvObIS4MM9A7DduCjuqxfmhFfsKoaO2K7NXR1jV+Kyw='; ",
            "script-src 'sha256-1lIN5Bol9NYKekUmKj8NtQ6o1jsr4k4KBFlSX6J+EHQ=' 'sha256-",
            $script,
            "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; ",
            "require-trusted-types-for 'script'"
        )
    };
}

/// Of a node.
pub const NODE: Page = Page {
    html: html!("Poorwill rotation", "page/node.html", "page/node.js"),
    policy: policy!("lBHuWZnxwKCkTUZE9b+DVlpMxbAJcYrtJjnW5SoGAeM="),
};

/// Of a router.
pub const FLEET: Page = Page {
    html: html!("Poorwill fleet", "page/fleet.html", "page/fleet.js"),
    policy: policy!("dBhFJuPe8RCD3XQ0gCBub2Xgbhq5apDvtxxTZ7itLO4="),
};

impl IntoResponse for Page {
    fn into_response(self) -> Response {
        let headers = [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, self.policy),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::X_FRAME_OPTIONS, "DENY"),
            (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
            (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
        ];
        (headers, self.html).into_response()
    }
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, Engine as _};
    use sha2::{Digest as _, Sha256};

    use super::*;

    const PAGES: [Page; 2] = [NODE, FLEET];

    /// What is between all tags of this name, which have no attributes.
    fn inside(page: Page, tag: &str) -> Vec<&'static str> {
        let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
        assert_eq!(page.html.matches(&format!("<{tag}")).count(), page.html.matches(&open).count(), "{tag}");
        assert_eq!(page.html.matches(&open).count(), page.html.matches(&close).count(), "{tag}");
        page.html.split(&open).skip(1).map(|rest| rest.split_once(&close).unwrap().0).collect()
    }

    fn script(page: Page) -> String {
        inside(page, "script").concat()
    }

    #[test]
    fn the_policy_lets_this_style_and_these_scripts_run_and_no_other() {
        for page in PAGES {
            for tag in ["style", "script"] {
                let hash =
                    |text: &&str| format!(" 'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text)));
                let hashes: String = inside(page, tag).iter().map(hash).collect();
                let source = format!("{tag}-src{hashes};");
                assert!(page.policy.contains(&source), "the page was changed; it has to be {source}");
            }
            assert!(page.policy.starts_with("default-src 'none';"), "{}", page.policy);
            assert!(page.policy.contains("frame-ancestors 'none'"), "{}", page.policy);
            assert!(!page.policy.contains("unsafe"), "{}", page.policy);
        }
    }

    #[test]
    fn the_pages_need_nothing_from_elsewhere_and_make_no_markup_of_text() {
        for page in PAGES {
            for part in
                ["http:", "https:", "//cdn", "src=", "@import", "url(", " style=", " onclick=", "javascript:"]
            {
                assert!(!page.html.contains(part), "{part}");
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
                assert!(!script(page).contains(way), "{way}");
            }
            let links: Vec<&str> =
                page.html.match_indices("href=").map(|(at, _)| &page.html[at..at + 13]).collect();
            assert_eq!(links, ["href=\"data:,\""]);
        }
    }

    #[test]
    fn every_part_that_a_script_looks_for_is_there_once() {
        for page in PAGES {
            let script = script(page);
            let asked = script.split("at(\"").skip(1).map(|rest| rest.split_once('"').unwrap().0);
            let mut count = 0;
            for id in asked {
                assert_eq!(page.html.matches(&format!("id=\"{id}\"")).count(), 1, "{id}");
                count += 1;
            }
            assert!(count > 20, "{count}");
        }
    }
}
