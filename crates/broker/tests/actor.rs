//! Processes that do what a test says, one line at a time, and can be killed at any of them.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use poorwill_broker::{Broker, BrokerStop, Client, ClientError};
use poorwill_testkit::child::{self, OwnedChild};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::peer::Peer;
use crate::support::{chunks, memory, options, waiting};

const SOCKET: &str = "POORWILL_TEST_SOCKET";

/// What an actor says begins with this, behind what the test program writes.
const MARK: &str = "@@ ";

/// Another process.
pub(crate) struct Actor {
    child: OwnedChild,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Actor {
    /// A broker that listens.
    pub(crate) fn broker(path: &Path) -> Self {
        let mut broker = Self::start("broker", path, |_| {});
        assert_eq!(broker.hear(), "ready");
        broker
    }

    /// A process that does what it hears.
    pub(crate) fn client(path: &Path) -> Self {
        Self::start("client", path, |_| {})
    }

    pub(crate) fn start(role: &str, path: &Path, adapt: impl FnOnce(&mut Command)) -> Self {
        let mut command = child::command(role, &[(SOCKET, path.to_str().unwrap())]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        adapt(&mut command);
        let mut child = OwnedChild::start(&mut command);
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// As `kill -9`, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.child.end();
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process has ended");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }

    /// Says a line and returns the answer.
    pub(crate) fn does(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }
}

/// Plays the role of this process. False: it is the test itself.
pub(crate) fn acts() -> bool {
    let Some(role) = child::role() else { return false };
    let path = std::env::var_os(SOCKET).unwrap();
    let path = Path::new(&path);
    match &*role {
        "broker" => serve(path),
        "broker of few descriptors" => {
            let few = Rlimit { current: Some(40), maximum: Some(40) };
            setrlimit(Resource::Nofile, few).unwrap();
            serve(path);
        }
        "client" => Script { path, client: None, peer: None, heir: None }.run(),
        other => panic!("{other}"),
    }
    true
}

fn serve(path: &Path) {
    let broker = Broker::bind(path, options()).unwrap();
    let stop = BrokerStop::new().unwrap();
    // From here on its descriptors are those of its clients.
    say("ready");
    broker.run(&stop).unwrap();
}

fn say(text: &str) {
    println!("{MARK}{text}");
}

/// What a client process does.
struct Script<'p> {
    path: &'p Path,
    client: Option<Client>,
    peer: Option<Peer>,
    heir: Option<Child>,
}

impl Script<'_> {
    fn run(mut self) {
        for line in std::io::stdin().lines() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            let numbers: Vec<u64> = words[1..].iter().filter_map(|word| word.parse().ok()).collect();
            let said = self.does(words[0], &numbers);
            say(&said.unwrap_or_else(|error| format!("{error:?}")));
        }
    }

    fn does(&mut self, verb: &str, numbers: &[u64]) -> Result<String, ClientError> {
        match verb {
            "connect" => {
                let hello = crate::support::hello();
                self.client = Some(Client::connect(self.path, &hello, TEST_TIMEOUT)?);
            }
            "lend" => self.client().lend(chunks(&[(numbers[0], numbers[1])]))?,
            "announce" => self.client().announce(numbers[0])?,
            "take_back" => {
                let chunks = self.client().take_back(None)?;
                return Ok(format!("{:?}", chunks.iter().map(|chunk| chunk.id).collect::<Vec<_>>()));
            }
            // It never answers.
            "listen" => self.client().on_give_up(|bytes| {
                loop {
                    say(&format!("asked for {bytes}"));
                    std::thread::park();
                }
            })?,
            "ask" => {
                let asked = self.client().ask(&waiting(numbers[0]))?;
                return Ok(format!("{} {}", asked.freed_bytes, asked.missing_bytes));
            }
            // The first of two packets.
            "half" => {
                let peer = Peer::hello(self.path);
                peer.send(r#"+{"request":"lend","#, &[memory(1)]).unwrap();
                self.peer = Some(peer);
            }
            // Another process keeps the connection, as a forked child would.
            "share" => {
                let peer = Peer::hello(self.path);
                peer.send(r#".{"request":"lend","chunks":[[1,4,false]]}"#, &[memory(1)]).unwrap();
                let shared = peer.0.try_clone().unwrap();
                let heir = Command::new("sleep")
                    .arg("1000")
                    .stdin(shared)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap();
                self.peer = Some(peer);
                let pid = heir.id();
                self.heir = Some(heir);
                return Ok(pid.to_string());
            }
            "greet" => return Ok(Peer::connect(self.path).answer().unwrap_or_default()),
            other => panic!("{other}"),
        }
        Ok("done".into())
    }

    fn client(&self) -> &Client {
        self.client.as_ref().expect("it has connected")
    }
}
