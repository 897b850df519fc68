//! Helpers of hibernation that a test scripts, as processes of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use poorwill_rotate::config::Hibernate;
use poorwill_rotate::hibernation::{EngineProcesses, HibernateError, Hibernator, Sets, check};
use tempfile::TempDir;
use tokio::time::timeout;

/// After this time a test has failed.
const STUCK: Duration = Duration::from_secs(120);

/// A shell that answers each line by the first case that matches it. `$id` is the request's number. What it was asked is
/// in a file, a line each, and `$n` counts those.
struct Script {
    folder: TempDir,
}

impl Script {
    fn new(cases: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let asked = folder.path().join("asked").display().to_string();
        let text = format!(
            "folder='{folder}'\nstarted=$(cat '{folder}/started' 2>/dev/null || echo 0)\nstarted=$((started + 1))\n\
             echo $started > '{folder}/started'\n\
             first='{{\"ready\":{{\"version\":\"1.2.3\",\"recovered\":[]}}}}'\n\
             answer() {{ echo \"{{\\\"id\\\":$id,\\\"$1\\\":$2}}\"; }}\n\
             fail() {{ answer error \"{{\\\"message\\\":\\\"$2\\\",\\\"kind\\\":\\\"$1\\\"}}\"; }}\n\
             {begin}\necho \"$first\"\nwhile read -r line; do\necho \"$line\" >> '{asked}'\n\
             id=$(echo \"$line\" | sed 's/.*\"id\":\\([0-9]*\\).*/\\1/')\ncase \"$line\" in\n{cases}\nesac\ndone\n\
             {{ echo ended > '{folder}/ended'; }} 2>/dev/null\n",
            folder = folder.path().display(),
            begin = if cases.starts_with("begin ") {
                cases.lines().next().unwrap().trim_start_matches("begin ")
            } else {
                ""
            },
            cases = cases.lines().filter(|line| !line.starts_with("begin ")).collect::<Vec<_>>().join("\n"),
        );
        fs::write(folder.path().join("helper.sh"), text).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self) -> Vec<String> {
        ["sh".to_owned(), self.path("helper.sh").display().to_string()].into()
    }

    fn config(&self) -> Hibernate {
        Hibernate { helper: self.command(), ..Hibernate::default() }
    }

    fn sets(&self) -> Sets {
        Sets::new(&self.config(), Some(&self.path("state")), ["one", "two"].into_iter())
    }

    /// The operations that it was asked for, with what follows.
    fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("asked")).unwrap_or_default();
        text.lines().map(|line| line.split_once("\"op\":").unwrap().1.to_owned()).collect()
    }

    fn starts(&self) -> String {
        fs::read_to_string(self.path("started")).unwrap().trim().to_owned()
    }

    fn has_mark(&self) -> bool {
        Path::new(&self.path("state").join("one.hibernating")).exists()
    }
}

fn engine(pids: &[u32]) -> EngineProcesses {
    EngineProcesses { model: "one".to_owned(), pids: pids.to_vec() }
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(STUCK, what).await.expect("an answer")
}

/// Process 11 has no GPU, and the others hold a few bytes.
const WELL: &str = r#"*'"pids":[11]'*) fail no_device 'it uses no device' ;;
*'"inspect"'*) answer ok '{"processes":[{"pid":1,"state":"running","held":[{"uuid":"a","used_bytes":70},{"uuid":"b","used_bytes":null}],"obstacles":[]}]}' ;;
*'"hibernate"'*) answer ok '{"processes":[],"host_bytes":141,"total_ms":3.5}' ;;
*'"state"'*) answer ok '{"processes":[{"pid":1,"state":"checkpointed"}]}' ;;
*'"resume"'*) answer ok '{"processes":[],"total_ms":1.5}' ;;"#;

#[tokio::test]
async fn the_processes_with_a_gpu_go_together_and_are_found_by_the_next_service() {
    let script = Script::new(WELL);
    let sets = script.sets();
    assert!(!script.path("started").exists(), "it is started at the first need");
    soon(sets.hibernate(&engine(&[11, 12, 13]))).await.unwrap();
    let asked = script.asked();
    let hibernate = r#""hibernate","pids":[12,13],"wait_max_ms":5000,"host_bytes_max":null}"#;
    assert!(asked.len() == 4 && asked[3] == hibernate, "{asked:?}");
    assert_eq!(
        (sets.host_bytes("one"), sets.may_hibernate("one"), sets.may_hibernate("two")),
        (141, true, false)
    );
    drop(sets);
    let next = script.sets();
    assert!(next.may_hibernate("one") && next.host_bytes("one") == 141);
    assert!(soon(next.is_hibernating(&engine(&[11, 12, 13]))).await.unwrap());
    // A process that took one of the numbers is none of its own.
    soon(next.resume(&engine(&[11, 13]))).await.unwrap();
    assert_eq!(script.asked().last().unwrap(), r#""resume","pids":[13]}"#);
    assert!(!next.may_hibernate("one") && !script.has_mark());
    soon(next.end()).await;
    assert!(script.path("ended").exists(), "its input was closed");
}

#[tokio::test]
async fn what_is_in_the_way_is_named_before_anything_is_marked() {
    let obstacle =
        WELL.replace("\"obstacles\":[]", "\"obstacles\":[{\"kind\":\"communicator\",\"what\":\"2 ranks\"}]");
    let foreign = WELL.replace("\"running\"", "\"checkpointed\"");
    let unsupported = "*) fail unsupported 'the driver is too old; upgrade it' ;;";
    let none = "*) fail no_device 'it uses no device' ;;";
    let failed = "*) fail not_permitted 'it is of another user' ;;";
    for (cases, is_impossible, words) in [
        (&*obstacle, true, "process 12 has communicator (2 ranks)"),
        (unsupported, true, "the driver is too old"),
        (none, true, "none of its processes uses a GPU"),
        (&*foreign, false, "by another program"),
        (failed, false, "it is of another user"),
    ] {
        let script = Script::new(cases);
        let sets = script.sets();
        let error = soon(sets.hibernate(&engine(&[11, 12]))).await.unwrap_err();
        assert_eq!(matches!(error, HibernateError::Impossible(_)), is_impossible, "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
        assert!(!script.has_mark() && !sets.may_hibernate("one"));
    }
}

#[tokio::test]
async fn no_more_host_memory_is_taken_than_is_allowed() {
    let unmeasured = Script::new(WELL);
    let limited = Hibernate { host_max_bytes: Some(200), ..unmeasured.config() };
    let error = Sets::new(&limited, None, ["one"].into_iter()).hibernate(&engine(&[12])).await.unwrap_err();
    assert!(
        matches!(&error, HibernateError::Impossible(why) if why.contains("leave host_max away")),
        "{error}"
    );
    let script = Script::new(&WELL.replace("null", "0"));
    let config = Hibernate { host_max_bytes: Some(200), ..script.config() };
    let sets = Sets::new(&config, None, ["one", "two"].into_iter());
    soon(sets.hibernate(&engine(&[12]))).await.unwrap();
    let two = EngineProcesses { model: "two".to_owned(), pids: vec![13] };
    let error = soon(sets.hibernate(&two)).await.unwrap_err();
    assert!(
        error.to_string().contains("70 B of host memory") && error.to_string().contains("59 B"),
        "{error}"
    );
    assert!(!sets.may_hibernate("two"));
    sets.configure(&Hibernate { host_max_bytes: Some(300), ..config });
    soon(sets.hibernate(&two)).await.unwrap();
    assert!(script.asked().last().unwrap().contains("\"host_bytes_max\":159"), "{:?}", script.asked());
}

#[tokio::test]
async fn a_part_that_is_off_is_put_back_and_a_lost_engine_is_reported() {
    let half = WELL.replace(
        "*'\"state\"'*)",
        "*'\"state\",\"pids\":[13]'*) answer ok '{\"state\":\"locked\"}' ;;\n*'\"state\"'*)",
    );
    let script = Script::new(&half);
    let sets = script.sets();
    soon(sets.hibernate(&engine(&[12, 13]))).await.unwrap();
    assert!(!soon(sets.is_hibernating(&engine(&[12, 13]))).await.unwrap());
    assert_eq!(script.asked().last().unwrap(), r#""resume","pids":[12,13]}"#);
    let script = Script::new(&WELL.replace("\"checkpointed\"", "\"failed\""));
    let sets = script.sets();
    soon(sets.hibernate(&engine(&[12]))).await.unwrap();
    let error = soon(sets.is_hibernating(&engine(&[12]))).await.unwrap_err();
    assert!(error.to_string().contains("process 12 has lost its GPU"), "{error}");
}

#[tokio::test]
async fn a_resume_whose_answer_was_lost_is_one() {
    let script = Script::new(&WELL.replace("\"checkpointed\"", "\"running\"").replace(
        "*'\"resume\"'*) answer ok '{\"processes\":[],\"total_ms\":1.5}'",
        "*'\"resume\"'*) fail wrong_state 'it is running, not checkpointed'",
    ));
    let sets = script.sets();
    soon(sets.hibernate(&engine(&[12]))).await.unwrap();
    soon(sets.resume(&engine(&[12]))).await.unwrap();
    assert!(!sets.may_hibernate("one"));
}

#[tokio::test]
async fn a_helper_that_ends_fails_what_it_was_asked_and_the_next_one_answers() {
    // The first one ends at its first hibernation.
    let cases = WELL.replace("*'\"hibernate\"'*)", "*'\"hibernate\"'*) [ $started = 1 ] && exit 3;");
    let script = Script::new(&cases);
    let sets = script.sets();
    let restarted = sets.restarted();
    let error = soon(sets.hibernate(&engine(&[12]))).await.unwrap_err();
    assert!(error.to_string().contains("helper for hibernation ended"), "{error}");
    assert!(matches!(error, HibernateError::Later(_)) && script.has_mark());
    // Without being asked for anything.
    soon(restarted).await;
    assert!(soon(sets.is_hibernating(&engine(&[12]))).await.unwrap());
    assert_eq!(script.starts(), "2");
}

#[tokio::test]
async fn a_helper_that_cannot_be_used_says_why_and_harms_nothing() {
    for (cases, words) in [
        (
            "begin first='{\"unusable\":\"there is no driver; install it\"}'\n*) ;;",
            "there is no driver; install it",
        ),
        ("begin first='hello'\n*) ;;", "is no helper"),
        ("begin exit 4\n*) ;;", "ended before its first line, with exit status: 4"),
    ] {
        let script = Script::new(cases);
        let sets = script.sets();
        for _ in 0..2 {
            let error = soon(sets.hibernate(&engine(&[12]))).await.unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        assert!(!script.has_mark());
        assert!(soon(check(&script.config(), None)).await.unwrap_err().contains(words));
        soon(sets.end()).await;
    }
    let missing = Hibernate { helper: vec!["/no/such/program".to_owned()], ..Hibernate::default() };
    let missing = check(&missing, None).await.unwrap_err();
    assert!(missing.contains("cannot start `/no/such/program`"), "{missing}");
    let script = Script::new(WELL);
    assert_eq!(soon(check(&script.config(), None)).await.unwrap(), "1.2.3");
    assert!(script.path("ended").exists());
}

#[tokio::test]
async fn what_cannot_be_asked_or_does_not_fit_now_is_for_later() {
    let script = Script::new(WELL);
    soon(script.sets().hibernate(&engine(&[12]))).await.unwrap();
    let unusable = Script::new("begin first='{\"unusable\":\"no driver yet\"}'\n*) ;;");
    let full = Script::new("*) fail out_of_device_memory 'its GPU is full' ;;");
    let forgetful = Script::new("*) fail journal 'its journal cannot be written' ;;");
    let unseen = Script::new("*) fail no_figures 'nothing says what is free' ;;");
    for (other, words) in [
        (unusable, "no driver yet"),
        (full, "its GPU is full"),
        (forgetful, "cannot be written"),
        (unseen, "nothing says what is free"),
    ] {
        let sets = Sets::new(&other.config(), Some(&script.path("state")), ["one"].into_iter());
        let found = soon(sets.is_hibernating(&engine(&[12]))).await.unwrap_err();
        let mut back = soon(sets.resume(&engine(&[12]))).await.unwrap_err();
        if words == "its GPU is full" {
            let HibernateError::NeedsMore(why) = back else { panic!("{back:?}") };
            back = HibernateError::Later(why);
        }
        for error in [found, back] {
            assert!(
                matches!(error, HibernateError::Later(_)) && error.to_string().contains(words),
                "{error:?}"
            );
        }
        assert!(sets.may_hibernate("one"), "nothing has changed");
    }
}

#[tokio::test]
async fn what_hardly_changes_is_remembered_until_there_is_another_configuration_or_much_later() {
    for (kind, is_for_good) in [("unsupported", true), ("no_device", false), ("journal", false)] {
        let first = format!("{{\"unusable\":\"no use\",\"kind\":\"{kind}\"}}");
        let script = Script::new(&format!("begin first='{first}'\n*) ;;"));
        let sets = script.sets();
        let error = soon(sets.hibernate(&engine(&[12]))).await.unwrap_err();
        assert_eq!(matches!(error, HibernateError::Impossible(_)), is_for_good, "{error:?}");
        // An engine that hibernates is let be all the same.
        fs::create_dir_all(script.path("state")).unwrap();
        fs::write(script.path("state").join("one.hibernating"), r#"{"pids":[12],"host_bytes":1}"#).unwrap();
        let error = soon(sets.resume(&engine(&[12]))).await.unwrap_err();
        assert!(matches!(&error, HibernateError::Later(why) if why.contains("no use")), "{error:?}");
        for (pause, starts) in
            [(60, if is_for_good { "1" } else { "2" }), (3600, if is_for_good { "2" } else { "3" })]
        {
            let before = script.starts();
            tokio::time::pause();
            tokio::time::advance(Duration::from_secs(pause)).await;
            tokio::time::resume();
            // One that is asked for nothing is not started.
            assert_eq!(script.starts(), before);
            soon(sets.resume(&engine(&[12]))).await.unwrap_err();
            assert_eq!(script.starts(), starts, "{kind}");
        }
        let next = Script::new(WELL);
        sets.configure(&next.config());
        soon(sets.resume(&engine(&[12]))).await.unwrap();
    }
}

/// Whether a process has ended, also where none has waited for it.
fn has_ended(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let polling = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(STUCK, polling).await.unwrap_or_else(|_| panic!("never {what}"));
}

#[tokio::test]
async fn the_end_waits_for_no_helper_that_is_not_ready() {
    // It says nothing, or it closes its output.
    for begins in ["", "exec >&-; "] {
        let script = Script::new("");
        let child = script.path("child").display().to_string();
        let text = format!("{begins}sleep 3600 & echo $! > '{child}.new'; mv '{child}.new' '{child}'; wait");
        fs::write(script.path("helper.sh"), text).unwrap();
        let sets = Arc::new(script.sets());
        let asking = Arc::clone(&sets);
        let asked = tokio::spawn(async move { asking.hibernate(&engine(&[12])).await });
        until("started", || script.path("child").exists()).await;
        soon(sets.end()).await;
        let error = soon(asked).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("the service is ending"), "{error}");
        let child = fs::read_to_string(child).unwrap();
        until("killed with its children", || has_ended(child.trim())).await;
    }
}

/// A wrapper that lives on without a helper is no reason to wait, and not left behind.
#[tokio::test]
async fn a_helper_that_closes_its_output_and_lives_on_is_killed() {
    let cases = WELL.replace(
        "*'\"hibernate\"'*)",
        "*'\"hibernate\"'*) [ $started = 1 ] && exec >&- && { sleep 3600 & echo $! > $folder/new; mv $folder/new $folder/child; wait; };",
    );
    let script = Script::new(&cases);
    let sets = Arc::new(script.sets());
    let asking = Arc::clone(&sets);
    let asked = tokio::spawn(async move { asking.hibernate(&engine(&[12])).await });
    until("asked", || script.path("child").exists()).await;
    let child = fs::read_to_string(script.path("child")).unwrap();
    // From now on limits pass at once where nothing else happens.
    tokio::time::pause();
    let error = soon(asked).await.unwrap().unwrap_err();
    tokio::time::resume();
    assert!(error.to_string().contains("did not end within 30 s, and was killed"), "{error}");
    until("killed with its children", || has_ended(child.trim())).await;
    soon(sets.end()).await;
}

/// On a driver that hangs at the end of a process that came back.
#[tokio::test]
async fn one_that_came_back_is_noted_where_its_end_would_hang_the_machine() {
    for (driver, hangs) in [("595.71.05", true), ("580.159.04", false)] {
        let first = r#"'{"ready":{"version":"1.2.3","driver":"DRIVER"}}'"#.replace("DRIVER", driver);
        let script = Script::new(&format!("begin first={first}\n{WELL}"));
        let sets = script.sets();
        let one = engine(&[11, 12, 13]);
        assert!(!sets.must_end_away(&one), "nothing is known of it");
        soon(sets.hibernate(&one)).await.unwrap();
        assert_eq!(
            sets.must_end_away(&one),
            hangs,
            "{driver}: it is away, and must not come back for its end"
        );
        soon(sets.resume(&one)).await.unwrap();
        assert_eq!(sets.must_end_away(&one), hangs, "{driver}");
        soon(sets.end()).await;
        drop(sets);
        // The next service ends it as this one would.
        let next = script.sets();
        assert_eq!(next.must_end_away(&one), hangs, "{driver}");
        assert!(!next.must_end_away(&engine(&[11, 14])), "these are others");
        next.forget("one");
        assert!(!next.must_end_away(&one), "its processes are gone");
        assert!(!script.path("state").join("one.returned").exists());
    }
}
