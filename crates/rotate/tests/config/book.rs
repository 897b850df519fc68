//! The configurations of the book's pages: each is accepted as it stands.

use poorwill_rotate::config::Config;
use poorwill_testkit::book::snippets;

#[test]
fn configurations_of_the_pages_are_accepted() {
    let configurations = snippets("toml").into_iter().filter(|snippet| snippet.code.contains("[[model]]"));
    let mut count = 0;
    for snippet in configurations {
        let parsed = Config::parse(&snippet.code, &|_| Ok("secret".to_owned()));
        assert!(parsed.is_ok(), "{}:{}: {}", snippet.page, snippet.line, parsed.unwrap_err());
        count += 1;
    }
    assert!(count > 1, "only {count} configurations were found");
}
