//! Addresses that exclude each other: those of the engines, and of both listeners. So do paths of clients and of control.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use poorwill_front::file::check_url;
use poorwill_front::settings::Mistakes;

use super::{Config, section};

impl Config {
    /// One engine serves one model, and none is the service itself.
    pub(super) fn check_addresses(&self, mistakes: &mut Mistakes) {
        let mut seen: BTreeMap<String, &str> = BTreeMap::new();
        let listeners = [("front", self.front.listen), ("control", self.control.listen)];
        for model in self.models.iter().filter(|model| check_url(&model.url).is_ok()) {
            let here = &mut mistakes.of(section(&model.name));
            if let Some(other) = seen.insert(one_name(&model.url), &model.name) {
                here.add(format!("url `{}` is that of model `{other}`", model.url));
            }
            let address = loopback(&model.url);
            let is_here = |listen: SocketAddr| {
                address.is_some_and(|engine| {
                    engine.port() == listen.port()
                        && (engine.ip() == listen.ip() || listen.ip().is_unspecified())
                })
            };
            if let Some((name, listen)) = listeners.iter().find(|(_, listen)| is_here(*listen)) {
                here.add(format!(
                    "url `{}` is the address of [{name}], {listen}, and its requests would come back; give its engine \
                     another port",
                    model.url
                ));
            }
        }
    }
}

impl Config {
    /// Clients put no engine to sleep.
    pub(super) fn check_paths(&self, mistakes: &mut Mistakes) {
        for model in &self.models {
            let Some(calls) = &model.http.sleep else { continue };
            for call in [&calls.sleep, &calls.wake, &calls.asleep.call] {
                let path = call.path.split('?').next().unwrap_or_default();
                mistakes.of("front").add_if(
                    self.front.opens(path),
                    format!(
                        "paths opens {path:?}, by which model `{}` sleeps or wakes; leave it out",
                        model.name
                    ),
                );
            }
        }
    }
}

/// The same for names of one address.
fn one_name(url: &str) -> String {
    loopback(url).map_or_else(|| url.to_owned(), |address| format!("http://{address}"))
}

/// An address on this machine, if it is one for sure.
fn loopback(url: &str) -> Option<SocketAddr> {
    let authority = url.strip_prefix("http://")?;
    if let Some(port) = authority.strip_prefix("localhost:") {
        return Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port.parse().ok()?));
    }
    authority.parse().ok().filter(|address: &SocketAddr| address.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &str, urls: &[&str]) -> Result<(), String> {
        let model = |(nth, url): (usize, &&str)| format!("[[model]]\nname = \"m{nth}\"\nurl = \"{url}\"\n");
        let models: String = urls.iter().enumerate().map(model).collect();
        let parsed = Config::parse(&format!("{lines}\n{models}"), &|_| Ok("key".to_owned()));
        parsed.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn two_names_of_one_address_are_one_engine() {
        for other in ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://localhost:8000"] {
            let error = parse("", &["http://127.0.0.1:8000", other]).unwrap_err();
            assert!(error.starts_with("line 7, column 1: model `m1`: url `http://"), "{error}");
            assert!(error.contains("is that of model `m0`"), "{error}");
        }
        let others =
            ["http://127.0.0.1:8001", "http://127.0.0.2:8000", "http://[::1]:8000", "http://gpu:8000"];
        for other in others {
            parse("", &["http://127.0.0.1:8000", other]).unwrap();
        }
    }

    #[test]
    fn an_engine_at_a_listener_is_refused() {
        let keys = "keys = [\"env:A\"]";
        let everywhere = format!("[front]\nlisten = \"0.0.0.0:9000\"\n{keys}");
        for (lines, url, name) in [
            ("", "http://localhost:8080", "front"),
            ("", "http://127.0.0.1:8081", "control"),
            (&everywhere[..], "http://127.0.0.1:9000", "front"),
            ("[control]\nlisten = \"[::1]:9000\"", "http://[::1]:9000", "control"),
        ] {
            let error = parse(lines, &[url]).unwrap_err();
            let words = format!("url `{url}` is the address of [{name}]");
            assert!(error.contains(&words) && error.contains("another port"), "{error}");
        }
        for (lines, url) in [
            ("[control]\nlisten = \"[::1]:9000\"", "http://127.0.0.1:9000"),
            ("", "http://gpu-host:8080"),
            ("", "http://10.0.0.1:8080"),
        ] {
            parse(lines, &[url]).unwrap();
        }
    }
}
