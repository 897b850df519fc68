//! `poorwill completions`: a completion script for a shell.

use clap_complete::{Shell, generate};

use crate::failure::Failure;
use crate::reference::visible_commands;

pub(crate) fn run(shell: Shell) -> Result<String, Failure> {
    let mut command = visible_commands();
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    generate(shell, &mut command, name, &mut script);
    String::from_utf8(script).map_err(|error| Failure::new(format!("the script is not UTF-8: {error}")))
}
