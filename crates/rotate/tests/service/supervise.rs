//! Real engine processes, which end well, badly, late, and not at all.
#![cfg(target_os = "linux")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use poorwill_net::descriptors;
use poorwill_rotate::config::Start;
use poorwill_rotate::supervise::{SuperviseError, Supervisor};
use poorwill_testkit::watchdog;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

/// Longer than any test takes.
const GRACE: Duration = Duration::from_secs(100);
/// Environment variable of a process that runs as a service: its state folder.
const ROLE: &str = "POORWILL_TEST_SERVICE";

fn watched<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    watchdog::watched(|| tokio::runtime::Runtime::new().unwrap().block_on(test()));
}

fn start(command: &[&str]) -> Start {
    Start {
        command: command.iter().map(|&word| word.to_owned()).collect(),
        stop_command: Vec::new(),
        environment: BTreeMap::new(),
        folder: None,
        log: None,
        log_max_bytes: 1 << 20,
    }
}

fn shell(script: &str) -> Start {
    start(&["sh", "-c", script])
}

fn supervisor(start: Start) -> Supervisor {
    Supervisor::new("one", start, None).unwrap()
}

/// An engine whose script has printed `up`.
async fn up(script: &str) -> Supervisor {
    let one = supervisor(shell(script));
    one.start().await.unwrap();
    until_logged(&one, "up");
    one
}

fn has_logged(one: &Supervisor, words: &str) -> bool {
    one.log(usize::MAX).iter().any(|line| line.contains(words))
}

fn until_logged(one: &Supervisor, words: &str) {
    watchdog::eventually(words, || has_logged(one, words));
}

/// Whether a process runs and is no zombie.
fn is_there(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat"));
    state.is_ok_and(|stat| !stat.rsplit_once(") ").unwrap().1.starts_with(['Z', 'X']))
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), signal).unwrap();
}

/// The first of its processes, by its log.
fn leader(one: &Supervisor) -> u32 {
    let all = one.log(usize::MAX);
    let number = |line: &String| {
        let words = line.strip_prefix("[poorwill] ")?;
        let rest = words.strip_prefix("started process ").or(words.strip_prefix("adopted process "))?;
        rest.split(',').next()?.parse().ok()
    };
    all.iter().rev().find_map(number).unwrap()
}

async fn is_pending(one: &Supervisor) -> bool {
    tokio::time::timeout(Duration::from_millis(100), one.wait()).await.is_err()
}

#[test]
fn an_engine_has_the_limit_of_descriptors_before_it_was_raised() {
    watched(|| async {
        let all = getrlimit(Resource::Nofile);
        let before = all.maximum.unwrap_or(4096) / 2;
        setrlimit(Resource::Nofile, Rlimit { current: Some(before), ..all }).unwrap();
        descriptors::raise().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, all.maximum);
        let one = up("echo up; exec sleep 1000").await;
        let limits = fs::read_to_string(format!("/proc/{}/limits", leader(&one))).unwrap();
        let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
        assert_eq!(files.split_whitespace().next(), Some(before.to_string().as_str()));
        one.stop(GRACE).await.unwrap();
    });
}

#[test]
fn an_engine_ends_on_sigterm() {
    watched(|| async {
        let script = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done";
        let one = up(script).await;
        assert!(one.is_running());
        let pids = one.processes();
        assert!(pids.contains(&leader(&one)));
        one.stop(GRACE).await.unwrap();
        assert!(!one.is_running() && one.processes().is_empty());
        assert!(!pids.into_iter().any(is_there));
        until_logged(&one, "bye");
        assert!(!has_logged(&one, "killed"), "{:?}", one.log(99));
        one.stop(GRACE).await.unwrap();
        // It can be started again.
        one.start().await.unwrap();
        assert!(one.is_running());
        one.stop(GRACE).await.unwrap();
    });
}

#[test]
fn a_process_that_ignores_sigterm_is_killed() {
    watched(|| async {
        let one = up("trap '' TERM; sleep 300 & echo up; while :; do sleep 0.1; done").await;
        let pids = one.processes();
        assert!(pids.len() >= 2);
        one.stop(Duration::from_millis(200)).await.unwrap();
        assert!(!pids.into_iter().any(is_there) && one.processes().is_empty());
        assert!(has_logged(&one, "and are killed"), "{:?}", one.log(99));
    });
}

#[test]
fn it_is_stopped_when_the_last_of_it_is_gone() {
    watched(|| async {
        // The first process ends at once. The other one takes its time, and may.
        let slow = "(trap 'sleep 1; echo done; exit 0' TERM; echo up; while :; do sleep 0.05; done) &";
        let one = up(&format!("{slow} exec sleep 300")).await;
        let pids = one.processes();
        one.stop(GRACE).await.unwrap();
        assert!(!pids.into_iter().any(is_there));
        until_logged(&one, "done");
        assert!(!has_logged(&one, "killed"), "{:?}", one.log(99));
    });
}

#[test]
fn orphans_are_known_and_stopped() {
    watched(|| async {
        let one = up("trap 'exit 3' USR1; sleep 300 & echo up; wait").await;
        // Known processes stay known, however late the leader's end is noticed.
        assert_eq!(one.processes().len(), 2);
        signal(leader(&one), Signal::USR1);
        let how = one.wait().await;
        assert!(how.ends_with("ended with exit code 3; 1 of its processes are left"), "{how}");
        assert!(!one.is_running());
        let left = one.processes();
        assert_eq!(left.len(), 1);
        assert_eq!(one.start().await, Err(SuperviseError::LeftBehind { pids: left.clone() }));
        one.stop(GRACE).await.unwrap();
        assert!(!is_there(left[0]));
        one.start().await.unwrap();
        one.stop(GRACE).await.unwrap();
    });
}

#[test]
fn a_process_that_left_the_group_is_found_and_stopped() {
    watched(|| async {
        let script =
            "setsid sh -c 'trap \"\" TERM; echo away; while :; do sleep 0.1; done' & echo up; sleep 300";
        let one = up(script).await;
        until_logged(&one, "away");
        let leader = leader(&one);
        let group = |pid: u32| {
            let pid = Pid::from_raw(i32::try_from(pid).unwrap());
            rustix::process::getpgid(pid).map(|group| u32::try_from(group.as_raw_pid()).unwrap())
        };
        let all = one.processes();
        let away: Vec<u32> =
            all.into_iter().filter(|pid| group(*pid).is_ok_and(|its| its != leader)).collect();
        let away = away.into_iter().find(|pid| group(*pid) == Ok(*pid)).expect("who began a session");
        // Even if no parent leads to it any more.
        signal(leader, Signal::KILL);
        let how = one.wait().await;
        assert!(how.contains("ended by signal 9 (SIGKILL"), "{how}");
        assert!(one.processes().contains(&away));
        one.stop(Duration::from_millis(100)).await.unwrap();
        assert!(!is_there(away) && one.processes().is_empty());
    });
}

#[test]
fn each_end_is_reported_once_and_how() {
    watched(|| async {
        for (script, words) in [
            ("exit 0", "ended with exit code 0"),
            ("exit 7", "ended with exit code 7"),
            ("kill -TERM $$", "ended by signal 15 (SIGTERM)"),
            ("kill -USR1 $$", "ended by signal 10"),
        ] {
            let one = supervisor(shell(script));
            assert!(is_pending(&one).await);
            one.start().await.unwrap();
            let how = one.wait().await;
            assert!(how.starts_with("process ") && how.ends_with(words), "{how}");
            assert!(!one.is_running() && is_pending(&one).await);
            one.start().await.unwrap();
            one.wait().await;
        }
    });
}

#[test]
fn a_dropped_wait_misses_no_end() {
    watched(|| async {
        let one = up("echo up; exec sleep 300").await;
        assert!(is_pending(&one).await);
        signal(leader(&one), Signal::KILL);
        watchdog::eventually("it is noticed", || has_logged(&one, "SIGKILL"));
        assert!(one.wait().await.contains("SIGKILL"));
        // A requested end is not reported.
        one.start().await.unwrap();
        one.stop(GRACE).await.unwrap();
        until_logged(&one, "SIGTERM");
        assert!(is_pending(&one).await);
    });
}

/// An engine that ignores SIGTERM, has printed `up`, and has this stop command.
async fn stopped_by(stop: &[&str], script: &str) -> Supervisor {
    let stop_command = stop.iter().map(|&word| word.to_owned()).collect();
    let one = supervisor(Start { stop_command, ..shell(script) });
    one.start().await.unwrap();
    until_logged(&one, "up");
    one
}

const IGNORES_TERM: &str =
    "trap '' TERM; trap 'echo bye; exit 0' USR1; echo up; while :; do sleep 0.05; done";
const ENDS_ON_TERM: &str = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done";

#[test]
fn a_stop_command_ends_it_before_a_signal_does() {
    watched(|| async {
        let script = "echo \"stopping $0 in $(pwd)\"; kill -s USR1 \"$0\"";
        let one = stopped_by(&["sh", "-c", script, "${PID}"], IGNORES_TERM).await;
        let pid = leader(&one);
        one.stop(GRACE).await.unwrap();
        assert!(!one.is_running() && one.processes().is_empty());
        until_logged(&one, "bye");
        until_logged(&one, &format!("stopping {pid} in /"));
        assert!(!has_logged(&one, "sending signals") && !has_logged(&one, "killed"), "{:?}", one.log(99));
        // Nothing runs, so there is nothing to stop.
        one.stop(GRACE).await.unwrap();
        assert!(!has_logged(&one, "cannot"), "{:?}", one.log(99));
    });
}

#[test]
fn signals_follow_a_stop_command_that_fails() {
    watched(|| async {
        for (stop, words) in [
            (&["sh", "-c", "echo no such container >&2; exit 3"][..], "ended with exit code 3"),
            (&["no-such-program"], "`no-such-program`"),
            (&["sh", "-c", "kill -KILL $$"], "ended by signal 9"),
        ] {
            let one = stopped_by(stop, ENDS_ON_TERM).await;
            one.stop(GRACE).await.unwrap();
            assert!(one.processes().is_empty());
            until_logged(&one, "bye");
            assert!(has_logged(&one, words) && has_logged(&one, "sending signals"), "{:?}", one.log(99));
        }
    });
}

#[test]
fn signals_follow_a_stop_command_that_takes_too_long_or_does_nothing() {
    watched(|| async {
        let grace = Duration::from_millis(300);
        for (stop, words) in [
            (&["sh", "-c", "echo hangs as $$; sleep 300 & wait"][..], "and was killed"),
            (&["true"], "left processes"),
        ] {
            let one = stopped_by(stop, ENDS_ON_TERM).await;
            one.stop(grace).await.unwrap();
            assert!(one.processes().is_empty());
            assert!(has_logged(&one, words), "{:?}", one.log(99));
            let all = one.log(usize::MAX);
            for hung in all.iter().filter_map(|line| line.strip_prefix("hangs as ")) {
                assert!(!is_there(hung.parse().unwrap()), "the command is left");
            }
        }
    });
}

#[test]
fn a_stop_command_runs_after_the_end_of_the_first_process_unless_it_needs_its_id() {
    watched(|| async {
        for (word, words) in [("x", "stops x"), ("${PID}", "needs the id of its first process")] {
            let one = stopped_by(&["sh", "-c", "echo stops $0", word], "echo up; exec sleep 300").await;
            signal(leader(&one), Signal::KILL);
            one.wait().await;
            one.stop(GRACE).await.unwrap();
            until_logged(&one, words);
        }
    });
}

#[test]
fn a_stop_command_can_run_without_a_process_unless_it_needs_one() {
    watched(|| async {
        for (word, words) in [("x", "stops x"), ("${PID}", "needs the id of its first process")] {
            let stop_command = ["sh", "-c", "echo stops $0", word].map(str::to_owned).to_vec();
            let one = supervisor(Start { stop_command, ..shell("true") });
            one.stop(GRACE).await.unwrap();
            assert!(one.log(99).is_empty(), "nothing runs");
            one.stop_stray(GRACE).await.unwrap();
            until_logged(&one, words);
        }
        let one = supervisor(shell("true"));
        one.stop_stray(GRACE).await.unwrap();
        assert!(one.log(99).is_empty());
    });
}

#[test]
fn only_one_runs() {
    watched(|| async {
        let one = up("echo up; exec sleep 300").await;
        let pid = leader(&one);
        assert_eq!(one.start().await, Err(SuperviseError::AlreadyRunning { pid }));
        assert!(one.is_running());
        let (first, second) = tokio::join!(one.stop(GRACE), one.stop(GRACE));
        assert_eq!((first, second), (Ok(()), Ok(())));
        let (first, second) = tokio::join!(one.start(), one.start());
        assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
        one.stop(GRACE).await.unwrap();
    });
}

#[test]
fn a_stop_goes_on_without_its_caller() {
    watched(|| async {
        let one = up("trap '' TERM; echo up; while :; do sleep 0.1; done").await;
        let given_up = tokio::time::timeout(Duration::ZERO, one.stop(Duration::from_millis(500)));
        assert!(given_up.await.is_err());
        watchdog::eventually("it is stopped", || !one.is_running());
        one.stop(GRACE).await.unwrap();
        assert!(one.processes().is_empty());
    });
}

#[test]
fn dropping_stops_nothing() {
    watched(|| async {
        let one = up("echo up; exec sleep 300").await;
        let pid = leader(&one);
        drop(one);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(is_there(pid));
        signal(pid, Signal::KILL);
        // It is still reaped.
        watchdog::eventually("it is reaped", || !Path::new(&format!("/proc/{pid}")).exists());
    });
}

#[test]
fn it_gets_its_environment_and_folder() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().canonicalize().unwrap();
        let mut start =
            shell("echo \"$GREETING $HOME_SEEN\"; pwd; read line; echo \"read $?\"; echo low >&2");
        start.environment = BTreeMap::from([("GREETING".to_owned(), "hello".to_owned())]);
        start.folder = Some(place.clone());
        let one = supervisor(start);
        one.start().await.unwrap();
        one.wait().await;
        until_logged(&one, "low");
        let lines = one.log(usize::MAX);
        let own: Vec<&str> =
            lines.iter().map(String::as_str).filter(|line| !line.starts_with("[poorwill]")).collect();
        assert_eq!(own, ["hello ", place.to_str().unwrap(), "read 1", "low"]);
    });
}

#[test]
fn its_output_is_kept_within_bounds() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.log");
        let mut start = shell(
            "head -c 100000 /dev/zero | tr '\\0' a; echo; printf '\\033[31m\\377\\000\\n'; seq 1 900; printf end",
        );
        start.log = Some(path.clone());
        let one = supervisor(start);
        for times in 1..=2_usize {
            one.start().await.unwrap();
            one.wait().await;
            let whole = 100_000 + 1 + 8 + 3492 + 3;
            watchdog::eventually("all is in the file", || {
                fs::metadata(&path).unwrap().len() == u64::try_from(times * whole).unwrap()
            });
            watchdog::eventually("all is in memory", || one.log(5).iter().any(|line| line == "end"));
        }
        let bytes = fs::read(&path).unwrap();
        assert!(bytes[100_001..].starts_with(b"\x1b[31m\xff\0\n1\n"));
        // Until the end, an unfinished line is shown after the complete ones.
        watchdog::eventually("the last line is over", || one.log(usize::MAX).len() == 1000);
        let lines = one.log(usize::MAX);
        assert!(lines.contains(&"␛[31m\u{fffd}␀".to_owned()));
        assert!(lines.iter().all(|line| line.len() < 5000 && !line.contains(char::is_control)));
        assert!(lines.contains(&format!("{}…", "a".repeat(4096))));
        assert_eq!(one.log(2).len(), 2);
        assert_eq!(one.log(0).len(), 0);
    });
}

#[test]
fn a_failed_start_says_why() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let none = folder.path().join("none");
        let refused = async |start: Start| {
            let one = supervisor(start);
            let said = one.start().await.unwrap_err();
            assert!(!one.is_running() && one.processes().is_empty());
            one.stop(GRACE).await.unwrap();
            (said.to_string(), said)
        };
        let (said, error) = refused(start(&["no-such-program", "x"])).await;
        assert!(matches!(error, SuperviseError::Spawn { .. }));
        assert!(said.contains("`no-such-program` in .") && said.contains("PATH"), "{said}");
        let (said, _) = refused(Start { folder: Some(none.clone()), ..shell("true") }).await;
        assert!(said.contains("`sh`") && said.contains("none is no folder"), "{said}");
        let (said, error) = refused(Start { log: Some(none.join("log")), ..shell("true") }).await;
        assert!(matches!(error, SuperviseError::Log { .. }) && said.contains("none/log"), "{said}");
        let (said, _) = refused(start(&[folder.path().to_str().unwrap()])).await;
        assert!(said.contains("executed by this user"), "{said}");
    });
}

#[test]
fn secrets_of_this_process_are_withheld_from_engines() {
    watched(|| async {
        // Any variable that this process has may hold a key.
        let name = "PATH".to_owned();
        let script = "echo up ${PATH-none}; exec sleep 300";
        let (withheld, given) = (supervisor(start(&["/bin/sh", "-c", script])), "/bin:/usr/bin".to_owned());
        withheld.withhold(&BTreeSet::from([name.clone()]));
        withheld.start().await.unwrap();
        until_logged(&withheld, "up ");
        let own = std::env::var(&name).unwrap();
        assert!(!has_logged(&withheld, &own), "{:?}", withheld.log(9));
        withheld.stop(GRACE).await.unwrap();
        let named = Start { environment: BTreeMap::from([(name.clone(), given.clone())]), ..shell(script) };
        let named = supervisor(named);
        named.withhold(&BTreeSet::from([name]));
        named.start().await.unwrap();
        until_logged(&named, &format!("up {given}"));
        named.stop(GRACE).await.unwrap();
    });
}

#[test]
fn a_log_is_bounded_while_the_engine_runs() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let (path, older) = (folder.path().join("one.log"), folder.path().join("one.log.1"));
        let script = "i=0; while [ $i -lt 2000 ]; do echo line $i of many; i=$((i+1)); done; echo end";
        let one = supervisor(Start { log: Some(path.clone()), log_max_bytes: 10_000, ..shell(script) });
        one.start().await.unwrap();
        until_logged(&one, "end");
        one.stop(GRACE).await.unwrap();
        watchdog::eventually("the last line is in the file", || {
            fs::read_to_string(&path).is_ok_and(|text| text.ends_with("end\n"))
        });
        for file in [&path, &older] {
            let len = fs::metadata(file).unwrap().len();
            assert!(len > 0 && len <= 10_000, "{} has {len} bytes", file.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        // Nothing is missing between both.
        let both = fs::read_to_string(&older).unwrap() + &fs::read_to_string(&path).unwrap();
        let first = both.lines().find_map(|line| line.split(' ').nth(1)?.parse::<usize>().ok());
        assert!(both.lines().count() > 1 && first.is_some_and(|first| first > 0), "{first:?}");
    });
}

#[test]
fn a_full_disk_stops_no_engine() {
    watched(|| async {
        let full = Path::new("/dev/full").to_path_buf();
        let one = supervisor(Start { log: Some(full), ..shell("echo up; exec sleep 300") });
        one.start().await.unwrap();
        until_logged(&one, "up");
        until_logged(&one, "lacks what follows");
        assert!(one.is_running());
        one.stop(GRACE).await.unwrap();
    });
}

fn with_state(script: &str, state: &Path) -> Supervisor {
    Supervisor::new("Org/One:1", shell(script), Some(state)).unwrap()
}

const STATE_FILE: &str = "Org%2fOne%3a1.json";

#[test]
fn an_engine_outlives_its_supervisor_and_is_adopted() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let script = "sleep 300 & sleep 300 & echo up; wait";
        let one = with_state(script, &state);
        assert!(!one.is_running());
        one.start().await.unwrap();
        until_logged(&one, "up");
        let (pid, all) = (leader(&one), one.processes());
        drop(one);

        let strange = Supervisor::new("Org/One:2", shell(script), Some(&state)).unwrap();
        assert!(!strange.is_running());
        strange.stop(GRACE).await.unwrap();

        let one = with_state(script, &state);
        assert!(one.is_running() && has_logged(&one, "is lost"));
        assert_eq!((leader(&one), one.processes()), (pid, all.clone()));
        assert_eq!(one.start().await, Err(SuperviseError::AlreadyRunning { pid }));
        one.stop(GRACE).await.unwrap();
        assert!(!all.into_iter().any(is_there) && !one.is_running());
        assert!(!state.join(STATE_FILE).exists());
        assert!(!with_state(script, &state).is_running());
    });
}

#[test]
fn the_end_of_an_adopted_engine_is_reported() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        // Orphans are found here, too.
        let script = "sleep 300 & echo up; wait";
        let one = with_state(script, folder.path());
        one.start().await.unwrap();
        until_logged(&one, "up");
        drop(one);
        let one = with_state(script, folder.path());
        assert!(is_pending(&one).await);
        // Known processes stay known, however late the leader's end is noticed.
        assert_eq!(one.processes().len(), 2);
        signal(leader(&one), Signal::KILL);
        let how = one.wait().await;
        assert!(how.contains("how is not known") && how.ends_with("1 of its processes are left"), "{how}");
        assert!(!one.is_running() && is_pending(&one).await);
        let left = one.processes();
        one.stop(GRACE).await.unwrap();
        assert!(!is_there(left[0]));
    });
}

#[test]
fn no_other_process_is_taken_for_the_engine() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(STATE_FILE);
        let other = supervisor(shell("echo up; exec sleep 300"));
        let writer = with_state("exec sleep 300", folder.path());
        writer.start().await.unwrap();
        let record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        writer.stop(GRACE).await.unwrap();
        assert!(!path.exists());
        other.start().await.unwrap();
        let pid = leader(&other);
        let set = |key: &str, value: serde_json::Value| {
            let mut record = record.clone();
            record[key] = value;
            record
        };
        let ticks = {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let fields = stat.rsplit_once(") ").unwrap().1;
            fields.split(' ').nth(19).unwrap().parse::<u64>().unwrap()
        };
        let mut other_boot = set("pid", pid.into());
        other_boot["started_ticks"] = ticks.into();
        let mut right = other_boot.clone();
        other_boot["boot"] = "another".into();
        let mut later = right.clone();
        later["started_ticks"] = (ticks + 1).into();
        for stale in [record.clone(), later, set("pid", 0.into()), set("pid", 1.into()), other_boot] {
            fs::write(&path, stale.to_string()).unwrap();
            let one = with_state("exec sleep 300", folder.path());
            assert!(!one.is_running() && one.processes().is_empty(), "{stale}");
            one.stop(GRACE).await.unwrap();
            assert!(is_there(pid) && !path.exists());
            assert!(has_logged(&one, "not there any more"));
        }
        // Process id and start time identify it.
        right["output"] = serde_json::Value::Null;
        fs::write(&path, right.to_string()).unwrap();
        assert!(with_state("exec sleep 300", folder.path()).is_running());
        other.stop(GRACE).await.unwrap();
    });
}

#[test]
fn an_engine_that_was_only_just_started_is_found_by_its_mark() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(STATE_FILE);
        // A process with this environment that leads no group is no engine.
        let script = "sleep 300 & echo up; wait";
        let one = with_state(script, folder.path());
        one.start().await.unwrap();
        until_logged(&one, "up");
        let (pid, all) = (leader(&one), one.processes());
        drop(one);
        // The state between the two writes.
        let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        (record["pid"], record["started_ticks"]) = (serde_json::Value::Null, 0.into());
        let mut other = record.clone();
        other["mark"] = format!("{}0", record["mark"].as_str().unwrap()).into();
        fs::write(&path, other.to_string()).unwrap();
        let not_started = with_state(script, folder.path());
        assert!(
            !not_started.is_running() && has_logged(&not_started, "about to start is not there any more")
        );
        assert!(!path.exists() && is_there(pid));

        fs::write(&path, record.to_string()).unwrap();
        drop(with_state(script, folder.path()));
        // By now its id is recorded.
        let kept: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(kept["pid"], pid);
        let one = with_state(script, folder.path());
        assert_eq!((leader(&one), one.processes()), (pid, all.clone()));
        one.stop(GRACE).await.unwrap();
        assert!(!all.into_iter().any(is_there) && !path.exists());
    });
}

async fn runs_without_record(one: &Supervisor) {
    one.start().await.unwrap();
    until_logged(one, "up");
    assert!(one.unwritten() > 0);
    assert!(
        has_logged(one, "where the state of engines is") && has_logged(one, "would not know this engine")
    );
    one.stop(GRACE).await.unwrap();
    assert!(!one.is_running() && one.processes().is_empty());
}

#[test]
fn an_engine_runs_though_its_state_cannot_be_kept() {
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(STATE_FILE);
        fs::write(&path, "{").unwrap();
        let said = Supervisor::new("Org/One:1", shell("true"), Some(folder.path())).unwrap_err().to_string();
        assert!(said.contains(STATE_FILE) && said.contains("remove the file"), "{said}");
        fs::remove_file(&path).unwrap();

        // A file in place of the folder.
        let below = folder.path().join("file");
        let one = with_state("echo up; exec sleep 300", &below);
        fs::write(&below, "").unwrap();
        runs_without_record(&one).await;
        // A path that cannot be replaced.
        let one = with_state("echo up; exec sleep 300", folder.path());
        fs::create_dir_all(path.join("x")).unwrap();
        runs_without_record(&one).await;
        assert!(!path.with_extension("json.new").exists());
    });
}

#[test]
fn an_engine_outlives_a_service_that_is_killed() {
    if let Some(state) = std::env::var_os(ROLE) {
        // This process is the service.
        let run = async {
            let script =
                "trap '' PIPE; n=0; while :; do n=$((n+1)); echo tick $n; sleep 0.05; done 2> /dev/null";
            let one = with_state(script, Path::new(&state));
            one.start().await.unwrap();
            until_logged(&one, "tick 2");
            fs::write(Path::new(&state).join("ready"), leader(&one).to_string()).unwrap();
            std::future::pending::<()>().await;
        };
        return tokio::runtime::Runtime::new().unwrap().block_on(run);
    }
    watched(|| async {
        let folder = tempfile::tempdir().unwrap();
        let mut service = Command::new(std::env::current_exe().unwrap());
        service.args([
            "supervise::an_engine_outlives_a_service_that_is_killed",
            "--exact",
            "--test-threads=1",
        ]);
        let mut service = service.env(ROLE, folder.path()).spawn().unwrap();
        let ready = folder.path().join("ready");
        watchdog::eventually("the service is ready", || {
            fs::read_to_string(&ready).is_ok_and(|pid| !pid.is_empty())
        });
        let pid: u32 = fs::read_to_string(&ready).unwrap().parse().unwrap();
        service.kill().unwrap();
        service.wait().unwrap();
        assert!(is_there(pid));

        let one = with_state("exec sleep 300", folder.path());
        assert!(one.is_running());
        assert_eq!(leader(&one), pid);
        // Output from now on is read.
        until_logged(&one, "tick ");
        one.stop(GRACE).await.unwrap();
        assert!(!is_there(pid));
    });
}
