//! Injected failures and delays, from the environment and from tests in the process.
//!
//! A failing call does nothing. All counts are per process.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use crate::abi::{CallResult, Code};
use crate::config::{Config, IsSymbol};

static CONFIG: OnceLock<Config> = OnceLock::new();
static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

static HOLD: Mutex<Hold> = Mutex::new(Hold { symbol: None, waiting: 0 });
static RESUMED: Condvar = Condvar::new();

#[derive(Debug)]
struct Hold {
    symbol: Option<String>,
    waiting: u64,
}

#[derive(Debug, Default)]
struct Counts {
    by_symbol: HashMap<&'static str, u64>,
    total: u64,
    armed: Option<Armed>,
    /// Names of the calls since it was armed last.
    seen: Vec<&'static str>,
}

#[derive(Debug)]
struct Armed {
    first: u64,
    count: u64,
}

/// The settings, after they were read.
pub(crate) fn config() -> CallResult<&'static Config> {
    CONFIG.get().ok_or(Code::NOT_INITIALIZED)
}

/// Reads the settings from the environment, until that succeeds.
pub(crate) fn read_config(is_symbol: IsSymbol) -> CallResult {
    if CONFIG.get().is_some() {
        return Ok(());
    }
    let config = Config::from_environment(is_symbol).map_err(|problem| {
        eprintln!("fake libcuda: {problem}");
        Code::INVALID_VALUE
    })?;
    CONFIG.get_or_init(|| config);
    Ok(())
}

/// Counts a call, and fails, delays or blocks it. `is_counted` says whether a machine can make it fail.
pub(crate) fn on_call(symbol: &'static str, is_counted: bool) -> CallResult {
    let outcome = count(symbol, is_counted);
    let delays = CONFIG.get().into_iter().flat_map(|config| &config.delays);
    delays.filter(|delay| delay.symbol == symbol).for_each(|delay| thread::sleep(delay.by));
    wait_while_held(symbol);
    outcome
}

fn wait_while_held(symbol: &str) {
    let mut hold = HOLD.lock().unwrap_or_else(PoisonError::into_inner);
    hold.waiting += 1;
    while hold.symbol.as_deref() == Some(symbol) {
        hold = RESUMED.wait(hold).unwrap_or_else(PoisonError::into_inner);
    }
    hold.waiting -= 1;
}

/// Blocks calls of this symbol, and no other.
pub(crate) fn hold(symbol: Option<String>) {
    HOLD.lock().unwrap_or_else(PoisonError::into_inner).symbol = symbol;
    RESUMED.notify_all();
}

pub(crate) fn held() -> u64 {
    HOLD.lock().unwrap_or_else(PoisonError::into_inner).waiting
}

fn count(symbol: &'static str, is_counted: bool) -> CallResult {
    let config = CONFIG.get();
    let mut counts = lock();
    let calls = counts.get_or_insert_default();
    let of_symbol = *calls.by_symbol.entry(symbol).and_modify(|calls| *calls += 1).or_insert(1);
    if is_counted {
        calls.total += 1;
        if let Some(armed) = &calls.armed {
            let number = calls.seen.len() as u64;
            calls.seen.push(symbol);
            if number >= armed.first && number - armed.first < armed.count {
                return Err(Code::UNKNOWN);
            }
        }
    }
    for failure in config.iter().flat_map(|config| &config.failures) {
        let number = match &failure.symbol {
            Some(name) if name == symbol => of_symbol,
            None if is_counted => calls.total,
            _ => continue,
        };
        if number >= failure.first && number - failure.first < failure.count {
            return Err(Code(failure.code));
        }
    }
    Ok(())
}

/// Fails the calls `first` to `first + count - 1`, counted from 0.
pub(crate) fn arm(first: u64, count: u64) {
    let mut counts = lock();
    let calls = counts.get_or_insert_default();
    calls.armed = Some(Armed { first, count });
    calls.seen.clear();
}

/// Returns how many calls there were.
pub(crate) fn disarm() -> u64 {
    let mut counts = lock();
    let calls = counts.get_or_insert_default();
    calls.armed.take().map_or(0, |_| calls.seen.len() as u64)
}

pub(crate) fn called(number: u64) -> Option<&'static str> {
    lock().as_ref()?.seen.get(usize::try_from(number).ok()?).copied()
}

fn lock() -> MutexGuard<'static, Option<Counts>> {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}
