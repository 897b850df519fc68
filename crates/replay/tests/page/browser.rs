//! As much of WebDriver as these tests need: Chromium without a window, driven by a `chromedriver` of its own.
//! Both end with the [`Browser`].

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A longer wait is a hang.
pub(crate) const HANGS: Duration = Duration::from_secs(120);
const PROGRAMS: [&str; 3] = ["chromium", "google-chrome", "chromium-browser"];
const DRIVER: &str = "chromedriver";
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

pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    /// With its own things in this folder; `None` where there is no Chromium with a driver.
    pub(crate) fn start(folder: &Path) -> Option<Self> {
        let (program, driver) = (PROGRAMS.iter().find_map(|name| on_path(name))?, on_path(DRIVER)?);
        let mut command = Command::new(driver);
        // Its browser has no other group, and leaves none of it behind.
        command
            .arg("--port=0")
            .env("HOME", folder)
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_CACHE_HOME")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut driver = command.spawn().unwrap();
        let mut output = BufReader::new(driver.stdout.take().unwrap());
        let mut browser = Self { driver, port: 0, session: String::new() };
        let mut line = String::new();
        while browser.port == 0 && output.read_line(&mut line).unwrap() > 0 {
            let port = line.rsplit_once("successfully on port ");
            browser.port = port.and_then(|(_, port)| port.trim().trim_matches('.').parse().ok()).unwrap_or(0);
            line.clear();
        }
        // All of it is read, so that the driver can go on.
        std::thread::spawn(move || output.read_to_end(&mut Vec::new()));
        let mut args = ARGS.map(str::to_owned).to_vec();
        args.push(format!("--user-data-dir={}", folder.join("profile").display()));
        let wanted = json!({
            "goog:chromeOptions": { "binary": program, "args": args },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        });
        let session = browser.post("session", &json!({ "capabilities": { "alwaysMatch": wanted } }));
        browser.session = format!("session/{}/", session["sessionId"].as_str().unwrap());
        Some(browser)
    }

    pub(crate) fn open(&self, file: &Path) {
        self.post("url", &json!({ "url": format!("file://{}", file.display()) }));
    }

    /// What a function of this body comes to in the page.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.post("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true in the page.
    pub(crate) fn until(&self, expression: &str) {
        let began = Instant::now();
        while self.run(&format!("return Boolean({expression})")) != true {
            assert!(began.elapsed() < HANGS, "not so: {expression}\n{:?}", self.complaints());
            sleep(Duration::from_millis(30));
        }
    }

    /// Clicks where a person would see it; what is covered cannot be clicked.
    pub(crate) fn click(&self, selector: &str) {
        let found = self.post("element", &json!({ "using": "css selector", "value": selector }));
        self.post(&format!("element/{}/click", found[ELEMENT].as_str().unwrap()), &json!({}));
    }

    /// Types into what has the focus.
    pub(crate) fn keys(&self, text: &str) {
        let strokes = text.chars().flat_map(|key| {
            ["keyDown", "keyUp"].map(|stroke| json!({ "type": stroke, "value": key.to_string() }))
        });
        let strokes: Vec<Value> = strokes.collect();
        self.post("actions", &json!({ "actions": [{ "type": "key", "id": "keys", "actions": strokes }] }));
    }

    /// Has the page as wide as a window of so many pixels.
    pub(crate) fn resize(&self, width: u32, height: u32) {
        let params = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.post(
            "goog/cdp/execute",
            &json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": params }),
        );
    }

    pub(crate) fn prefer(&self, scheme: &str) {
        let params = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.post("goog/cdp/execute", &json!({ "cmd": "Emulation.setEmulatedMedia", "params": params }));
    }

    /// What the console has of errors and warnings that came since it was asked last.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let entries = self.log("browser").into_iter().filter(|entry| entry["level"] != "INFO");
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }

    /// The addresses that pages asked for since this was asked last.
    pub(crate) fn requests(&self) -> Vec<String> {
        let sent = self.log("performance").into_iter().filter_map(|entry| {
            let entry: Value = serde_json::from_str(entry["message"].as_str()?).unwrap();
            let (method, params) = (&entry["message"]["method"], &entry["message"]["params"]);
            // Not what the browser shows at first.
            let is_ours = params["documentURL"].as_str()?.starts_with("file:");
            let url = params["request"]["url"].as_str()?;
            (method == "Network.requestWillBeSent" && is_ours).then(|| url.to_owned())
        });
        sent.collect()
    }

    fn log(&self, kind: &str) -> Vec<Value> {
        self.post("se/log", &json!({ "type": kind })).as_array().unwrap().clone()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (path, body) = (format!("/{}{path}", self.session), body.to_string());
        let (status, answer) = self.asked(&path, &body);
        assert_eq!(status, 200, "{path} {body}: {answer}");
        serde_json::from_str::<Value>(&answer).unwrap()["value"].take()
    }

    /// The driver says how long its answers are, and keeps its connections.
    fn asked(&self, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
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
        // All of its group, which is the browser's.
        let _ = Command::new("sh")
            .args(["-c", "kill -s KILL -- -\"$0\""])
            .arg(self.driver.id().to_string())
            .status();
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

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|place| place.is_file())
}
