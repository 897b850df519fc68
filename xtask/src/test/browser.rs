//! Finds the browser for the tests of pages, and these: Chromium, with a driver of its version.

use std::process::{Command, Stdio};

/// Names of Chromium.
const BROWSERS: [&str; 3] = ["chromium", "google-chrome", "chromium-browser"];
const DRIVER: &str = "chromedriver";

pub(super) const MISSING: &str = "no Chromium with its chromedriver here (Debian's packages chromium and chromium-driver): \
     no page was tried in a browser";

/// Programs and their modules with tests of pages.
const PAGES: [(&str, &str); 3] =
    [("cli", "rotate::page::"), ("cli", "rotate::fleet_page::"), ("replay", "page::")];

/// Looks at a page as a file.
const NO_BROWSER: &str = "page::pages_of_many_steps_are_small";

/// Whether an ignored test is of a page, and fails without a browser.
pub(super) fn is_needed(program: &str, test: &str) -> bool {
    test != NO_BROWSER && PAGES.iter().any(|(of, module)| *of == program && test.starts_with(module))
}

/// Whether both exist. A driver works with browsers of its own version.
pub(super) fn is_here() -> bool {
    are_here(major_of)
}

fn are_here(major_of: impl Fn(&str) -> Option<u32>) -> bool {
    let browser = BROWSERS.into_iter().find_map(&major_of);
    browser.is_some() && browser == major_of(DRIVER)
}

/// The major version of a program; `None` if it does not run.
fn major_of(program: &str) -> Option<u32> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then(|| major_in(&text)).flatten()
}

fn major_in(text: &str) -> Option<u32> {
    text.split_whitespace().find_map(|word| word.split_once('.')?.0.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_pages_need_one() {
        for (program, test, needs) in [
            ("cli", "rotate::page::it_shows", true),
            ("cli", "rotate::fleet_page::it_shows", true),
            ("replay", "page::the_page_shows", true),
            ("cli", "rotate::chaos::page::it_serves", false),
            ("poorwill_replay", "page::tests::it_is_small", false),
            ("replay", "page::pages_of_many_steps_are_small", false),
            ("replay", "read::million::it_is_read", false),
        ] {
            assert_eq!(is_needed(program, test), needs, "{program} {test}");
        }
    }

    #[test]
    fn a_browser_counts_with_the_driver_of_its_version() {
        for (here, is_enough) in [
            (&[("chromium", 156), ("chromedriver", 156)][..], true),
            (&[("google-chrome", 156), ("chromedriver", 156)], true),
            (&[("chromium", 156), ("chromedriver", 140)], false),
            (&[("chromium", 156)], false),
            (&[("chromedriver", 156)], false),
            (&[], false),
        ] {
            let major_of =
                |program: &str| here.iter().find(|(name, _)| *name == program).map(|(_, major)| *major);
            assert_eq!(are_here(major_of), is_enough, "{here:?}");
        }
        assert_eq!(major_in("Chromium 156.0.8078.79 built on Debian"), Some(156));
        assert_eq!(major_in("ChromeDriver 140.1 (a.b)"), Some(140));
        assert_eq!(major_in("no version"), None);
        assert_eq!(major_of("poorwill-no-such-program"), None);
    }
}
