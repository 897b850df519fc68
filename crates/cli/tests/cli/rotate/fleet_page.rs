//! A fleet of two nodes behind a router, over a real etcd: the operators' page in a browser, and the commands.

use poorwill_testkit::browser::Browser;
use poorwill_testkit::etcd::Servers;
use serde_json::json;

use super::browser;
use super::fixture::{Fixture, Model, Rotator, free_port, text_of, until};
use super::http;
use super::page::{MARKUP, assert_narrow, see, wait};

/// Nodes `n1` and `n2`, and a router with a controller.
struct Fleet {
    nodes: [(Fixture, Rotator); 2],
    router: Rotator,
    front: u16,
    control: u16,
    _etcd: Servers,
}

impl Fleet {
    /// `None` without etcd on this machine.
    fn start() -> Option<Self> {
        let etcd = Servers::one()?;
        let table = format!("[fleet]\nname = \"t\"\netcd = {:?}\nlease = \"5s\"\n", etcd.urls());
        let nodes = ["n1", "n2"].map(|node| {
            let mut fixture = Fixture::new("128MiB", vec![Model::new("amber"), Model::new(MARKUP)]);
            fixture.tables = format!("{table}node = \"{node}\"\n");
            let rotator = fixture.start(&[]);
            (fixture, rotator)
        });
        let (front, control) = (free_port(), free_port());
        let listen = |part: &str, port: u16| format!("[{part}]\nlisten = \"127.0.0.1:{port}\"\n");
        let (fixture, _) = &nodes[0];
        fixture.folder.write("fleet.toml", table + &listen("front", front) + &listen("control", control));
        let router = Rotator::begun(&mut fixture.command(&["route", "--config", "fleet.toml"]));
        let is_there =
            |port, path| http::ask(port, "GET", path, &[], "").is_ok_and(|answer| answer.status == 200);
        until(&router, "the router is ready", || is_there(control, "/fleet/ready"));
        for (fixture, rotator) in &nodes {
            until(rotator, "the node is ready", || is_there(fixture.control, "/fleet/ready"));
        }
        Some(Self { nodes, router, front, control, _etcd: etcd })
    }

    fn run(&self, args: &[&str]) -> crate::support::Ran {
        self.nodes[0].0.run(&[&["fleet"], args, &["--config", "fleet.toml"]].concat())
    }

    fn end(self) {
        self.router.end();
        for (fixture, rotator) in self.nodes {
            rotator.end();
            fixture.assert_empty();
        }
    }
}

/// Stands before scripts, behind what those of a node's page have.
const WORDS: &str = "
    const copy = (model, node) => [...row(model).querySelectorAll('li')]
      .find((one) => text(one.querySelector('strong')) === node);
    const goal = (model, node) => text(copy(model, node).querySelectorAll('.chip')[1]);
    const node = (name) => list('#nodes > li').find((one) => text(one.querySelector('h3')) === name);
    const changes = () => list('#changes > li').map(text);
";

fn await_that(browser: &Browser, expression: &str) {
    wait(browser, &format!("(() => {{ {WORDS} return {expression}; }})()"));
}

#[test]
#[ignore = "needs chromium and chromedriver"]
fn the_page_of_a_fleet_shows_it_and_takes_wishes() {
    let Some(fleet) = Fleet::start() else { return };
    let browser = browser::opened(&fleet.nodes[0].0, fleet.control);
    let both = |goal: &str| format!("['n1', 'n2'].every((node) => goal('amber', node) === '{goal}')");
    await_that(&browser, &format!("link() === 'Live' && {}", both("warm wanted")));
    assert_eq!(see(&browser, "list('#models h3').map(text)"), json!([MARKUP, "amber"]));
    await_that(&browser, "text(document.querySelector('#leader')).endsWith(', which is this process.')");
    await_that(&browser, "fact(node('n1'), 'GPUs') === '1' && fact(node('n1'), 'Models') === '2'");
    let page = format!("http://127.0.0.1:{}", fleet.nodes[0].0.control);
    await_that(&browser, &format!("node('n1').querySelector('a').getAttribute('href') === '{page}'"));
    await_that(&browser, "changes().length === 4 && changes().every((one) => one.includes('warm'))");
    assert_narrow(&browser, "with all placed");

    // Requests to both nodes, since a model leaves one that drains when it is ready at the other.
    let body = json!({ "model": "amber", "prompt": "Tell me of a tree.", "max_tokens": 2 }).to_string();
    for port in [fleet.front, fleet.nodes[0].0.front, fleet.nodes[1].0.front] {
        text_of(&http::ask(port, "POST", "/v1/completions", &[], &body).unwrap());
    }
    await_that(&browser, "['n1', 'n2'].every((one) => fact(node(one), 'Awake') === '1')");

    // A drain, later with a reason that would be markup.
    browser.run("window.confirm = (words) => { window.words = words; return true; };");
    see(&browser, "button('Drain n1').click()");
    assert_eq!(see(&browser, "window.words"), "Have the models of n1 go elsewhere?");
    await_that(
        &browser,
        "node('n1').querySelector('.chip').checkVisibility() && goal('amber', 'n1') === 'none wanted'",
    );
    wait(&browser, "button('Let n1 take models again') !== undefined");
    fleet.run(&["drain", "n1", "--why", MARKUP]).succeeded();
    await_that(&browser, &format!("fact(node('n1'), 'Drained') === {}", json!(MARKUP)));
    assert_narrow(&browser, "with a drain");
    see(&browser, "button('Let n1 take models again').click()");
    await_that(
        &browser,
        "goal('amber', 'n1') === 'warm wanted' && !node('n1').querySelector('.chip').checkVisibility()",
    );

    // A pin on one node, by the dialog.
    see(&browser, "button('Pin amber').click()");
    wait(&browser, "document.querySelector('#pin').open && list('#pin-nodes input').length === 2");
    assert_narrow(&browser, "with the dialog of a pin");
    browser.click("#pin-nodes > li:first-child input");
    browser.click("#pin-do");
    await_that(&browser, "text(row('amber').querySelector('.title .chip')) === 'pinned 1\u{d7} on n1'");
    await_that(
        &browser,
        "goal('amber', 'n1') === 'hot wanted' && copy('amber', 'n1').innerText.includes('it is pinned')",
    );
    await_that(&browser, "text(copy('amber', 'n1').querySelector('.chip')) === 'awake'");
    see(&browser, "button('Why amber is where it is').click()");
    wait(
        &browser,
        "list('#why-nodes > li').map(text).join().includes('it is awake; hot is wanted, since it is pinned')",
    );
    assert_narrow(&browser, "with the reasons");
    browser.click("#why-close");
    see(&browser, "button('Unpin amber').click()");
    await_that(&browser, "!row('amber').querySelector('.title .chip').checkVisibility()");

    // One that cannot be is said, and what is found is all that is shown.
    browser.run("at('find').value = 'AMB'; at('find').dispatchEvent(new Event('input'));");
    assert_eq!(see(&browser, "list('#models h3').map(text)"), json!(["amber"]));
    assert_eq!(
        see(&browser, "document.querySelectorAll('#all img, #all b').length"),
        0,
        "text became markup"
    );
    assert_eq!(browser.complaints(), [] as [String; 0]);
    let own = format!("http://127.0.0.1:{}/", fleet.control);
    let asked = browser.requests();
    let other: Vec<_> = asked.iter().filter(|url| !url.starts_with(&own) && *url != "data:,").collect();
    assert!(other.is_empty(), "{other:?}");
    drop(browser);
    fleet.end();
}

#[test]
fn commands_show_a_fleet_and_write_wishes() {
    let Some(fleet) = Fleet::start() else { return };
    let status = || fleet.run(&["status", "--json"]).json();
    until(&fleet.router, "all is placed", || {
        let models = status()["models"].clone();
        models.as_array().is_some_and(|all| all.len() == 4 && all.iter().all(|copy| copy["goal"] == "warm"))
    });
    let text = fleet.run(&["status"]).succeeded();
    for words in ["n1", "n2", "amber", "warm", "controller: "] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    // A drain that ends by itself does not take the place of one that stays.
    let said = fleet.run(&["drain", "n1", "--why", "new memory"]).succeeded();
    assert_eq!(said, "node n1 drains: its models go elsewhere\n");
    let said = fleet.run(&["drain", "n1", "--for", "2s", "--why", "another"]).succeeded();
    assert_eq!(said, "node n1 drains already\n");
    assert_eq!(status()["drains"], json!([{ "node": "n1", "why": "new memory" }]));
    fleet.run(&["drain", "n1", "--off"]).succeeded();
    let said = fleet.run(&["drain", "n1", "--for", "2s"]).succeeded();
    assert_eq!(said, "node n1 drains for 2 s: its models go elsewhere\n");
    until(&fleet.router, "the drain ends", || status()["drains"] == json!([]));
    fleet.run(&["drain", "n3"]).failed(&["no node `n3`", "n1, n2"]);
    fleet.run(&["pin", "birch"]).failed(&["no model `birch`", "amber"]);
    fleet.run(&["pin", "amber", "--copies", "2"]).succeeded();
    assert_eq!(status()["pins"], json!([{ "model": "amber", "copies": 2, "nodes": [] }]));
    fleet.run(&["pin", "amber", "--off"]).succeeded();
    assert_eq!(status()["pins"], json!([]));
    fleet.end();
}
