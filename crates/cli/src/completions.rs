//! `poorwill completions`: a completion script for a shell.

use clap::Command;
use clap_complete::{Shell, generate};
use poorwill_local::failure::Failure;

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete in
    shell: Shell,
}

pub(crate) fn run(args: &CompletionsArgs, mut command: Command) -> Result<String, Failure> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    generate(args.shell, &mut command, name, &mut script);
    String::from_utf8(script).map_err(|error| Failure::new(format!("the script is not UTF-8: {error}")))
}
