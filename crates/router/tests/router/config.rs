//! The keys of TLS in a router's configuration.

use std::fs;
use std::path::Path;

use poorwill_net::tls::{ClientFiles, Identity};
use poorwill_router::RouterConfig;
use poorwill_testkit::certificates::{Authority, Files, Use};
use tempfile::TempDir;

fn files(ca: &Path, own: Option<&Files>) -> ClientFiles {
    let identity = own.map(|own| Identity { certificate: own.certificate.clone(), key: own.key.clone() });
    ClientFiles { ca: ca.to_path_buf(), identity }
}

#[test]
fn keys_of_the_configuration_are_explained() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("own", &["127.0.0.1"], Use::Both);
    let garbage = folder.path().join("garbage.pem");
    fs::write(&garbage, "garbage").unwrap();
    let router = |lines: &str| {
        let text = format!("[fleet]\nname = \"f\"\netcd = [\"http://127.0.0.1:2379\"]\n{lines}\n");
        RouterConfig::parse(&text, &|_| Ok("key".to_owned()))
    };
    let whole = format!(
        "node_ca = {:?}\nnode_certificate = {:?}\nnode_certificate_key = {:?}",
        authority.ca, own.certificate, own.key
    );
    assert_eq!(router(&whole).unwrap().node_tls, Some(files(&authority.ca, Some(&own))));
    assert_eq!(router("").unwrap().node_tls, None);
    let error = router(&format!("node_ca = {garbage:?}")).unwrap_err().to_string();
    assert!(error.contains("node_ca: `"), "{error}");
}

#[test]
fn a_router_with_a_store_needs_no_etcd() {
    let parsed = |text: &str| {
        let secret = |source: &str| match source {
            "env:EMPTY" => Ok("\n".to_owned()),
            _ => Ok("kept-secret\n".to_owned()),
        };
        RouterConfig::parse(&format!("[fleet]\nname = \"f\"\n{text}"), &secret)
    };
    let local = parsed("[store]\n").unwrap();
    assert_eq!(local.etcd.endpoints(), ["http://127.0.0.1:2379"]);
    let open = parsed("[store]\nlisten = \"0.0.0.0:9\"\npassword = \"env:PASSWORD\"\n").unwrap();
    assert_eq!(open.etcd.endpoints(), ["http://127.0.0.1:9"]);
    assert!(open.store.as_ref().unwrap().user.is_some());
    assert!(!format!("{open:?}").contains("kept-secret"));
    let several = parsed("etcd = [\"http://a:2379\", \"http://b:2379\"]\n[store]\n").unwrap();
    assert_eq!(several.etcd.endpoints(), ["http://a:2379", "http://b:2379"]);
    for (text, words) in [
        ("", "etcd is missing; name its members, or have this router keep the records by [store]"),
        ("[store]\nlisten = \"0.0.0.0:2379\"\n", "has no password; say password = \"env:NAME\""),
        ("[store]\nlisten = \"127.0.0.1:0\"\n", "listen has port 0"),
        ("[store]\npassword = \"env:EMPTY\"\n", "password: it is empty"),
        ("[store]\ncertificate = \"a.pem\"\n", "certificate needs certificate_key"),
        ("[store]\nlease = \"3s\"\n", "unknown field `lease`"),
    ] {
        let error = parsed(text).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}
