//! The mock engine as a process: its memory by the operating system, and how it ends.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use poorwill::hibernation::{HibernateRequest, Hibernator, HibernatorOptions, Processes};

use crate::support::{Folder, command, run};

const BYTES: u64 = 64 << 20;

/// Allowance for stacks, buffers and the allocator.
const MORE_BYTES: u64 = 16 << 20;

/// A mock engine, ended with the test.
struct MockEngine {
    child: Child,
    address: String,
}

impl MockEngine {
    fn start(more: &[&str]) -> Self {
        Self::start_in(None, more)
    }

    /// Registered in this folder of processes.
    fn start_in(processes: Option<&Path>, more: &[&str]) -> Self {
        let bytes = BYTES.to_string();
        let args = ["mock-engine", "--listen", "127.0.0.1:0", "--model", "one", "--bytes", &bytes];
        let mut command = command(Path::new("."), args.iter().chain(more));
        command.envs(processes.map(|folder| ("POORWILL_HOST_PROCESSES", folder)));
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}"));
        Self { address: address.trim_end().to_owned(), child }
    }

    /// What a request is answered with: the head and the body, as far as they came.
    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // One that crashes may reset the connection, behind what it has sent.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    fn order(&self, path: &str) {
        let answer = self.ask("POST", path, "");
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    }

    /// What the system says that it has of the machine's memory: resident, and its share of what is no file.
    fn memory_bytes(&self) -> [u64; 2] {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id())).unwrap();
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
        };
        // Without the program's own pages, which others that run it share.
        [bytes("Rss:"), bytes("Pss_Anon:") + bytes("Pss_Shmem:")]
    }

    /// The exit code, and what it complained of.
    fn end(mut self) -> (Option<i32>, String) {
        let mut complaint = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
        (self.child.wait().unwrap().code(), complaint)
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        // One that has ended is waited for in vain.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_system_sees_its_memory_come_and_go() {
    let mock = MockEngine::start(&[]);
    assert!(mock.ask("GET", "/health", "").starts_with("HTTP/1.1 200 "));
    for level in [1, 2, 1] {
        let awake = mock.memory_bytes();
        mock.order(&format!("/sleep?level={level}"));
        let asleep = mock.memory_bytes();
        mock.order("/wake_up");
        let woken = mock.memory_bytes();
        for at in 0..2 {
            let fell = awake[at].saturating_sub(asleep[at]);
            let rose = woken[at].saturating_sub(asleep[at]);
            for moved in [fell, rose] {
                assert!(moved.abs_diff(BYTES) < MORE_BYTES, "{level}: {awake:?} {asleep:?} {woken:?}");
            }
        }
    }
}

#[test]
fn what_a_library_warns_of_reaches_standard_error() {
    let mut mock = MockEngine::start(&[]);
    // By then it has opened all that it needs.
    assert!(mock.ask("GET", "/health", "").starts_with("HTTP/1.1 200 "));
    let pid = Pid::from_child(&mock.child);
    let open = fs::read_dir(format!("/proc/{}/fd", mock.child.id())).unwrap().count();
    // It has what this process has.
    let before = getrlimit(Resource::Nofile);
    let none_more = Rlimit { current: Some(u64::try_from(open).unwrap()), ..before };
    prlimit(Some(pid), Resource::Nofile, none_more).unwrap();
    // More than it may still close.
    let _waiting: Vec<_> = (0..8).map(|_| TcpStream::connect(&mock.address).unwrap()).collect();
    let mut lines = BufReader::new(mock.child.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.trim_start().starts_with("WARN cannot accept a connection; retrying"), "{line}");
    assert!(line.contains("Too many open files"), "{line}");
}

/// Of the processes in this folder.
fn hibernator(folder: &Folder) -> Hibernator {
    let options = HibernatorOptions::of(Processes::Host(folder.path().into()));
    Hibernator::open(&options.remembering_in(folder.join("journal"))).unwrap()
}

#[test]
fn asleep_it_is_taken_off_its_device_and_put_back_by_another_process() {
    let folder = Folder::new();
    let mock = MockEngine::start_in(Some(folder.path()), &["--residue", "48MiB"]);
    let (hibernator, pid) = (hibernator(&folder), mock.child.id());
    let request = HibernateRequest::within(Duration::from_secs(60));
    let words = r#"{"prompt": "x", "max_tokens": 4}"#;
    let answer = || {
        let answer = mock.ask("POST", "/v1/completions", words);
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    let before = answer();
    // An awake one is refused, and goes on.
    let error = hibernator.hibernate(&[pid], &request).unwrap_err().to_string();
    assert!(error.contains("put it to sleep first"), "{error}");
    mock.order("/sleep?level=1");
    let [_, asleep] = mock.memory_bytes();
    assert_eq!(hibernator.inspect(pid).unwrap().host_bytes(), Some(48 << 20));
    hibernator.hibernate(&[pid], &request).unwrap();
    let [_, off] = mock.memory_bytes();
    assert!((asleep - off).abs_diff(48 << 20) < MORE_BYTES, "{asleep} {off}");
    let refused = mock.ask("POST", "/wake_up", "");
    assert!(refused.starts_with("HTTP/1.1 503 ") && refused.contains("hibernates"), "{refused}");
    assert!(mock.ask("GET", "/is_sleeping", "").contains("true"));
    hibernator.resume(&[pid]).unwrap();
    let [_, back] = mock.memory_bytes();
    assert!(back.abs_diff(asleep) < MORE_BYTES, "{asleep} {back}");
    mock.order("/wake_up");
    assert_eq!(answer(), before);
}

#[test]
fn faults_of_hibernation_are_those_of_a_driver() {
    let folder = Folder::new();
    let mock = MockEngine::start_in(Some(folder.path()), &["--residue", "32MiB", "--fault", "communicator"]);
    let (hibernator, pid) = (hibernator(&folder), mock.child.id());
    let request = HibernateRequest::within(Duration::from_secs(60));
    let faults = |name: &str| {
        let answer = mock.ask("PUT", "/mock/faults", &format!("[\"{name}\"]"));
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    };
    mock.order("/sleep?level=1");
    let refused = |word: &str| {
        let error = hibernator.hibernate(&[pid], &request).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused("communicator");
    faults("hibernate-refuses");
    assert_eq!(hibernator.inspect(pid).unwrap().obstacles, []);
    refused("configured to refuse");
    let [_, asleep] = mock.memory_bytes();
    faults("residue-stays");
    hibernator.hibernate(&[pid], &request).unwrap();
    let [_, off] = mock.memory_bytes();
    assert!(asleep.abs_diff(off) < MORE_BYTES, "{asleep} {off}");
    faults("resume-fails");
    let error = hibernator.resume(&[pid]).unwrap_err().to_string();
    assert!(error.contains("not to come back"), "{error}");
}

#[test]
fn it_ends_on_a_signal() {
    for signal in ["TERM", "INT"] {
        let mock = MockEngine::start(&[]);
        mock.ask("GET", "/health", "");
        let pid = mock.child.id().to_string();
        let sent = Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", signal, &pid]).status().unwrap();
        assert!(sent.success());
        assert_eq!(mock.end(), (Some(0), String::new()), "{signal}");
    }
}

#[test]
fn a_crash_is_an_abort_in_the_middle_of_a_stream() {
    let body = r#"{"prompt": "x", "stream": true}"#;
    for _ in 0..100 {
        let mock = MockEngine::start(&["--fault", "leaks=0", "--fault", "crashes-in-stream", "--seed", "7"]);
        let answer = mock.ask("POST", "/v1/completions", body);
        assert!(!answer.contains("[DONE]") && !answer.ends_with("0\r\n\r\n"), "{answer}");
        let (code, complaint) = mock.end();
        assert_eq!(code, Some(134));
        assert!(complaint.starts_with("error: ") && complaint.contains("crashes-in-stream"), "{complaint}");
        // Where the machine is busy, it may crash before its first words have gone out.
        if answer.starts_with("HTTP/1.1 200 ") && answer.contains("data: {") {
            return;
        }
    }
    panic!("of a hundred that crashed none had written a word");
}

#[test]
fn it_is_hidden_and_refuses_invalid_options() {
    let folder = Folder::new();
    assert!(!run(&folder, &["--help"]).succeeded().contains("mock engine"));
    let start = |bytes, more: &[&str]| {
        let args = ["mock-engine", "--listen", "127.0.0.1:0", "--model", "one", "--bytes", bytes];
        run(&folder, &args.iter().copied().chain(more.iter().copied()).collect::<Vec<_>>())
    };
    for (more, word) in [
        (["--fault", "lies"], "keeps-memory"),
        (["--fault", "slow=2"], "slow=0.25"),
        (["--tokens-per-s", "0"], "1..="),
        (["--seed", "x"], "--seed"),
        (["--serves", "chat,embedding"], "completions, chat, responses, embeddings, rerank, messages"),
        (["--like", "tgi"], "vllm, llama-server, ollama"),
    ] {
        let ran = start("1MiB", &more);
        assert!(ran.code == 2 && ran.stderr.contains(word), "{ran:?}");
    }
    start("1KiB", &[]).failed(&["cannot hold 1 KiB", "1 MiB"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let args = ["mock-engine", "--listen", &address, "--model", "one", "--bytes", "1MiB"];
    run(&folder, &args).failed(&[&address, "--listen"]);
}
