//! As much of WebDriver as tests of pages need: Chromium without a window, driven by a `chromedriver` of its own.
//!
//! Both end with the [`Browser`], and what they write is in the folder that it is given. All of it panics where it
//! cannot be: a test that needs a browser fails without one.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::watchdog::TEST_TIMEOUT;

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

/// A key, for [`Browser::keys`].
pub const TAB: &str = "\u{e004}";
/// Another one.
pub const ENTER: &str = "\u{e007}";
/// Another one.
pub const ESCAPE: &str = "\u{e00c}";
/// Another one.
pub const RIGHT: &str = "\u{e014}";

/// One window with one page.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    port: u16,
    /// Where this browser is among what the driver knows.
    session: String,
    log: PathBuf,
}

impl Browser {
    /// With its own things in this folder. `prepare` may change the command that starts it.
    #[must_use]
    pub fn start(folder: &Path, prepare: impl FnOnce(&mut Command)) -> Self {
        fs::create_dir_all(folder).unwrap();
        let log = folder.join("driver.log");
        let mut command = Command::new("chromedriver");
        command.args(["--port=0", &format!("--log-path={}", log.display())]);
        prepare(&mut command);
        // Its browser has no other group, and leaves none of it behind.
        command
            .env("HOME", folder)
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
        browser.port = ports.recv_timeout(TEST_TIMEOUT).expect("chromedriver says where it listens");
        let mut args: Vec<String> = ARGS.map(str::to_owned).to_vec();
        args.push(format!("--user-data-dir={}", folder.join("profile").display()));
        let wanted = json!({
            "goog:chromeOptions": { "binary": program(), "args": args },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
            "unhandledPromptBehavior": "ignore",
        });
        let session = browser.post("session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        browser.session = format!("session/{}/", session["sessionId"].as_str().unwrap());
        browser
    }

    /// Shows the page of an address.
    pub fn open(&self, url: &str) {
        self.post("url", &json!({ "url": url }));
    }

    /// What a function of this body comes to in the page, or what it promises.
    #[allow(clippy::must_use_candidate)] // Many a script is for what it does.
    pub fn run(&self, script: &str) -> Value {
        self.post("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true in the page.
    pub fn until(&self, expression: &str) {
        let began = Instant::now();
        while self.run(&format!("return Boolean({expression})")) != true {
            let page = || self.run("return document.body.innerText");
            assert!(
                began.elapsed() < TEST_TIMEOUT,
                "not so: {expression}\n{:#}\n{:?}",
                page(),
                self.complaints()
            );
            sleep(Duration::from_millis(30));
        }
    }

    /// Clicks where a person would see it; what is covered cannot be clicked.
    pub fn click(&self, selector: &str) {
        self.post(&format!("element/{}/click", self.find(selector)), &json!({}));
    }

    /// Types into what has the focus.
    pub fn keys(&self, text: &str) {
        let strokes = text.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|stroke| json!({ "type": stroke, "value": key.to_string() }))
        });
        let strokes: Vec<Value> = strokes.collect();
        self.post("actions", &json!({ "actions": [{ "type": "key", "id": "keys", "actions": strokes }] }));
    }

    /// Answers what the page asks in a window of its own.
    pub fn confirm(&self, is_confirmed: bool) {
        self.post(if is_confirmed { "alert/accept" } else { "alert/dismiss" }, &json!({}));
    }

    /// Has the page as wide as a window of so many pixels.
    pub fn resize(&self, width: u32, height: u32) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": params });
        self.post("goog/cdp/execute", &command);
    }

    /// Has the page believe that its reader prefers `dark` or `light`.
    pub fn prefer(&self, scheme: &str) {
        let params = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.post("goog/cdp/execute", &json!({ "cmd": "Emulation.setEmulatedMedia", "params": params }));
    }

    /// Runs a script in every page that is opened from now on, before those of the page.
    pub fn run_first(&self, script: &str) {
        let params = json!({ "source": script });
        let command = json!({ "cmd": "Page.addScriptToEvaluateOnNewDocument", "params": params });
        self.post("goog/cdp/execute", &command);
    }

    /// What the console has of errors and warnings that came since it was asked last.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let entries = self.log("browser").into_iter().filter(|entry| {
            let level = entry["level"].as_str().unwrap();
            level == "SEVERE" || level == "WARNING"
        });
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    /// The addresses that pages asked for since this was asked last, but for what the browser shows at first.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
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
    #[must_use]
    pub fn picture(&self) -> Vec<u8> {
        let text = self.ask("GET", "screenshot", "");
        BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap()
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
        let (status, answer) = self.answer(method, &path, body);
        let mut value: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(status, 200, "{method} {path} {body}: {:#}", value["value"]["message"]);
        value["value"].take()
    }

    /// The driver says how long its answers are, and keeps its connections.
    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.port,
            body.len()
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        let mut stream = BufReader::new(stream);
        let (mut status, mut length, mut line) = (0, 0, String::new());
        while stream.read_line(&mut line).unwrap() > 2 {
            let lower = line.trim().to_ascii_lowercase();
            if let Some(rest) = lower.strip_prefix("http/1.1 ") {
                status = rest.split(' ').next().unwrap().parse().unwrap();
            }
            if let Some(rest) = lower.strip_prefix("content-length:") {
                length = rest.trim().parse().unwrap();
            }
            line.clear();
        }
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).unwrap();
        (status, String::from_utf8(bytes).unwrap())
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
        while is_running(self.driver.id()) && began.elapsed() < TEST_TIMEOUT {
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
