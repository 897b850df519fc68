//! The engines of this user that listen here, what they report, and the GPUs that they are on.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use poorwill::gpus::Gpus;
use poorwill::proc;
use poorwill_rotate::engine::{Inspection, inspect};

use super::super::engines::CommandLine;
use super::super::listening::{ancestry, listening, parents};
use super::super::opening::runtime;
use poorwill_local::failure::Failure;

#[derive(Debug)]
pub(super) struct RunningEngine {
    pub(super) line: CommandLine,
    pub(super) address: SocketAddr,
    /// Its names of its models.
    pub(super) models: Vec<String>,
    /// `None` for engines that report no sleep.
    pub(super) is_sleeping: Option<bool>,
    /// `None` if they are unknown.
    pub(super) gpus: Option<Vec<usize>>,
    /// What it has of the GPU where it has most, while awake.
    pub(super) used_bytes: Option<u64>,
    pub(super) visible_devices: Option<String>,
    /// Where it was started, if elsewhere.
    pub(super) folder: Option<PathBuf>,
}

impl RunningEngine {
    pub(super) fn url(&self) -> String {
        url(self.address)
    }
}

/// By their ports.
pub(super) fn running(gpus: Option<&Gpus>) -> Result<Vec<RunningEngine>, Failure> {
    let parents = parents();
    let runtime = runtime()?;
    let mut found = Vec::new();
    for (pid, (line, addresses)) in servers(&parents) {
        let asked = addresses.iter().map(|address| (*address, runtime.spawn(ask(url(*address)))));
        let asked: Vec<_> = asked.collect();
        let answers: Vec<(SocketAddr, Option<Inspection>)> = asked
            .into_iter()
            .map(|(address, answer)| (address, runtime.block_on(answer).ok().flatten()))
            .collect();
        let Some((address, inspection)) = chosen(&line, answers) else { continue };
        let is_sleeping = inspection.as_ref().and_then(|inspection| inspection.is_sleeping);
        let reported = inspection.map(|inspection| inspection.models).unwrap_or_default();
        let models = if reported.is_empty() { line.names() } else { reported };
        let visible_devices = proc::ProcessEnvironment::of(pid).variable("CUDA_VISIBLE_DEVICES");
        let visible_devices = visible_devices.map(|value| value.to_string_lossy().into_owned());
        let used = gpus.map(|gpus| used(gpus, &parents, pid)).unwrap_or_default();
        let by_variable = visible_devices.as_deref().and_then(|visible| positions(visible, line.gpus()));
        let is_elsewhere = |folder: &PathBuf| std::env::current_dir().ok().as_ref() != Some(folder);
        found.push(RunningEngine {
            gpus: if used.is_empty() { by_variable } else { Some(used.keys().copied().collect()) },
            used_bytes: used.values().copied().max().filter(|bytes| *bytes > 0 && is_sleeping != Some(true)),
            folder: proc::folder(pid).filter(is_elsewhere),
            line,
            address,
            models,
            is_sleeping,
            visible_devices,
        });
    }
    runtime.shutdown_background();
    found.sort_by_key(|engine| engine.address.port());
    Ok(found)
}

async fn ask(url: String) -> Option<Inspection> {
    inspect(&url).await.ok()
}

/// Engines by process, and where each of them listens. Its workers may be the ones that do.
fn servers(parents: &BTreeMap<u32, u32>) -> BTreeMap<u32, (CommandLine, Vec<SocketAddr>)> {
    let mut servers: BTreeMap<u32, (CommandLine, Vec<SocketAddr>)> = BTreeMap::new();
    for one in listening() {
        let found =
            ancestry(parents, one.pid).find_map(|pid| Some((pid, CommandLine::of(&proc::command(pid))?)));
        let Some((pid, line)) = found else { continue };
        let addresses = &mut servers.entry(pid).or_insert_with(|| (line, Vec::new())).1;
        if !addresses.contains(&one.address) {
            addresses.push(one.address);
        }
    }
    servers
}

/// The port of its command, or else one that lists models. Others are for its workers.
fn chosen(
    line: &CommandLine,
    mut answers: Vec<(SocketAddr, Option<Inspection>)>,
) -> Option<(SocketAddr, Option<Inspection>)> {
    answers.sort_by_key(|(address, _)| (address.is_ipv6(), address.port()));
    let lists =
        |inspection: &Option<Inspection>| inspection.as_ref().is_some_and(|found| !found.models.is_empty());
    let at = answers
        .iter()
        .position(|(address, _)| address.port() == line.port())
        .or_else(|| answers.iter().position(|(_, inspection)| lists(inspection)))
        .or_else(|| answers.iter().position(|(_, inspection)| inspection.is_some()))?;
    Some(answers.swap_remove(at))
}

/// What the process and its workers have, by the GPU's position.
fn used(gpus: &Gpus, parents: &BTreeMap<u32, u32>, pid: u32) -> BTreeMap<usize, u64> {
    let mut used = BTreeMap::new();
    for position in 0..gpus.count().unwrap_or(0) {
        for process in gpus.processes(position).unwrap_or_default() {
            if ancestry(parents, process.pid).any(|one| one == pid) {
                *used.entry(position).or_insert(0) += process.used_bytes.unwrap_or(0);
            }
        }
    }
    used
}

/// `None` for names that are no numbers.
fn positions(visible: &str, count: usize) -> Option<Vec<usize>> {
    let all: Option<Vec<usize>> = visible.split(',').map(|gpu| gpu.trim().parse().ok()).collect();
    all.map(|mut all| {
        all.truncate(count);
        all
    })
    .filter(|all| !all.is_empty())
}

/// From this machine.
fn url(address: SocketAddr) -> String {
    let ip = if address.ip().is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { address.ip() };
    format!("http://{}", SocketAddr::new(ip, address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_visible_devices_are_its_gpus() {
        assert_eq!(positions("3,1, 2", 2), Some(vec![3, 1]));
        assert_eq!(positions("0", 4), Some(vec![0]));
        assert_eq!(positions("GPU-abc", 1), None);
        assert_eq!(positions("", 1), None);
    }

    #[test]
    fn urls_are_those_from_this_machine() {
        for (address, expected) in [
            ("0.0.0.0:1", "http://127.0.0.1:1"),
            ("[::]:1", "http://127.0.0.1:1"),
            ("[::1]:1", "http://[::1]:1"),
            ("10.0.0.1:1", "http://10.0.0.1:1"),
        ] {
            assert_eq!(url(address.parse().unwrap()), expected);
        }
    }
}
