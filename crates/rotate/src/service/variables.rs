//! The variables by which engines of the service lend.

use std::path::Path;

use crate::config::{BROKER, LEND, Start};

/// With both variables, unless the configuration sets them. Without a broker that is counted with, an engine must not
/// lend: its sleeps would seem to release nothing.
pub(super) fn of_lending(mut start: Start, broker: Option<&Path>) -> Start {
    let values = match broker {
        Some(broker) => vec![(LEND, "1".to_owned()), (BROKER, broker.display().to_string())],
        None if std::env::var_os(LEND).is_some() => vec![(LEND, "0".to_owned())],
        None => Vec::new(),
    };
    for (name, value) in values {
        start.environment.entry(name.to_owned()).or_insert(value);
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn variables(environment: &str) -> Vec<(String, String)> {
        let text = format!(
            "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\ncommand = [\"true\"]\n\
             environment = {{ {environment} }}\n"
        );
        let start = Config::parse(&text, &|_| Ok(String::new())).unwrap().models.remove(0).start.unwrap();
        of_lending(start, Some(Path::new("/run/b.sock"))).environment.into_iter().collect()
    }

    #[test]
    fn the_configuration_of_an_engine_goes_first() {
        let both = |lend: &str, broker: &str| {
            vec![(BROKER.to_owned(), broker.to_owned()), (LEND.to_owned(), lend.to_owned())]
        };
        assert_eq!(variables(""), both("1", "/run/b.sock"));
        assert_eq!(variables("POORWILL_LEND = \"0\""), both("0", "/run/b.sock"));
    }
}
