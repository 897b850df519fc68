//! A browser with the page of a rotation.

use poorwill_testkit::browser::Browser;

use super::fixture::Fixture;

/// With the page of this port. What the browser writes is in the fixture's folder.
pub(crate) fn opened(fixture: &Fixture, port: u16) -> Browser {
    let browser = Browser::start(&fixture.folder.join("browser"), |command| fixture.mark(command));
    browser.open(&format!("http://127.0.0.1:{port}/"));
    browser
}
