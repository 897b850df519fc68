//! Mistakes in configurations and on the command line, and what is said of them.

use poorwill_testkit::etcd::Servers;

use crate::rotate::fixture::free_port;
use crate::support::{Folder, run};

const NO_ETCD: &str = "http://127.0.0.1:9";

fn fleet(lines: &str) -> String {
    format!("[fleet]\nname = \"test\"\netcd = [\"{NO_ETCD}\"]\n{lines}")
}

/// Whatever of a router's file is wrong is said with what would be right.
#[test]
fn a_routers_configuration_is_explained() {
    let folder = Folder::new();
    let of_etcd = [
        (String::new(), &["the file is empty"][..]),
        ("[fleet]\nname = \"test\"\netcd = []\n".to_owned(), &["name at least one member"]),
        (fleet("").replace("test", "a/b"), &["the name has a slash"]),
        (fleet("").replace("http://", "127."), &["etcd's endpoint", "say http://, a host and a port"]),
        (fleet("").replace("http://", "http://poor:kept-secret@"), &["name that by etcd_user"]),
        (fleet("").replace("http://", "poor:kept-secret@"), &["name that by etcd_user"]),
        (fleet("etcd_user = \"poor\"\n"), &["etcd_user needs etcd_password"]),
        (fleet("etcd_password = \"env:PATH\"\n"), &["etcd_password needs etcd_user"]),
        (
            fleet("etcd_user = \"poor\"\netcd_password = \"kept-secret\"\n"),
            &["etcd_password: keys are not written here; use env:NAME"],
        ),
        (
            fleet("etcd_user = \"poor\"\netcd_password = \"env:NO_SUCH_VARIABLE\"\n"),
            &["etcd_password", "NO_SUCH_VARIABLE"],
        ),
        (fleet("leash = \"2s\"\n"), &["unknown field `leash`", "did you mean `lease`"]),
    ];
    let of_routers = [
        (fleet("lease = \"1s\"\n"), &["lease is 1s", "from 2 s to 1 h"][..]),
        (fleet("lease = \"2500ms\"\n"), &["whole seconds"]),
        (fleet("node_key = \"env:NO_SUCH_VARIABLE\"\n"), &["node_key", "NO_SUCH_VARIABLE"]),
        (fleet("[rules]\ncopies_min = 0\n"), &["copies_min is 0"]),
        (fleet("[rules]\nrate_per_copy = -1.0\n"), &["a rate of -1"]),
        (fleet("[front]\nlisten = \"0.0.0.0:8080\"\n"), &["no keys"]),
    ];
    for (text, words) in of_etcd {
        folder.write("fleet.toml", &text);
        for command in [&["route", "--config", "fleet.toml"][..], &["fleet", "status"]] {
            let failed = run(&folder, command);
            failed.failed(words);
            assert!(!failed.stderr.contains("kept-secret"), "{}", failed.stderr);
        }
    }
    for (text, words) in of_routers {
        folder.write("fleet.toml", &text);
        run(&folder, &["route", "--config", "fleet.toml"]).failed(words);
        // Operators need none of it.
        run(&folder, &["fleet", "status"]).failed(&["no etcd answers"]);
    }
    run(&folder, &["route", "--config", "nothing.toml"]).failed(&["cannot read", "nothing.toml"]);
}

#[test]
fn a_nodes_configuration_is_explained() {
    let folder = Folder::new();
    let model = "[[model]]\nname = \"a\"\nurl = \"http://127.0.0.1:1\"\n";
    for (lines, words) in [
        ("node = \"a/b\"\n", &["node: ", "the name has a slash"][..]),
        ("front_url = \"ftp://a\"\n", &["front_url", "http://"]),
        (
            "[front]\nlisten = \"0.0.0.0:8080\"\nkeys = [\"env:PATH\"]\n",
            &["front_url is missing", "how routers reach it"],
        ),
        ("lease = \"2h\"\n", &["lease is"]),
    ] {
        folder.write("node.toml", format!("{}{model}", fleet(lines)));
        run(&folder, &["rotate", "--config", "node.toml"]).failed(words);
    }
}

#[test]
fn an_etcd_that_is_not_there_is_named() {
    let folder = Folder::new();
    folder.write("fleet.toml", fleet(""));
    run(&folder, &["fleet", "status"]).failed(&["no etcd answers", NO_ETCD, "refused"]);
    run(&folder, &["fleet", "drain", "node0"]).failed(&["no etcd answers"]);
}

/// What `init` writes can be read, and `--check` starts nothing.
#[test]
fn a_first_configuration_is_written_and_checked() {
    let folder = Folder::new();
    let written = run(&folder, &["fleet", "init"]).succeeded();
    folder.write("fleet.toml", &written);
    let check = ["route", "--check", "--config", "fleet.toml"];
    let Some(etcd) = Servers::one() else { return };
    folder.write("fleet.toml", written.replace("http://127.0.0.1:2379", &etcd.urls()[0]));
    let said = run(&folder, &check).succeeded();
    assert!(said.contains("fleet prod: nodes 0, models 0"), "{said}");
    assert!(said.contains("has no node: start one"), "{said}");
    folder.write("fleet.toml", written.replace("http://127.0.0.1:2379", NO_ETCD));
    run(&folder, &check).failed(&["no etcd answers", NO_ETCD]);
    // A router that keeps the records itself.
    let port = free_port();
    folder.write("fleet.toml", format!("[fleet]\nname = \"own\"\n[store]\nlisten = \"127.0.0.1:{port}\"\n"));
    let said = run(&folder, &check).succeeded();
    assert!(said.contains("this router begins one"), "{said}");
}
