//! The page of a replay in a browser: what it shows, and that mouse, keyboard and search change it.

mod traces;

use std::fs;
use std::path::Path;
use std::time::Instant;

use poorwill_replay::page::{PageTrace, page, svg};
use poorwill_replay::{Claim, Run, Setup, Trace};
use poorwill_testkit::browser::{Browser, ENTER, RIGHT};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use serde_json::{Value, json};
use traces::GIB;

/// Stands before scripts.
const WORDS: &str = "
    const text = (css) => document.querySelector(css).innerText.trim();
    const all = (css) => [...document.querySelectorAll(css)];
    const lines = () => all('#chart path[data-setup]').map((one) => one.dataset.setup);
    const pixels = () => [...document.querySelector('#map').toDataURL()]
      .reduce((sum, letter) => (sum * 31 + letter.charCodeAt()) % 1000003, 0);
    const slide = (value) => { const s = document.querySelector('#moment'); s.value = value;
      s.dispatchEvent(new Event('input')); };
    const seek = (words) => { const s = document.querySelector('#search'); s.value = words;
      s.dispatchEvent(new Event('input')); };
";

fn url(file: &Path) -> String {
    format!("file://{}", file.display())
}

fn see(browser: &Browser, expression: &str) -> Value {
    browser.run(&format!("{WORDS} return {expression};"))
}

fn wait(browser: &Browser, expression: &str) {
    browser.until(&format!("(() => {{ {WORDS} return {expression}; }})()"));
}

/// A page of the traces' load, on a card of so many bytes.
fn write_page(path: &Path, total_bytes: u64) {
    let trace = traces::moe();
    let last = trace.steps.len();
    let claim = |name: &str, bytes, phase: usize| Claim {
        name: name.to_owned(),
        bytes,
        from_step: trace.phases[phase].from,
        to_step: last,
    };
    let claims = vec![claim("library", 22 << 20, 1), claim("cache", 9 << 20, 2), claim("graphs", 3 << 19, 3)];
    let trace = Trace { claims, ..trace };
    let runs = traces::runs(&trace, total_bytes);
    let answer = "It needs 31.30 GiB with Poorwill's pool, and 34.59 GiB with PyTorch's allocator.";
    fs::write(path, page_of(&trace, &runs, answer)).unwrap();
    fs::write(path.with_extension("svg"), svg(&trace, &runs, 800, 520)).unwrap();
}

fn page_of(trace: &Trace, runs: &[Run], answer: &str) -> String {
    page(&[PageTrace { trace, runs, answer, notes: &trace.notes }]).unwrap()
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn the_page_shows_the_replay_and_follows_mouse_and_keyboard() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("moe.html");
    write_page(&file, 33 * GIB);
    let browser = Browser::start(folder.path(), |_| ());
    browser.resize(1200, 900);
    browser.open(&url(&file));
    let setups = Setup::ALL.len();
    wait(
        &browser,
        &format!("text('#answer').startsWith('It needs 31.30 GiB') && lines().length === {setups}"),
    );
    assert_eq!(see(&browser, "all('#chart .area').length"), 1);
    assert_eq!(see(&browser, "all('#chart .claim').length"), 3);
    assert_ne!(see(&browser, "all('#chart .failure').length"), 0, "a run that fails is marked");
    // With what is live, and the card.
    assert_eq!(see(&browser, "all('#series-rows > div').length"), setups + 2);
    wait(&browser, "Number(document.querySelector('#map').dataset.parts) > 100");
    let drawn = see(&browser, "pixels()");
    assert_ne!(drawn, 0);

    // The legend toggles, and the line comes back.
    for count in [setups - 1, setups] {
        browser.click("#series-rows .toggle");
        let pressed = see(&browser, "document.querySelector('.toggle').getAttribute('aria-pressed')");
        assert_eq!(
            (see(&browser, "lines().length"), pressed),
            (count.into(), (count == setups).to_string().into())
        );
    }

    // The slider changes the map and who held what; the setup changes the map alone.
    let before = see(&browser, "text('#map-summary') + text('#held-summary')");
    browser.run(&format!("{WORDS} slide(3)"));
    wait(&browser, &format!("text('#map-summary') + text('#held-summary') !== {before}"));
    assert_ne!(see(&browser, "pixels()"), drawn);
    let (held, drawn) = (see(&browser, "text('#held')"), see(&browser, "pixels()"));
    browser.run(
        "const setup = document.querySelector('#setup'); setup.selectedIndex = 1;
         setup.dispatchEvent(new Event('change'));",
    );
    assert_ne!(see(&browser, "pixels()"), drawn);
    assert_eq!(see(&browser, "text('#held')"), held);

    // By keyboard: the cursor moves, and its moment is chosen.
    browser.run("document.querySelector('#chart').focus()");
    let at = see(&browser, "text('#cursor-at')");
    browser.keys(RIGHT);
    assert_ne!(see(&browser, "text('#cursor-at')"), at);
    let moment = see(&browser, "text('#moment-at')");
    browser.keys(ENTER);
    assert_ne!(see(&browser, "text('#moment-at')"), moment);
    // A window that loses its focus for a moment shows nothing of the map.
    let began = Instant::now();
    while see(&browser, "/^0x[0-9a-f]+: /.test(text('#map-reading'))") != true {
        assert!(began.elapsed() < TEST_TIMEOUT, "the map tells nothing of a part");
        browser.run("document.querySelector('#map').focus()");
        browser.keys(RIGHT);
    }
    // By mouse: in the middle of the chart.
    browser.click("#chart");
    wait(
        &browser,
        "/After step [4-6]\\d\\d of/.test(text('#moment-at')) && text('#cursor-at').includes('load')",
    );

    // A search leaves what has the words, and a stack unfolds.
    let rows = see(&browser, "all('#holders .who').length").as_u64().unwrap();
    assert!(rows >= 3, "{rows}");
    browser.run(&format!("{WORDS} seek('MXFP4.py')"));
    assert_eq!(see(&browser, "all('#holders .who').length"), 1);
    assert_eq!(see(&browser, "text('#holders .name')"), "create_scales");
    assert_eq!(see(&browser, "all('#holders mark').length > 0"), true);
    browser.click("#holders .who");
    assert_eq!(see(&browser, "all('#holders .stack li').length"), 3);
    browser.run(&format!("{WORDS} seek('no such words')"));
    assert_eq!(see(&browser, "all('#holders tr').length"), 0);
    browser.run(&format!("{WORDS} seek('')"));
    assert_eq!(see(&browser, "all('#holders .who').length"), rows);

    assert_narrow(&browser);
    let light = see(&browser, "getComputedStyle(document.body).backgroundColor");
    browser.prefer("dark");
    wait(&browser, &format!("getComputedStyle(document.body).backgroundColor !== {light}"));
    assert_eq!(browser.complaints(), [] as [String; 0]);
    let own = format!("file://{}", file.display());
    let asked = browser.requests();
    assert!(asked.iter().all(|url| *url == own || url.starts_with("data:")), "{asked:?}");
}

/// At the width of a small telephone everything is there, and nothing has to be scrolled to sideways.
fn assert_narrow(browser: &Browser) {
    browser.resize(360, 740);
    wait(browser, "document.querySelector('#chart svg').viewBox.baseVal.width < 360");
    let wide = "all('body *').filter((one) => one.checkVisibility() && !one.closest('svg, .unseen')
      && one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 120))";
    assert_eq!(see(browser, wide), json!([]));
    assert_eq!(see(browser, "document.scrollingElement.scrollWidth <= innerWidth"), true);
    let cut = "all('button, select').filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)";
    assert_eq!(see(browser, cut), json!([]));
    let outside = "all('#chart text').filter((one) => { const [text, chart] = [one, one.closest('#chart')].map((node) =>
      node.getBoundingClientRect()); return text.left < chart.left || text.right > chart.right; }).map((one) => one.textContent)";
    assert_eq!(see(browser, outside), json!([]));
    browser.resize(1200, 900);
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn each_rank_is_chosen_by_keyboard_and_shows_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ranks.html");
    let ranks: Vec<Trace> =
        (1..5).map(|rank| Trace { name: format!("rank {rank}"), ..traces::long(rank * 700) }).collect();
    let runs: Vec<Vec<Run>> = ranks.iter().map(|trace| traces::runs(trace, 79 * GIB)).collect();
    let answers: Vec<String> = (1..5)
        .map(|rank| format!("It fits: `pytorch` maps {rank} GiB at most, at step 3 of `a. Big part`. `poorwill` maps less."))
        .collect();
    let notes = vec!["It is not known: counted back from `segments`.".to_owned()];
    let shown: Vec<PageTrace<'_>> = (0..ranks.len())
        .map(|at| PageTrace { trace: &ranks[at], runs: &runs[at], answer: &answers[at], notes: &notes })
        .collect();
    fs::write(&file, page(&shown).unwrap()).unwrap();
    let browser = Browser::start(folder.path(), |_| ());
    browser.open(&url(&file));
    wait(&browser, "text('#name') === 'rank 1'");
    let mut seen = Vec::new();
    for rank in 1..5 {
        if rank > 1 {
            browser.run("document.querySelector('#trace').focus()");
            browser.keys(RIGHT);
        }
        wait(&browser, &format!("text('#name') === 'rank {rank}' && document.readyState === 'complete'"));
        assert_eq!(see(&browser, "document.title"), format!("rank {rank} · Poorwill replay"));
        let heading = format!("It fits: pytorch maps {rank} GiB at most, at step 3 of a. Big part.");
        assert_eq!(see(&browser, "text('#answer')"), heading);
        assert_eq!(
            see(&browser, "text('#reasons') + text('#notes')"),
            "poorwill maps less.It is not known: counted back from segments."
        );
        assert_eq!(see(&browser, "document.activeElement.id"), if rank > 1 { "trace" } else { "" });
        seen.push(see(
            &browser,
            "[text('.series-row'), document.querySelector('#chart .area').getAttribute('d')]",
        ));
        assert_narrow(&browser);
    }
    let is_new = |(at, one): (usize, &Value)| !seen[..at].contains(one);
    assert!(seen.iter().enumerate().all(is_new), "{seen:?}");
    // The way back shows the rank that it leads to.
    browser.run("history.back()");
    wait(&browser, "location.hash === '#2' && text('#name') === 'rank 3'");
    assert_eq!(browser.complaints(), [] as [String; 0]);
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn names_in_markup_are_text_in_the_page() {
    const MARKUP: &str = "</script><img src=x onerror=alert(1)>";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("markup.html");
    let trace = traces::named(MARKUP);
    let runs = traces::runs(&trace, GIB);
    let claim = Claim { name: MARKUP.to_owned(), bytes: 9 << 20, from_step: 0, to_step: 9 };
    let trace = Trace { claims: vec![claim], ..trace };
    fs::write(&file, page_of(&trace, &runs, MARKUP)).unwrap();
    let browser = Browser::start(folder.path(), |_| ());
    browser.open(&url(&file));
    wait(&browser, "all('#holders .who').length > 0");
    browser.click("#holders .who");
    assert_eq!(see(&browser, "all('img').length"), 0);
    for place in ["#answer", "#name", "#notes", "#holders .stack"] {
        assert_eq!(see(&browser, &format!("text('{place}').includes('<img src=x')")), true, "{place}");
    }
    assert_eq!(see(&browser, "document.title.startsWith('</script>')"), true);
    // A trace without steps has a page, too.
    let nothing = traces::named("nothing");
    let nothing = Trace { steps: Vec::new(), blocks: Vec::new(), ..nothing };
    let runs = traces::runs(&nothing, GIB);
    fs::write(&file, page_of(&nothing, &runs, "")).unwrap();
    browser.open(&url(&file));
    wait(&browser, "text('#moment-at') === 'There are no steps.' && text('#answer') === 'nothing'");
    assert_eq!(browser.complaints(), [] as [String; 0]);
}

/// Where pages are written to be looked at, one of a million steps, if this names a folder.
const PAGES: &str = "POORWILL_REPLAY_PAGES";

#[test]
#[ignore = "takes long"]
fn pages_of_many_steps_are_small() {
    let (own, named) = (tempfile::tempdir().unwrap(), std::env::var_os(PAGES));
    let steps = if named.is_some() { 1_000_000 } else { 100_000 };
    let folder = named.as_deref().map_or_else(|| own.path(), Path::new);
    write_page(&folder.join("moe.html"), 60 * GIB);
    write_page(&folder.join("small.html"), 33 * GIB);
    let trace = traces::long(steps);
    let runs = traces::runs(&trace, 79 * GIB);
    let html = page_of(&trace, &runs, "");
    println!("{steps} steps: {} bytes", html.len());
    assert!(html.len() < 3 << 20, "{}", html.len());
    fs::write(folder.join("long.html"), html).unwrap();
}
