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
