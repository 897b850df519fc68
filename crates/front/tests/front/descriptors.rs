//! Without a descriptor for a connection to an engine.

use std::fs::File;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::setup::{Setup, answer, post, run};

const ASK_ONE: &str = r#"{"model":"org/one"}"#;
const CHILD: &str = "descriptors::without_descriptors_a_request_is_refused";

#[test]
fn an_engine_is_not_to_blame_for_a_lack_of_descriptors() {
    // The limit is that of a whole process.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{child:?}");
}

#[test]
#[ignore = "runs in a process of its own, by the test above"]
fn without_descriptors_a_request_is_refused() {
    run(async {
        let setup = Setup::new("").await;
        let mut client = setup.client().await;
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(128), maximum: before.maximum }).unwrap();
        client.send(post(r#"{"model":"unknown"}"#)).await;
        assert_eq!(client.json().await.0.status(), 404, "the connection is accepted");
        let files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        client.send(post(ASK_ONE)).await;
        let (head, said) = client.json().await;
        assert_eq!((head.status(), &said["error"]["code"]), (503, &"no_descriptor".into()), "{said}");
        assert!(head.field("retry-after").is_some());
        assert_eq!(setup.until(|seen| seen.running == 0).await.suspects, 0);
        drop(files);
        client.send(post(ASK_ONE)).await;
        let mut engine = setup.engine().await;
        engine.message().await;
        engine.send(answer("{}")).await;
        assert_eq!(client.message().await.0.status(), 200);
    });
}
