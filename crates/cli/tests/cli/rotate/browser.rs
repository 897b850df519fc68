//! As much of WebDriver as the page's tests need: Chromium without a window, driven by a `chromedriver` of its own.
//! Both end with the [`Browser`], and what they write is in its fixture's folder.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::fixture::{Fixture, HANGS};
use super::http::{self, Answer};

/// What Chromium is called; the first that is there.
const PROGRAMS: [&str; 3] = ["chromium", "google-chrome", "chromium-browser"];
const ARGS: [&str; 12] = [
    "--headless=new",
    // Root has no sandbox, and containers have no memory to share.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--lang=en-US",
    "--window-size=1200,900",
    // What it would do on its own.
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
];
/// What WebDriver has an element's name under.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

pub(crate) const TAB: &str = "\u{e004}";
pub(crate) const ENTER: &str = "\u{e007}";
pub(crate) const ESCAPE: &str = "\u{e00c}";

pub(crate) struct Browser {
    driver: Child,
    port: u16,
    /// Where this browser is among what the driver knows.
    session: String,
    log: PathBuf,
}

impl Browser {
    /// With a page of this machine.
    pub(crate) fn open(fixture: &Fixture, port: u16) -> Self {
        let profile = fixture.folder.join("browser");
        fs::create_dir_all(&profile).unwrap();
        let log = profile.join("driver.log");
        let mut command = Command::new("chromedriver");
        command.args(["--port=0", &format!("--log-path={}", log.display())]);
        fixture.mark(&mut command);
        // Its browser has no other group, and leaves none of it behind.
        command
            .env("HOME", &profile)
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_CACHE_HOME")
            .process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut driver = command.spawn().expect("chromedriver is on the path");
        let output = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut browser = Self { driver, port: 0, session: String::new(), log };
        let port_of =
            |line: String| line.rsplit_once("successfully on port ")?.1.trim_matches('.').parse().ok();
        let (sender, ports) = mpsc::channel();
        thread::spawn(move || {
            // All of it is read, with or without a listener.
            for port in output.filter_map(port_of) {
                let _no_listener = sender.send(port);
            }
        });
        browser.port = ports.recv_timeout(HANGS).expect("chromedriver says where it listens");
        let mut args: Vec<String> = ARGS.map(str::to_owned).to_vec();
        args.push(format!("--user-data-dir={}", profile.join("profile").display()));
        let wanted = json!({
            "goog:chromeOptions": { "binary": program(), "args": args },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
            "unhandledPromptBehavior": "ignore",
        });
        let session = browser.post("session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        browser.session = format!("session/{}/", session["sessionId"].as_str().unwrap());
        browser.post("url", &json!({ "url": format!("http://127.0.0.1:{port}/") }));
        browser
    }

    /// What a function of this body comes to in the page, or what it promises.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.post("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true in the page.
    pub(crate) fn until(&self, expression: &str) {
        let began = Instant::now();
        while self.run(&format!("return Boolean({expression})")) != true {
            let page = || self.run("return document.body.innerText");
            assert!(began.elapsed() < HANGS, "not so: {expression}\n{:#}\n{:?}", page(), self.complaints());
            sleep(Duration::from_millis(30));
        }
    }

    /// Clicks where a person would see it; what is covered cannot be clicked.
    pub(crate) fn click(&self, selector: &str) {
        self.post(&format!("element/{}/click", self.find(selector)), &json!({}));
    }

    /// Types into what has the focus.
    pub(crate) fn keys(&self, text: &str) {
        let strokes = text.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|stroke| json!({ "type": stroke, "value": key.to_string() }))
        });
        let strokes: Vec<Value> = strokes.collect();
        self.post("actions", &json!({ "actions": [{ "type": "key", "id": "keys", "actions": strokes }] }));
    }

    /// Answers what the page asks in a window of its own.
    pub(crate) fn confirm(&self, is_confirmed: bool) {
        self.post(if is_confirmed { "alert/accept" } else { "alert/dismiss" }, &json!({}));
    }

    /// Has the page as wide as a window of so many pixels.
    pub(crate) fn resize(&self, width: u32, height: u32) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": params });
        self.post("goog/cdp/execute", &command);
    }

    /// Runs a script in every page that is opened from now on, before those of the page.
    pub(crate) fn run_first(&self, script: &str) {
        let params = json!({ "source": script });
        let command = json!({ "cmd": "Page.addScriptToEvaluateOnNewDocument", "params": params });
        self.post("goog/cdp/execute", &command);
    }

    /// What the console has of errors and warnings that came since it was asked last.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let entries = self.log("browser").into_iter().filter(|entry| {
            let level = entry["level"].as_str().unwrap();
            level == "SEVERE" || level == "WARNING"
        });
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    /// The addresses that pages asked for since this was asked last, but for what the browser shows at first.
    pub(crate) fn requests(&self) -> Vec<String> {
        let sent = self.log("performance").into_iter().filter_map(|entry| {
            let entry: Value = serde_json::from_str(entry["message"].as_str()?).unwrap();
            let (method, params) = (&entry["message"]["method"], &entry["message"]["params"]);
            let is_ours = !params["documentURL"].as_str()?.starts_with("chrome");
            let url = params["request"]["url"].as_str()?;
            (method == "Network.requestWillBeSent" && is_ours).then(|| url.to_owned())
        });
        sent.collect()
    }

    /// The window as a PNG.
    pub(crate) fn picture(&self) -> Vec<u8> {
        let text = self.ask("GET", "screenshot", "");
        unbase64(text.as_str().unwrap())
    }

    fn find(&self, selector: &str) -> String {
        let found = self.post("element", &json!({ "using": "css selector", "value": selector }));
        found[ELEMENT].as_str().unwrap().to_owned()
    }

    fn log(&self, kind: &str) -> Vec<Value> {
        self.post("se/log", &json!({ "type": kind })).as_array().unwrap().clone()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.ask("POST", path, &body.to_string())
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Value {
        let path = format!("/{}{path}", self.session);
        let answer =
            self.answer(method, &path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        let value: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(answer.status, 200, "{method} {path} {body}: {:#}", value["value"]["message"]);
        value["value"].clone()
    }

    /// An answer as soon as it is whole: the driver does not close its connections.
    fn answer(&self, method: &str, path: &str, body: &str) -> io::Result<Answer> {
        let mut stream = http::send(self.port, method, path, &[], body)?;
        let (mut bytes, mut piece) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let count = stream.read(&mut piece)?;
            bytes.extend_from_slice(&piece[..count]);
            match http::parsed(&bytes) {
                Err(_) if count > 0 => {}
                answer => return answer,
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if thread::panicking() && self.session.is_empty() {
            eprintln!("the driver wrote:\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
        // All of its group, which is the browser's.
        let _ = Command::new("sh")
            .args(["-c", "kill -s KILL -- -\"$0\""])
            .arg(self.driver.id().to_string())
            .status();
        // One that was never there, or is gone, is waited for in vain.
        let _ = self.driver.wait();
        // The browser was the driver's child and is an orphan now: it ends a moment after the signal.
        let began = Instant::now();
        while is_running(self.driver.id()) && began.elapsed() < HANGS {
            sleep(Duration::from_millis(10));
        }
    }
}

/// Whether a process of this group is still running.
fn is_running(group: u32) -> bool {
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    entries.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok()).any(|stat| {
        // Behind the name, which may have anything in it: the state, the parent, and the group.
        let mut fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
        let state = fields.next();
        !matches!(state, Some("Z" | "X")) && fields.nth(1) == Some(&group.to_string())
    })
}

/// Where Chromium is.
fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let places = PROGRAMS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    places
        .into_iter()
        .find(|place| place.is_file())
        .unwrap_or_else(|| panic!("none of {PROGRAMS:?} is on the path"))
}

fn unbase64(text: &str) -> Vec<u8> {
    let digits = text.bytes().filter_map(|digit| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    });
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in digits {
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count).unwrap());
            bits &= (1 << count) - 1;
        }
    }
    bytes
}
