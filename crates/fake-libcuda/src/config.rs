//! The settings: the devices, what they simulate, and which calls fail or are delayed.

use std::collections::HashSet;
use std::env;
use std::path::PathBuf;
use std::time::Duration;

use poorwill_driver::HostConfig;

use crate::script::{Script, event};
use crate::simulation::{Setting, Simulation, setting};
use crate::text::{number, size};

#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) devices: Vec<HostConfig>,
    pub(crate) simulations: Vec<Simulation>,
    pub(crate) failures: Vec<Failure>,
    pub(crate) delays: Vec<Delay>,
    /// The folder where this process registers itself, and looks for others.
    pub(crate) processes: Option<PathBuf>,
    pub(crate) script: Script,
}

/// The calls `first` to `first + count - 1` of a symbol, counted from 1, return `code`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `None` for every counted symbol.
    pub(crate) symbol: Option<String>,
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) code: i32,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delay {
    pub(crate) symbol: String,
    pub(crate) by: Duration,
}

const DEVICES: &str = "256GiB/2MiB,16GiB/PAGE";
const SIMULATE: &str = "POORWILL_FAKE_CUDA_SIMULATE";

/// Whether there is a symbol of this name.
pub(crate) type IsSymbol = fn(&str) -> bool;

impl Config {
    pub(crate) fn from_environment(is_symbol: IsSymbol) -> Result<Self, String> {
        let mut devices = list("POORWILL_FAKE_CUDA_DEVICES", DEVICES, device)?;
        if let Some(folder) = env::var_os("POORWILL_FAKE_CUDA_SHARED").map(PathBuf::from) {
            let numbered = devices.iter_mut().enumerate();
            numbered.for_each(|(nth, device)| device.shared_in = Some(folder.join(nth.to_string())));
        }
        Ok(Self {
            simulations: simulations(&list(SIMULATE, "", setting)?, devices.len())?,
            devices,
            failures: list("POORWILL_FAKE_CUDA_FAIL", "", |item| failure(item, is_symbol))?,
            delays: list("POORWILL_FAKE_CUDA_DELAY", "", |item| delay(item, is_symbol))?,
            processes: env::var_os("POORWILL_FAKE_CUDA_PROCESSES").map(PathBuf::from),
            script: Script::of(list("POORWILL_FAKE_CUDA_CHECKPOINT", "", event)?),
        })
    }
}

fn list<T>(
    variable: &str,
    default: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let value = match env::var(variable) {
        Ok(value) => value,
        Err(env::VarError::NotPresent) => default.to_owned(),
        Err(error) => return Err(format!("{variable}: {error}")),
    };
    let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| parse(item).map_err(|reason| format!("{variable}: `{item}`: {reason}"))).collect()
}

fn device(item: &str) -> Result<HostConfig, String> {
    let (total, granule) =
        item.split_once('/').map_or((item, None), |(total, granule)| (total, Some(granule)));
    let mut config = HostConfig::with_capacity(size(total)?);
    match granule {
        Some("PAGE") => config.granule_bytes = rustix::param::page_size() as u64,
        Some(granule) => config.granule_bytes = size(granule)?,
        None => {}
    }
    Ok(config)
}

fn simulations(settings: &[Setting], count: usize) -> Result<Vec<Simulation>, String> {
    let mut simulations = vec![Simulation::default(); count];
    let mut seen = HashSet::new();
    for Setting { device, key, value } in settings {
        let refused = |reason: String| format!("{SIMULATE}: `{device}:{key}={value}`: {reason}");
        let simulation =
            simulations.get_mut(*device).ok_or_else(|| refused("there is no such device".into()))?;
        simulation.set(key, value).map_err(refused)?;
        if !seen.insert((device, key)) {
            return Err(refused("it was set before".into()));
        }
    }
    Ok(simulations)
}

fn failure(item: &str, is_symbol: IsSymbol) -> Result<Failure, String> {
    let parts: Vec<&str> = item.split(':').collect();
    let (symbol, numbers) = match &parts[..] {
        [symbol, numbers @ ..] if (1..=3).contains(&numbers.len()) => (*symbol, numbers),
        _ => return Err("write SYMBOL:N[:COUNT[:CODE]]".into()),
    };
    let symbol = if symbol == "*" { None } else { Some(known(symbol, is_symbol)?) };
    let first = number(numbers[0])?;
    let count = numbers.get(1).map_or(Ok(1), |count| number(count))?;
    let code = numbers.get(2).map_or(Ok(999), |code| number(code))?;
    let code = i32::try_from(code).map_err(|error| error.to_string())?;
    if first == 0 || count == 0 || code == 0 {
        return Err("N, COUNT and CODE begin at 1".into());
    }
    Ok(Failure { symbol, first, count, code })
}

fn delay(item: &str, is_symbol: IsSymbol) -> Result<Delay, String> {
    let (symbol, micros) = item.split_once(':').ok_or("write SYMBOL:MICROSECONDS")?;
    Ok(Delay { symbol: known(symbol, is_symbol)?, by: Duration::from_micros(number(micros)?) })
}

fn known(symbol: &str, is_symbol: IsSymbol) -> Result<String, String> {
    if is_symbol(symbol) { Ok(symbol.to_owned()) } else { Err(format!("there is no symbol `{symbol}`")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::MemoryUse;

    fn is_symbol(name: &str) -> bool {
        ["cuMemCreate", "cuMemMap"].contains(&name)
    }

    #[test]
    fn valid_settings_are_parsed() {
        let page = rustix::param::page_size() as u64;
        assert_eq!(device("1GiB"), Ok(HostConfig::with_capacity(1 << 30)));
        let with =
            |capacity, granule_bytes| Ok(HostConfig::with_capacity(capacity).in_granules_of(granule_bytes));
        assert_eq!(device("1GiB/PAGE"), with(1 << 30, page));
        assert_eq!(device("8m/4m"), with(8 << 20, 4 << 20));
        let expected = Failure { symbol: None, first: 3, count: 1, code: 999 };
        assert_eq!(failure("*:3", is_symbol), Ok(expected));
        let expected = Failure { symbol: Some("cuMemMap".into()), first: 1, count: 2, code: 700 };
        assert_eq!(failure("cuMemMap:1:2:700", is_symbol), Ok(expected));
        let expected = Delay { symbol: "cuMemCreate".into(), by: Duration::from_millis(5) };
        assert_eq!(delay("cuMemCreate:5000", is_symbol), Ok(expected));
    }

    #[test]
    fn simulations_name_existing_devices() {
        let of = |items: &[&str]| {
            let settings: Result<Vec<Setting>, String> = items.iter().map(|item| setting(item)).collect();
            simulations(&settings?, 2)
        };
        let both = of(&["1:used=1GiB", "0:hami=4GiB", "1:hami=2GiB"]);
        let free = MemoryUse { capacity_bytes: 8 << 30, held_bytes: 0 };
        let limits: Result<Vec<u64>, String> =
            both.map(|both| both.iter().map(|simulation| simulation.available_bytes(free) >> 30).collect());
        assert_eq!(limits, Ok(vec![4, 1]));
        for items in [&["2:hami=1GiB"][..], &["0:hami=1", "0:hami=1"], &["0:x=1"]] {
            let reason = of(items).expect_err("malformed");
            assert!(reason.starts_with(SIMULATE), "{items:?}: {reason}");
        }
    }

    #[test]
    fn malformed_settings_are_refused() {
        for item in ["", "x", "1GiB/", "1GiB/page", "/2MiB"] {
            assert!(device(item).is_err(), "{item}");
        }
        for item in
            ["cuMemMap", "cuMemMap:0", "cuMemMap:x", "cuMemMop:1", "*:1:0", "*:1:1:0", "*:1:1:1:1", "*:-1"]
        {
            assert!(failure(item, is_symbol).is_err(), "{item}");
        }
        for item in ["cuMemMap", "cuMemMap:", "*:5", "cuMemMap:1.5"] {
            assert!(delay(item, is_symbol).is_err(), "{item}");
        }
    }
}
