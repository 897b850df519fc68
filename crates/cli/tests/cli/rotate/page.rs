//! The operators' page in a browser, with a rotation of mock engines: what it shows and when, commands by mouse
//! and keyboard, and keys. It also survives a service that goes away and comes back.
//!
//! `cargo xtask test` runs these where Chromium and chromedriver are installed.

use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::thread;

use poorwill_testkit::browser::{Browser, ENTER, ESCAPE, TAB};
use serde_json::{Value, json};

use super::browser;
use super::fixture::{Fixture, KEY, Model};
use super::http;

const PROMPT: &str = "Tell me of a tree.";
/// Stands before scripts. Rows of models are found by what they say, since that is what people go by.
const WORDS: &str = "
    const text = (node) => node.innerText.trim();
    const list = (css) => [...document.querySelectorAll(css)];
    const row = (name) => list('#models > li').find((one) => text(one.querySelector('h3')) === name);
    const stage = (name) => text(row(name).querySelector('.title > .chip'));
    const fact = (node, title) => {
      const pair = [...node.querySelectorAll('dl > div')].find((one) => text(one.children[0]) === title);
      return text(pair.children[1]);
    };
    const link = () => text(document.querySelector('#link'));
    const notice = () => text(document.querySelector('#notice'));
    const button = (label) => list('button').find((one) => (one.ariaLabel ?? text(one)) === label);
    const swaps = () => list('#swaps > li').map((one) => text(one.querySelector('strong')));
    const queue = () => list('#queue tbody tr').map((one) => [...one.children].slice(0, 3).map(text).join(' '));
    const active = () => list('#requests tbody tr').map((one) => [...one.children].map(text));
    const strip = (name, kind) => list('#timeline .strip').find((one) => text(one.firstChild) === name)
      ?.querySelectorAll(`.${kind}`).length ?? 0;
    const focused = () => document.activeElement.ariaLabel ?? text(document.activeElement);
";

/// The expression's value in the page.
pub(super) fn see(browser: &Browser, expression: &str) -> Value {
    browser.run(&format!("{WORDS} return {expression};"))
}

/// Waits until an expression is true in the page.
pub(super) fn wait(browser: &Browser, expression: &str) {
    browser.until(&format!("(() => {{ {WORDS} return {expression}; }})()"));
}

/// Remembers what has the focus, down to the node.
fn hold(browser: &Browser) {
    browser.run("window.focusBefore = document.activeElement");
    assert_eq!(see(browser, "focusBefore !== document.body"), true, "nothing has the focus");
}

fn assert_held(browser: &Browser, when: &str) {
    let is_held = see(browser, "focusBefore === document.activeElement && focusBefore.isConnected");
    assert_eq!(is_held, true, "{when} the focus is on {}", see(browser, "focused()"));
}

/// Tabs until a button has the focus.
fn tab_to(browser: &Browser, label: &str) {
    for _ in 0..60 {
        browser.keys(TAB);
        if see(browser, "focused()") == label {
            return;
        }
    }
    panic!("`{label}` is not reached by keyboard");
}

/// At the width of a small telephone everything is there, and nothing has to be scrolled to sideways.
pub(super) fn assert_narrow(browser: &Browser, when: &str) {
    browser.resize(360, 740);
    let widths = "[document.scrollingElement.scrollWidth, innerWidth]";
    let wide = "list('body *').filter((one) => one.checkVisibility() && !one.classList.contains('unseen')
      && one.getBoundingClientRect().right > innerWidth).map((one) => one.outerHTML.slice(0, 120))";
    assert_eq!((see(browser, widths), see(browser, wide)), (json!([360, 360]), json!([])), "{when}");
    // No button is cut off, and no title is broken into two lines.
    let cut = "list('button').filter((one) => one.scrollWidth > one.clientWidth).concat(list('dt').filter((one) => {
      const words = document.createRange();
      words.selectNode(one.lastChild);
      return words.getClientRects().length > 1;
    })).map(text)";
    assert_eq!(see(browser, cut), json!([]), "{when}");
    browser.resize(1200, 900);
}

/// An answer of some dozens of words takes longer than what is looked at meanwhile.
const SLOW: [&str; 2] = ["--tokens-per-s", "2"];
/// Such a one is tried with one word.
const CANARY: &str = "[model.canary]\ntokens = 1\n";

/// Has an answer come word by word, until this is dropped.
fn long_answer(fixture: &Fixture, model: &str) -> TcpStream {
    let body =
        json!({ "model": model, "prompt": PROMPT, "max_tokens": 80, "min_tokens": 80, "stream": true });
    http::send(fixture.front, "POST", "/v1/completions", &[], &body.to_string()).unwrap()
}

pub(super) const MARKUP: &str = "<img src=x onerror=alert(1)>";

#[test]
#[ignore = "needs chromium and chromedriver"]
fn the_page_shows_what_happens_while_it_happens() {
    let canary = CANARY.to_owned();
    let mut models = vec![
        Model { more: SLOW.to_vec(), lines: canary.clone(), ..Model::new("amber") },
        Model { lines: canary, ..Model::new("birch") },
        // One whose engine does not start, and says so in markup.
        Model { more: vec!["--fault", "<b onclick=alert(2)>"], ..Model::new(MARKUP) },
    ];
    models[0].lines.insert_str(
        0,
        "aliases = [\"resin\", \"a-name-that-is-so-long-that-no-telephone-shows-it-in-one-line\"]\n",
    );
    let fixture = Fixture::new("128MiB", models);
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);

    wait(&browser, "link() === 'Live' && list('#models > li').length === 3");
    let names = see(&browser, "list('#models h3').map(text)");
    assert_eq!(names, json!(["amber", "birch", MARKUP]));
    wait(&browser, "stage('amber') === 'cold' && stage('birch') === 'cold'");
    for words in ["No request waits.", "No model became ready yet.", "128.0 MiB", "also resin"] {
        assert_eq!(see(&browser, &format!("text(document.body).includes({words:?})")), true, "{words}");
    }
    assert_narrow(&browser, "before anything happened");

    // The page is not touched from here on, and what has the focus keeps it.
    browser.run(&format!("{WORDS} button('Pin birch').focus()"));
    hold(&browser);
    let used =
        "list('#gpus > li').map((one) => [fact(one, 'Used'), one.querySelector('.bar .used').clientWidth])";
    let before = see(&browser, used);
    assert_eq!(before.as_array().unwrap().len(), 1);
    let answer = long_answer(&fixture, "resin");
    wait(&browser, "stage('amber') === 'ready' && fact(row('amber'), 'Running') === '1'");
    // To sleep is for idle models, and others are asked about.
    browser.run("window.confirm = (words) => { window.words = words; return false; };");
    browser.run(&format!("{WORDS} button('Sleep amber').click()"));
    assert_eq!(see(&browser, "window.words"), "amber is answering 1 request. Put it to sleep?");
    wait(&browser, "swaps().join() === 'amber'");
    wait(&browser, "parseFloat(fact(list('#gpus > li')[0], 'Used')) > 60");
    // The bar grows for a moment.
    wait(&browser, &format!("{used}[0][1] > {}", before[0][1]));
    wait(&browser, "list('#events strong').some((one) => text(one) === 'amber')");

    // A request for another model waits for the end of the answer.
    thread::scope(|scope| {
        let waits = scope.spawn(|| fixture.say("birch", PROMPT));
        wait(&browser, "queue().join() === 'birch 1 0'");
        wait(&browser, "text(row('birch')).includes('Queue 1') || fact(row('birch'), 'Queue') === '1'");
        // Oldest first, and their ages go on.
        wait(
            &browser,
            "active().map(([model, , state]) => `${model} ${state}`).join() === 'amber streaming,birch waiting'",
        );
        wait(&browser, "parseFloat(active()[0][3]) > 0 && active()[1][3] === ''");
        wait(&browser, "parseInt(active()[0][4], 10) >= parseInt(active()[1][4], 10)");
        wait(&browser, "parseInt(active()[1][4], 10) > 1");
        wait(&browser, "parseInt(text(document.querySelector('#queue tbody td:last-child')), 10) > 1");
        assert_narrow(&browser, "with a queue");
        drop(answer);
        waits.join().unwrap();
        wait(&browser, "stage('birch') === 'ready' && stage('amber') === 'asleep'");
    });
    wait(&browser, "queue().length === 0 && text(document.body).includes('No request waits.')");
    wait(&browser, "swaps().join() === 'birch,amber' && fact(row('birch'), 'Served') === '1'");
    let filled = "list('.phases').map((bar) => bar.getBoundingClientRect().right
      - bar.lastElementChild.getBoundingClientRect().right).every((left) => Math.abs(left) < 1)";
    assert_eq!(see(&browser, filled), true, "the phases of a swap do not fill their line");
    // All swaps have one scale, and phases have names.
    let scaled = "(() => {
      const widths = list('.phases').map((bar) => bar.clientWidth / bar.parentElement.clientWidth);
      return Math.max(...widths) > .99 && new Set(widths).size === widths.length;
    })()";
    assert_eq!(see(&browser, scaled), true, "the longest swap alone has the full width");
    wait(&browser, "list('#phases > span').map(text).includes('canary')");
    // Who left for a swap is part of it.
    wait(&browser, "list('#swaps .left').map(text).join().startsWith('amber left: draining ')");
    wait(
        &browser,
        "list('#swaps .others').length === 1 && list('#phases > span').map(text)[0] === 'others leave'",
    );
    wait(&browser, "text(document.body).includes('No request is in progress.') && active().length === 0");
    // With long names, and more than are listed; until the next look at the service.
    let many = "requests = { count: 60, requests: [1, 2].map((age_s) => ({ id: 'same', method: 'POST', path: '/v1/x',
        peer: null, key: 'a-team-with-a-long-name', model: 'org/a-model-with-a-name-of-some-length', state: 'reading',
        age_s, waited_s: null, ttft_s: 0.25, bytes: 0 })) };
      showRequests();
      tick();
      return [text(document.querySelector('#requests-count')), ...active().map((row) => row[1])];";
    browser.resize(360, 740);
    let rows = browser.run(&format!("{WORDS} {many}"));
    let name = "a-team-with-a-long-name";
    assert_eq!(rows, json!(["60, of which the oldest 2", name, name]));
    assert_narrow(&browser, "with requests of a key");
    // What was measured is shown, and nothing else.
    wait(
        &browser,
        "fact(row('amber'), 'Swap').match(/^start .+, leave .+$/) && fact(row('birch'), 'Swap').startsWith('start ')",
    );
    wait(&browser, "fact(row('amber'), 'First byte').match(/s$/)");
    let shown = "[...row('birch').querySelectorAll('dt')].filter((one) => one.checkVisibility()).map(text).includes('Tokens/s')";
    assert_eq!(
        see(&browser, shown),
        see(&browser, "snapshot.models[1].recent.completion_tokens_per_s !== null")
    );

    // The timeline has a strip for each model that was awake, and the memory has an owner.
    wait(&browser, "strip('amber', 'in') > 0 && strip('amber', 'ready') > 0 && strip('amber', 'out') > 0");
    wait(&browser, "strip('birch', 'ready') > 0 && list('#timeline .strip').length === 2");
    wait(&browser, "list('#gpus .parts > li').map((one) => text(one.children[1])).join() === 'birch,other'");
    assert_held(&browser, "after two swaps");

    // A cut turn has a line of its own, with the time at which its canary was right.
    let cut = "(() => {
        const now = Date.now(), of = (at) => ({ model: 'cut', seq: at, at_unix_ms: now + at });
        remember('kept', { ...of(-900), event: 'kept', requests: 2 });
        remember('stage', { ...of(-800), before: 'falling asleep', before_s: .1, stage: 'asleep' });
        remember('stage', { ...of(-300), before: 'asleep', before_s: .5, stage: 'ready' });
        remember('tested', { ...of(-100), event: 'tested' });
        const { parts, checks } = partsOf({ name: 'cut' }, now - 850, now);
        return [...parts.map(({ kind }) => kind), checks.length, describe({ event: 'kept', requests: 2 })].join();
    })()";
    assert_eq!(see(&browser, cut), "out,kept,ready,1,sleeps with 2 requests, which go on in its next turn");

    // What is known of them, and of the GPU.
    for name in ["amber", "birch"] {
        wait(
            &browser,
            &format!("/^[0-9.]+ MiB (measured, [0-9.]+ MiB )?configured$/.test(fact(row('{name}'), 'Need'))"),
        );
    }
    for (known, configured, words) in [
        (json!(null), json!(null), "not known yet"),
        (json!([3 << 20, 3 << 20]), json!(3 << 20), "3.0 MiB + 3.0 MiB configured"),
        (json!([3 << 20, 4 << 20]), json!(3 << 20), "3.0 MiB + 4.0 MiB measured, 3.0 MiB configured"),
        (json!([3 << 20]), json!(null), "3.0 MiB measured"),
    ] {
        let need = format!("needOf({{ known_need_bytes: {known}, need_bytes: {configured} }})");
        assert_eq!(see(&browser, &need), words);
    }
    wait(
        &browser,
        "fact(list('#gpus > li')[0], 'Swapping').match(/^[0-9]+ % of .+, [0-9]+ % since the start$/)",
    );

    // What engines say, and what they are called, is text.
    assert_eq!(fixture.complete(MARKUP, PROMPT).status, 503, "{}", rotator.log());
    wait(&browser, "text(row('<img src=x onerror=alert(1)>')).includes(\"'<b onclick=alert(2)>'\")");
    wait(&browser, "text(document.querySelector('#events')).includes(\"'<b onclick=alert(2)>'\")");
    wait(&browser, "strip('<img src=x onerror=alert(1)>', 'mark') > 0");
    // One that needs an operator comes first.
    let order = json!([MARKUP, "amber", "birch"]);
    wait(&browser, &format!("JSON.stringify(list('#models h3').map(text)) === JSON.stringify({order})"));
    assert_held(&browser, "after a failure");
    browser.click(&format!("[aria-label='Log {MARKUP}']"));
    wait(&browser, "text(document.querySelector('#log-text')).includes(\"'<b onclick=alert(2)>'\")");
    assert_eq!(see(&browser, "text(document.querySelector('#log-title'))"), format!("Log of {MARKUP}"));
    assert_narrow(&browser, "with a log");
    browser.keys(ESCAPE);
    wait(&browser, "!document.querySelector('#log').open");
    assert_eq!(see(&browser, "list('img, main b, main [onclick], main [onerror]').length"), 0);
    assert_narrow(&browser, "with failures");

    // Stages are not shown unless asked for, and a filter leaves what it names.
    let choose = |what: &str, value: &str| {
        browser.run(&format!(
            "const select = document.querySelector('#event-{what}');
             select.value = {value:?};
             select.dispatchEvent(new Event('change'));"
        ));
        see(
            &browser,
            "list('#events > li').filter((one) => one.checkVisibility()).map((one) => one.dataset.group)",
        )
    };
    let all = choose("kind", "");
    let has = |groups: &Value, group: &str| groups.as_array().unwrap().iter().any(|one| one == group);
    assert!(has(&all, "swap") && has(&all, "failure") && !has(&all, "stage"), "{all}");
    let failures = choose("kind", "failure");
    assert!(has(&failures, "failure") && !has(&failures, "swap"), "{failures}");
    assert_eq!(choose("model", "amber"), json!([]));
    assert_eq!(see(&browser, "text(document.querySelector('#no-events'))"), "No such event yet.");
    assert!(has(&choose("kind", "stage"), "stage"));
    choose("model", "");

    // Nothing came from another host, and there is no error.
    assert_eq!(browser.complaints(), [] as [String; 0]);
    let own = format!("http://127.0.0.1:{}/", fixture.control);
    let asked = browser.requests();
    assert!(asked.contains(&own) && asked.contains(&format!("{own}rotate/status")), "{asked:?}");
    let other: Vec<_> = asked.iter().filter(|url| !url.starts_with(&own) && *url != "data:,").collect();
    assert!(other.is_empty(), "{other:?}");
    // Nor could be, by a script that got into it in spite of all: the front is there, and is not reached.
    let elsewhere = format!("http://127.0.0.1:{}/v1/models", fixture.front);
    let sent = format!("return fetch({elsewhere:?}, {{ mode: 'no-cors' }}).then(() => 'sent', () => 'kept')");
    assert_eq!(browser.run(&sent), "kept");
    let complaints = browser.complaints();
    assert!(complaints.iter().any(|one| one.contains("Content Security Policy")), "{complaints:?}");
    drop(browser);
    rotator.end();
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn a_hibernating_model_is_shown_with_what_it_takes_and_one_that_cannot_with_the_reason() {
    let fixture = super::hibernate::fixture("");
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    wait(&browser, "link() === 'Live' && row('birch') && stage('amber') === 'cold'");
    let before = fixture.say("amber", PROMPT);
    // It asks about requests that it knows of.
    let rests = |name: &str| {
        wait(&browser, &format!("stage('{name}') === 'ready' && fact(row('{name}'), 'Running') === '0'"));
    };
    rests("amber");
    let known = |title: &str| {
        format!(
            "[...row('amber').querySelectorAll('dl > div')].some((one) => text(one.children[0]) === {title:?}
             && one.checkVisibility())"
        )
    };
    for title in ["In host memory", "Asleep"] {
        assert_eq!(see(&browser, &known(title)), false, "{title}");
    }
    browser.click("[aria-label='Hibernate amber']");
    wait(&browser, "stage('amber') === 'hibernating'");
    wait(&browser, "fact(row('amber'), 'In host memory') === '32.0 MiB'");
    wait(&browser, "parseFloat(fact(row('amber'), 'Asleep')) > 8");
    wait(&browser, "fact(row('amber'), 'Swap').includes('hibernate ')");
    assert_eq!(see(&browser, "button('Hibernate amber').ariaDisabled"), "true");
    wait(&browser, "list('#events > li').some((one) => text(one).includes('hibernates: '))");
    wait(&browser, "strip('amber', 'hibernating') > 0");
    assert_narrow(&browser, "with a hibernating model");

    assert_eq!(fixture.say("amber", PROMPT), before, "{}", rotator.log());
    wait(&browser, "stage('amber') === 'ready' && fact(row('amber'), 'Swap').startsWith('resume ')");
    wait(&browser, &format!("!{}", known("In host memory")));

    // The reason outlives the failure.
    fixture.say("birch", PROMPT);
    fixture.models[1].faults(&["communicator"]);
    rests("birch");
    browser.click("[aria-label='Hibernate birch']");
    wait(&browser, "text(row('birch')).includes('does not hibernate until its next start')");
    fixture.say("birch", PROMPT);
    wait(&browser, "stage('birch') === 'ready' && text(row('birch')).includes('Cannot hibernate: ')");
    assert_eq!(see(&browser, "button('Hibernate birch').checkVisibility()"), false);
    assert_eq!(browser.complaints(), [] as [String; 0]);
    drop(browser);
    rotator.end();
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn a_request_is_cancelled_and_all_models_sleep_at_once() {
    let amber = Model { more: SLOW.to_vec(), lines: CANARY.to_owned(), ..Model::new("amber") };
    let fixture = Fixture::new("512MiB", vec![amber, Model::new("birch")]);
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    wait(&browser, "link() === 'Live' && row('amber') && stage('birch') === 'cold'");
    fixture.say("birch", PROMPT);
    let mut answer = long_answer(&fixture, "amber");
    wait(&browser, "active().length === 1 && active()[0][2] === 'streaming' && stage('birch') === 'ready'");
    let cancel = "list('#requests button')[0]";
    let name = see(&browser, &format!("{cancel}.ariaLabel"));
    assert!(name.as_str().unwrap().ends_with(" for amber"), "{name}");
    // Both ask first.
    browser.run("window.confirm = (words) => { window.words = words; return false; };");
    for (click, words) in
        [(cancel, "Its client gets an error."), ("button('Put all to sleep')", "1 request is being")]
    {
        browser.run(&format!("{WORDS} {click}.click()"));
        assert!(see(&browser, "window.words").as_str().unwrap().contains(words), "{click}");
    }
    browser.run("window.confirm = () => true;");
    browser.run(&format!("{WORDS} {cancel}.click()"));
    let mut all = String::new();
    // It breaks off, so that it cannot be taken for complete.
    let _broken_off = answer.read_to_string(&mut all);
    assert!(all.contains("data: {\"error\":") && all.contains("an operator cancelled"), "{all}");
    wait(&browser, "active().length === 0 && fact(row('amber'), 'Running') === '0'");
    browser.run(&format!("{WORDS} button('Put all to sleep').click()"));
    wait(&browser, "stage('amber') === 'asleep' && stage('birch') === 'asleep'");
    assert_eq!(browser.complaints(), [] as [String; 0]);
    drop(browser);
    rotator.end();
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn six_models_are_looked_over_on_a_telephone() {
    let names =
        ["amber", "birch", "cedar", "downy-birch", "elm", "a-name-that-is-as-long-as-those-of-models"];
    let fixture = Fixture::new("512MiB", names.map(Model::new).into());
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    wait(&browser, "link() === 'Live' && list('#models > li').length === 6 && stage('elm') === 'cold'");
    browser.resize(360, 740);
    let height = see(&browser, "document.querySelector('#models').clientHeight");
    assert!(height.as_f64().unwrap() < 2.0 * 740.0, "{height}");
    let controls =
        "list('button, input, select').filter((one) => one.checkVisibility({ visibilityProperty: true }))";
    for scheme in ["light", "dark"] {
        browser.prefer(scheme);
        let small = format!(
            "{controls}.filter((one) => Math.min(one.offsetWidth, one.offsetHeight) < 24).map((one) => one.outerHTML)"
        );
        assert_eq!(see(&browser, &small), json!([]));
        let nameless =
            format!("{controls}.filter((one) => !(text(one) || one.ariaLabel || one.labels?.length)).length");
        assert_eq!(see(&browser, &nameless), 0);
    }
    // What is left out comes by a button, for one model.
    let shown = "list('.rare dt').filter((one) => one.checkVisibility()).map(text)";
    assert_eq!(see(&browser, shown), json!([]));
    browser.click("[aria-label='Details of elm']");
    assert_eq!(see(&browser, "button('Details of elm').ariaExpanded"), "true");
    assert_eq!(
        see(&browser, &format!("{shown}.includes('Engine') && !row('amber').contains(list('.open')[0])")),
        true
    );
    browser.click("[aria-label='Details of elm']");
    assert_eq!(see(&browser, shown), json!([]));
    assert_narrow(&browser, "with six models");
    assert_eq!(see(&browser, &format!("{shown}.length > 6")), true, "all of it is there where it is wide");
    drop(browser);
    rotator.end();
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn orders_are_given_by_mouse_and_by_keyboard_alone() {
    let mut fixture = Fixture::new("512MiB", vec![Model::new("amber"), Model::new("birch")]);
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    wait(&browser, "link() === 'Live' && row('amber') && stage('amber') === 'cold'");

    let seen = "list('.commands')[0].querySelectorAll('button')";
    let offered =
        format!("[...{seen}].filter((one) => one.checkVisibility({{ visibilityProperty: true }})).map(text)");
    assert_eq!(see(&browser, &offered), json!(["Wake", "Restart", "Pin", "Log"]));
    for (label, then) in [
        ("Wake amber", "stage('amber') === 'ready'"),
        ("Sleep amber", "stage('amber') === 'asleep'"),
        ("Wake amber", "stage('amber') === 'ready'"),
        ("Pin amber", "button('Pin amber').ariaPressed === 'true' && text(row('amber')).includes('pinned')"),
        (
            "Pin amber",
            "button('Pin amber').ariaPressed === 'false' && !text(row('amber')).includes('pinned')",
        ),
    ] {
        browser.click(&format!("[aria-label='{label}']"));
        wait(&browser, then);
    }
    assert_eq!(fixture.models[0].is_sleeping(), Some(false));

    browser.run("document.activeElement.blur()");
    assert_eq!(see(&browser, &offered), json!(["Sleep", "Restart", "Pin", "Log"]));
    for (label, key, then) in [
        ("Wake birch", ENTER, "stage('birch') === 'ready'"),
        ("Sleep birch", " ", "stage('birch') === 'asleep'"),
        ("Wake birch", ENTER, "stage('birch') === 'ready'"),
        ("Pin birch", " ", "button('Pin birch').ariaPressed === 'true'"),
    ] {
        tab_to(&browser, label);
        assert_eq!(see(&browser, "document.activeElement.matches(':focus-visible')"), true, "{label}");
        hold(&browser);
        browser.keys(key);
        wait(&browser, then);
        assert_held(&browser, label);
    }
    assert_eq!(
        (&fixture.now("birch")["stage"], &fixture.now("birch")["is_pinned"]),
        (&json!("ready"), &json!(true))
    );

    // Restarting asks first.
    tab_to(&browser, "Restart birch");
    hold(&browser);
    browser.keys(ENTER);
    browser.confirm(false);
    // A later command has been carried out, and this one has not.
    browser.click("[aria-label='Sleep amber']");
    wait(&browser, "stage('amber') === 'asleep'");
    assert_eq!(fixture.now("birch")["starts"], 1);
    browser.run(&format!("{WORDS} button('Restart birch').focus()"));
    browser.keys(ENTER);
    browser.confirm(true);
    wait(&browser, "fact(row('birch'), 'Starts') === '2' && stage('birch') === 'ready'");
    assert_held(&browser, "after a restart");

    // A log, there and back.
    tab_to(&browser, "Log birch");
    hold(&browser);
    browser.keys(ENTER);
    wait(
        &browser,
        "document.querySelector('#log').open && text(document.querySelector('#log-text')).includes('listening')",
    );
    // It follows what the engine writes, and a search leaves the lines that have it.
    let lines =
        "text(document.querySelector('#log-text')).split('\\n').filter((one) => one.includes('listening'))";
    let before = see(&browser, &format!("{lines}.length"));
    fixture.order(&["restart", "birch"]).succeeded();
    wait(&browser, &format!("{lines}.length > {before}"));
    let asked = browser.requests().into_iter().filter(|url| url.contains("birch/log")).count();
    assert_eq!(asked, 1, "it is read over and over");
    let find = "const find = document.querySelector('#log-find'); find.value = 'LISTENING';
      find.dispatchEvent(new Event('input'));";
    browser.run(find);
    let shown =
        "text(document.querySelector('#log-text')).split('\\n').every((line) => line.includes('listening'))";
    wait(&browser, &format!("{shown} && text(document.querySelector('#log-count')).includes(' of ')"));
    browser.keys(ESCAPE);
    wait(&browser, "!document.querySelector('#log').open");
    assert_held(&browser, "after a log");

    // One that comes late is not shown as another model's.
    browser.run(
        "const fetched = fetch;
         fetch = (path, ...more) => !path.includes('amber/log') ? fetched(path, ...more)
           : new Promise((answer) => window.answerLate = () => answer(new Response('of amber')));",
    );
    browser.click("[aria-label='Log amber']");
    wait(&browser, "window.answerLate !== undefined");
    browser.keys(ESCAPE);
    browser.click("[aria-label='Log birch']");
    let shown = "text(document.querySelector('#log')).includes('Log of birch')
      && text(document.querySelector('#log-text')).includes('listening')";
    wait(&browser, shown);
    // What waits for the answer runs before this is over.
    browser.run("answerLate(); return new Promise((over) => setTimeout(over, 100));");
    assert_eq!(see(&browser, shown), true, "{}", see(&browser, "text(document.querySelector('#log'))"));
    browser.keys(ESCAPE);
    wait(&browser, "!document.querySelector('#log').open");

    // A file that is wrong, and one in which the model above is gone.
    let whole = fixture.config();
    fixture.folder.write("rotation.toml", format!("{whole}alias = []\n"));
    browser.run(&format!("{WORDS} button('Reload configuration').focus()"));
    browser.keys(ENTER);
    wait(&browser, "notice().includes('Failed') && notice().includes('`aliases`')");
    assert_narrow(&browser, "with a notice");
    tab_to(&browser, "Pin birch");
    hold(&browser);
    fixture.models.remove(0);
    fixture.write();
    rotator.signal("HUP");
    wait(&browser, "!row('amber')");
    assert_held(&browser, "after a model before it has gone");
    assert_eq!(browser.complaints().iter().filter(|one| !one.contains("422")).count(), 0);
    // A theme is kept, and the system's is the one without.
    let ground = "getComputedStyle(document.body).backgroundColor";
    let choose = |theme: &str| {
        browser.run(&format!(
            "const select = document.querySelector('#theme');
             select.value = {theme:?};
             select.dispatchEvent(new Event('change'));"
        ));
        see(&browser, ground)
    };
    let (light, dark) = (choose("light"), choose("dark"));
    assert_ne!(light, dark);
    browser.run("location.reload()");
    wait(&browser, "link() === 'Live' && document.querySelector('#theme').value === 'dark'");
    assert_eq!(see(&browser, ground), dark);
    choose("");
    assert_eq!(see(&browser, "'theme' in document.documentElement.dataset"), false);
    drop(browser);
    rotator.end();
    fixture.assert_empty();
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn keys_are_asked_for_and_a_rotation_that_went_away_is_found_again() {
    let mut fixture = Fixture::of_two();
    fixture.has_keys = true;
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    let wrong = "text(document.querySelector('#key-error'))";
    wait(&browser, "link() === 'Key needed' && document.activeElement.id === 'key'");
    assert_eq!(see(&browser, &format!("[{wrong}, list('h3').length]")), json!(["", 0]));
    assert_narrow(&browser, "with the form for a key");
    for (key, output) in [
        ("with blanks", "without blanks"),
        ("another-key", "not one of control's"),
        ("yet-another-key", "not one of control's"),
    ] {
        browser.run("document.querySelector('#key').value = ''");
        browser.keys(&format!("{key}{ENTER}"));
        wait(&browser, &format!("{wrong}.includes({output:?}) && document.activeElement.id === 'key'"));
        assert_eq!(see(&browser, "[link(), list('h3').length]"), json!(["Key needed", 0]));
    }
    browser.run("document.querySelector('#key').value = ''");
    browser.keys(KEY);
    // By its button this time.
    browser.keys(TAB);
    browser.keys(ENTER);
    wait(&browser, "link() === 'Live' && row('amber') && stage('amber') === 'cold'");
    wait(&browser, "!document.querySelector('#key').checkVisibility()");
    assert_eq!(
        see(&browser, "document.activeElement !== document.body"),
        true,
        "the focus is lost with the form"
    );
    tab_to(&browser, "Wake amber");
    hold(&browser);
    browser.keys(ENTER);
    wait(&browser, "stage('amber') === 'ready'");
    // It is nowhere where it would be found later, or by others.
    let kept = "[location.href, document.cookie, JSON.stringify(localStorage),
      document.documentElement.outerHTML].join()";
    assert_eq!(see(&browser, &format!("{kept}.includes({KEY:?})")), false);
    browser.run("location.reload()");
    wait(&browser, "link() === 'Live' && row('amber') && stage('amber') === 'ready'");

    // The rotation goes away, and another one comes in its place.
    browser.run(&format!("{WORDS} button('Pin birch').focus()"));
    hold(&browser);
    rotator.end();
    wait(&browser, "link() === 'Disconnected' && notice().startsWith('Disconnected')");
    assert_held(&browser, "without a rotation");
    assert_narrow(&browser, "without a rotation");
    browser.keys(ENTER);
    wait(&browser, "notice().startsWith('Failed')");
    let rotator = fixture.start(&[]);
    wait(&browser, "link() === 'Live' && notice() === '' && stage('amber') === 'cold'");
    assert_held(&browser, "with another rotation");
    fixture.say("birch", PROMPT);
    wait(&browser, "stage('birch') === 'ready' && swaps().join() === 'birch'");
    wait(&browser, "list('#events strong').some((one) => text(one) === 'birch')");
    assert_held(&browser, "with another rotation");

    browser.click("#forget");
    wait(&browser, "link() === 'Key needed'");
    assert_eq!(see(&browser, &format!("[{wrong}, list('h3').length]")), json!(["", 0]));
    // A browser may keep nothing for pages, and then has the key until the page is left.
    browser.run_first(
        "Object.defineProperty(window, 'sessionStorage', { get() { throw new DOMException('', 'SecurityError'); } })",
    );
    browser.run("location.reload()");
    wait(&browser, "link() === 'Key needed' && document.activeElement.id === 'key'");
    browser.keys(&format!("{KEY}{ENTER}"));
    wait(&browser, "link() === 'Live' && row('birch') && stage('birch') === 'ready'");
    browser.click("#forget");
    wait(&browser, "link() === 'Key needed'");
    // No other address got the key, or any request.
    let own = format!("http://127.0.0.1:{}/", fixture.control);
    let asked = browser.requests();
    assert!(
        asked.iter().all(|url| url.starts_with(&own) && !url.contains(KEY) || url == "data:,"),
        "{asked:?}"
    );
    drop(browser);
    rotator.end();
    fixture.assert_empty();
}

/// Where the guide's picture is written, if this names a file.
const PICTURE: &str = "POORWILL_PAGE_PICTURE";
const PICTURE_BYTES_MAX: usize = 250_000;

#[test]
#[ignore = "needs chromium and chromedriver"]
fn the_picture_for_the_guide_has_what_the_guide_says() {
    let models = ["amber", "birch", "cedar"].map(|name| Model {
        more: SLOW.to_vec(),
        lines: CANARY.to_owned(),
        ..Model::new(name)
    });
    // Two of three have room.
    let fixture = Fixture::new("200MiB", models.to_vec());
    let rotator = fixture.start(&[]);
    let browser = browser::opened(&fixture, fixture.control);
    for model in ["amber", "birch", "cedar", "amber"] {
        let body = json!({ "model": model, "prompt": PROMPT, "max_tokens": 1 });
        http::ask(fixture.front, "POST", "/v1/completions", &[], &body.to_string()).unwrap();
    }
    let is_awake = |model: &&Model| model.is_sleeping() == Some(false);
    let awake: Vec<_> = fixture.models.iter().filter(is_awake).map(|model| model.name).collect();
    let waits = fixture.models.iter().find(|model| !is_awake(model)).unwrap().name;
    assert_eq!(awake.len(), 2, "{}", rotator.log());
    // So it is known which of the two has to leave.
    fixture.order(&["pin", awake[1]]).succeeded();
    let (leaves, stays) = (awake[0], awake[1]);
    let run = [leaves, leaves, stays].map(|model| long_answer(&fixture, model));
    wait(
        &browser,
        &format!("fact(row('{leaves}'), 'Running') === '2' && fact(row('{stays}'), 'Running') === '1'"),
    );
    let queued = [waits, waits].map(|model| long_answer(&fixture, model));
    wait(&browser, &format!("link() === 'Live' && queue().join() === '{waits} 2 0'"));
    wait(&browser, "swaps().length === 4 && list('#gpus > li').length === 1");
    for (model, stage) in [(leaves, "draining"), (stays, "ready"), (waits, "asleep")] {
        wait(&browser, &format!("stage('{model}') === '{stage}'"));
    }
    let height = see(&browser, "document.documentElement.scrollHeight").as_u64().unwrap();
    browser.resize(1200, u32::try_from(height).unwrap());
    let picture = browser.picture();
    assert_eq!((&picture[..8], &picture[16..20]), (&b"\x89PNG\r\n\x1a\n"[..], &1200_u32.to_be_bytes()[..]));
    if let Some(path) = std::env::var_os(PICTURE) {
        assert!(picture.len() <= PICTURE_BYTES_MAX, "{} bytes", picture.len());
        fs::write(path, picture).unwrap();
    }
    drop((run, queued, browser));
    rotator.end();
}
