//! What engines are told by their environment, so that they lend.

use std::path::Path;

use crate::config::Start;

/// Pools of the process lend what sleeps.
const LEND: &str = "POORWILL_LEND";
/// Where the broker is.
const BROKER: &str = "POORWILL_BROKER";

/// With both variables, unless the configuration sets them.
pub(crate) fn with_lending(mut start: Start, broker: &Path) -> Start {
    let values = [(LEND, "1".to_owned()), (BROKER, broker.display().to_string())];
    for (name, value) in values {
        start.environment.entry(name.to_owned()).or_insert(value);
    }
    start
}
