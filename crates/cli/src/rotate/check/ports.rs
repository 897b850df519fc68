//! Who listens where a model's engine should. An engine that runs already is no finding.

use std::net::{IpAddr, SocketAddr};

use poorwill::proc;
use poorwill_rotate::config::{Config, Model};
use poorwill_rotate::engine::{Inspection, inspect};

use super::super::listening::{Listening, listening};
use super::super::opening::runtime;
use poorwill_local::failure::Failure;

/// A warning for each port of this machine that something else than the engine has.
pub(super) fn warnings(config: &Config) -> Result<Vec<String>, Failure> {
    let listening = listening();
    let runtime = runtime()?;
    let asked = config.models.iter().map(|model| {
        let url = model.url.clone();
        (model, runtime.spawn(async move { inspect(&url).await }))
    });
    let asked: Vec<_> = asked.collect();
    let mut warnings = Vec::new();
    for (model, answer) in asked {
        // What does not answer HTTP has no names.
        let inspection = runtime.block_on(answer).ok().and_then(Result::ok);
        let holder = port_of(&model.url).and_then(|port| holder(&listening, port));
        warnings.extend(warning(model, inspection.as_ref(), holder.as_ref()));
    }
    runtime.shutdown_background();
    Ok(warnings)
}

/// A process and its command line.
struct Holder {
    pid: u32,
    command: Vec<String>,
}

fn holder(listening: &[Listening], port: u16) -> Option<Holder> {
    let pid = listening.iter().find(|one| one.address.port() == port && is_reachable(one.address.ip()))?.pid;
    Some(Holder { pid, command: proc::command(pid) })
}

fn is_reachable(ip: IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified()
}

fn warning(model: &Model, inspection: Option<&Inspection>, holder: Option<&Holder>) -> Option<String> {
    let names = inspection.map(|inspection| &inspection.models[..]).unwrap_or_default();
    let command = model.start.as_ref().map(|start| &start.command[..]);
    let is_its_own = command.zip(holder).is_some_and(|(command, holder)| runs(&holder.command, command));
    if names.contains(&model.served_as) || is_its_own {
        return None;
    }
    let who = holder.map(|holder| {
        let program = holder.command.first().map_or("without a command line", String::as_str);
        format!("process {} ({program})", holder.pid)
    });
    let at = format!("model `{}`: at {}", model.name, model.url);
    if !names.is_empty() {
        let (who, names) = (who.as_deref().unwrap_or("an engine"), names.join("`, `"));
        return Some(format!("{at}, {who} serves `{names}`, and not `{}`", model.served_as));
    }
    // Only a command says which process is the engine.
    let who = who.filter(|_| command.is_some())?;
    Some(format!("{at}, {who} listens, which is not its command; its engine could not listen there"))
}

/// Whether the process is of this command. An interpreter may stand before the program, whose path may be whole.
fn runs(process: &[String], command: &[String]) -> bool {
    let Some((program, arguments)) = command.split_first() else { return false };
    let Some(at) = process.len().checked_sub(command.len()) else { return false };
    process[at + 1..] == *arguments && process[at].ends_with(program.as_str())
}

/// Of a URL on this machine.
fn port_of(url: &str) -> Option<u16> {
    let authority = url.strip_prefix("http://")?;
    let address = authority.replace("localhost", "127.0.0.1").parse::<SocketAddr>().ok()?;
    is_reachable(address.ip()).then_some(address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_recognized_by_its_command() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (process, command, expected) in [
            ("vllm serve a", "vllm serve a", true),
            ("/bin/python3 /opt/vllm serve a", "vllm serve a", true),
            ("vllm serve a", "vllm serve b", false),
            ("vllm serve a --x", "vllm serve a", false),
            ("serve a", "vllm serve a", false),
        ] {
            assert_eq!(runs(&words(process), &words(command)), expected, "{process} / {command}");
        }
    }

    #[test]
    fn only_ports_of_this_machine_are_looked_at() {
        for (url, expected) in [
            ("http://127.0.0.1:8000", Some(8000)),
            ("http://localhost:8000", Some(8000)),
            ("http://[::1]:8000", Some(8000)),
            ("http://10.0.0.1:8000", None),
            ("http://gpu-host:8000", None),
        ] {
            assert_eq!(port_of(url), expected, "{url}");
        }
    }
}
