//! The keys of TLS in a configuration.

use std::fs;

use poorwill_rotate::config::Config;
use poorwill_testkit::certificates::{Authority, Files, Use};
use tempfile::TempDir;

fn lines(own: &Files) -> String {
    format!("certificate = {:?}\ncertificate_key = {:?}", own.certificate, own.key)
}

#[test]
fn keys_of_the_configuration_are_explained() {
    let folder = TempDir::new().unwrap();
    let mut authority = Authority::new(folder.path(), "ca");
    let own = authority.issue("own", &["127.0.0.1"], Use::Both);
    let garbage = folder.path().join("garbage.pem");
    fs::write(&garbage, "garbage").unwrap();
    let model = "[[model]]\nname = \"any\"\nurl = \"http://127.0.0.1:1\"\n";
    let parse = |text: String| Config::parse(&text, &|_| Ok("key".to_owned()));
    let wrong = |text: String| parse(text).unwrap_err().to_string();
    let front = |lines: &str| format!("[front]\n{lines}\n{model}");
    for (lines, words) in [
        (format!("certificate = {:?}", own.certificate), "certificate needs certificate_key"),
        (format!("certificate_key = {:?}", own.key), "certificate_key needs certificate"),
        (format!("clients_ca = {:?}", authority.ca), "certificate and certificate_key are missing"),
        (format!("{}\nclients_ca = {garbage:?}", lines(&own)), "clients_ca: `"),
        (format!("certificate = {garbage:?}\ncertificate_key = {:?}", own.key), "certificate: `"),
    ] {
        let error = wrong(front(&lines));
        assert!(error.starts_with("line ") && error.contains(words), "{error}");
    }
    let fleet = "[fleet]\nname = \"f\"\nnode = \"n\"\netcd = [\"https://127.0.0.1:2379\"]\n";
    let etcd = format!("{fleet}etcd_ca = {:?}\n", authority.ca);
    let config = parse(format!("{etcd}{}", front(&lines(&own)))).unwrap();
    assert_eq!(config.fleet.unwrap().front_url, "https://127.0.0.1:8080");
    let error = wrong(format!("{fleet}{}", front("")));
    assert!(error.contains("name the CA"), "{error}");
    let error = wrong(format!("{etcd}front_url = \"http://127.0.0.1:8080\"\n{}", front(&lines(&own))));
    assert!(error.contains("say https://"), "{error}");
    let error =
        wrong(format!("{fleet}etcd_certificate = \"a\"\netcd_certificate_key = \"b\"\n{}", front("")));
    assert!(error.contains("etcd_ca is missing"), "{error}");
    let user = format!("{etcd}etcd_user = \"poor\"\n");
    let error = wrong(format!("{user}{}", front("")));
    assert!(error.starts_with("line ") && error.contains("etcd_user needs etcd_password"), "{error}");
    let secret = |_: &str| Ok("kept-secret".to_owned());
    let text = format!("{user}etcd_password = \"env:PW\"\n{}", front(""));
    let config = format!("{:?}", Config::parse(&text, &secret).unwrap());
    assert!(config.contains("poor") && !config.contains("kept-secret"), "{config}");
    let error = wrong(format!("{fleet}etcd_ca = {garbage:?}\n{}", front("")));
    assert!(error.contains("etcd_ca: `") && error.contains("no certificate"), "{error}");
}
