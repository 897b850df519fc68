//! Calls that fail or dawdle on purpose: by the environment, and armed by a test of the same process.
//!
//! A call that is made to fail does nothing at all. The counts are the process's.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use crate::abi::{Code, Outcome};
use crate::config::Config;

static CONFIG: OnceLock<Config> = OnceLock::new();
static COUNTS: Mutex<Option<Counts>> = Mutex::new(None);

static HELD: Mutex<Held> = Mutex::new(Held { symbol: None, waiting: 0 });
static LET_GO: Condvar = Condvar::new();

/// Calls that a test holds up.
#[derive(Debug)]
struct Held {
    symbol: Option<String>,
    waiting: u64,
}

/// Calls so far.
#[derive(Debug, Default)]
struct Counts {
    of_each: HashMap<&'static str, u64>,
    of_all: u64,
    armed: Option<Armed>,
    /// The calls since it was armed last, by name.
    seen: Vec<&'static str>,
}

#[derive(Debug)]
struct Armed {
    first: u64,
    count: u64,
}

/// The settings; read from the environment until that succeeds once.
pub(crate) fn config() -> Outcome<&'static Config> {
    if let Some(config) = CONFIG.get() {
        return Ok(config);
    }
    let config = Config::from_environment().map_err(|problem| {
        eprintln!("fake libcuda: {problem}");
        Code::INVALID_VALUE
    })?;
    Ok(CONFIG.get_or_init(|| config))
}

/// Counts a call and gives what is to happen to it. `counts` says whether the machine can make it fail.
pub(crate) fn consult(symbol: &'static str, counts: bool) -> Outcome {
    let verdict = count(symbol, counts);
    let delays = CONFIG.get().into_iter().flat_map(|config| &config.delays);
    delays.filter(|delay| delay.symbol == symbol).for_each(|delay| thread::sleep(delay.by));
    wait_while_held(symbol);
    verdict
}

fn wait_while_held(symbol: &str) {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    held.waiting += 1;
    while held.symbol.as_deref() == Some(symbol) {
        held = LET_GO.wait(held).unwrap_or_else(PoisonError::into_inner);
    }
    held.waiting -= 1;
}

/// From now on calls of this symbol wait, and none of another any more.
pub(crate) fn hold(symbol: Option<String>) {
    HELD.lock().unwrap_or_else(PoisonError::into_inner).symbol = symbol;
    LET_GO.notify_all();
}

/// How many calls wait.
pub(crate) fn held() -> u64 {
    HELD.lock().unwrap_or_else(PoisonError::into_inner).waiting
}

fn count(symbol: &'static str, counts: bool) -> Outcome {
    let config = CONFIG.get();
    let mut held = lock();
    let calls = held.get_or_insert_default();
    let of_this = *calls.of_each.entry(symbol).and_modify(|calls| *calls += 1).or_insert(1);
    if counts {
        calls.of_all += 1;
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
            Some(name) if name == symbol => of_this,
            None if counts => calls.of_all,
            _ => continue,
        };
        if number >= failure.first && number - failure.first < failure.count {
            return Err(Code(failure.code));
        }
    }
    Ok(())
}

/// From now on the calls number `first` to `first + count - 1`, counted from 0, fail.
pub(crate) fn arm(first: u64, count: u64) {
    let mut held = lock();
    let calls = held.get_or_insert_default();
    calls.armed = Some(Armed { first, count });
    calls.seen.clear();
}

/// Stops that, and gives how many calls there were.
pub(crate) fn disarm() -> u64 {
    let mut held = lock();
    let calls = held.get_or_insert_default();
    calls.armed.take().map_or(0, |_| calls.seen.len() as u64)
}

/// The name of a call that was counted since it was armed last.
pub(crate) fn called(number: u64) -> Option<&'static str> {
    lock().as_ref()?.seen.get(usize::try_from(number).ok()?).copied()
}

fn lock() -> MutexGuard<'static, Option<Counts>> {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}
