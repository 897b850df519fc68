//! The variables by which engines of the service lend.

use crate::config::{BROKER, LEND, Lend, PEER_COPIES, Start};

/// With these variables, unless the configuration sets them. Without a broker that is counted with, an engine must not
/// lend: its sleeps would seem to release nothing. Without lending it has no copies, whatever the service's own environment
/// says.
pub(super) fn of_lending(mut start: Start, lend: Option<&Lend>) -> Start {
    let is_inherited = |name: &str| std::env::var_os(name).is_some();
    let mut values = match lend {
        Some(lend) => vec![(LEND, "1".to_owned()), (BROKER, lend.path().display().to_string())],
        None if is_inherited(LEND) => vec![(LEND, "0".to_owned())],
        None => Vec::new(),
    };
    let lends = start.environment.get(LEND).map_or(lend.is_some(), |value| value == "1");
    let copies = lends && lend.is_some_and(|lend| lend.peer_copies);
    if copies || lend.is_some() || is_inherited(PEER_COPIES) {
        values.push((PEER_COPIES, u8::from(copies).to_string()));
    }
    for (name, value) in values {
        start.environment.entry(name.to_owned()).or_insert(value);
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn variables(environment: &str, peer_copies: bool) -> Vec<(String, String)> {
        let text = format!(
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\ncommand = [\"true\"]\n\
             environment = {{ {environment} }}\n"
        );
        let start = Config::parse(&text, &|_| Ok(String::new())).unwrap().models.remove(0).start.unwrap();
        let lend = Lend { broker: Some("/run/b.sock".into()), peer_copies };
        of_lending(start, Some(&lend)).environment.into_iter().collect()
    }

    #[test]
    fn the_configuration_of_an_engine_goes_first() {
        let all = |lend: &str, copies: &str| {
            [(BROKER, "/run/b.sock"), (LEND, lend), (PEER_COPIES, copies)]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
        };
        assert_eq!(variables("", false), all("1", "0"));
        assert_eq!(variables("", true), all("1", "1"));
        assert_eq!(variables("POORWILL_LEND = \"0\"", true), all("0", "0"));
        assert_eq!(variables("POORWILL_PEER_COPIES = \"0\"", true), all("1", "0"));
    }
}
