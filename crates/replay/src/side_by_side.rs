//! The same for several setups, side by side.
//!
//! Promise: no more threads than processors. Poorwill's own pool takes as long as the others together, so it begins first.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{iter, thread};

use crate::allocators::{AllocatorKind, Setup};
use crate::card::Card;
use crate::replay::{ReplayError, Run, replay};
use crate::trace::Trace;

/// Memory is a multiple of it.
const THREADS_MAX: usize = 4;

/// As [`replay`](fn@replay) for each setup, in their order.
///
/// # Errors
/// The first one of theirs.
pub fn replay_each(trace: &Trace, setups: &[Setup], card: Card) -> Result<Vec<Run>, ReplayError> {
    side_by_side(setups, |setup| setup, |setup| replay(trace, setup, card))
}

/// What `of` makes of each item, in their order.
pub(crate) fn side_by_side<I: Sync, T: Send>(
    items: &[I],
    setup_of: impl Fn(&I) -> &Setup,
    of: impl Fn(&I) -> Result<T, ReplayError> + Sync,
) -> Result<Vec<T>, ReplayError> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(items.len());
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|at| setup_of(&items[*at]).kind() != AllocatorKind::Poorwill);
    let next = AtomicUsize::new(0);
    let some = || {
        let mine = iter::from_fn(|| order.get(next.fetch_add(1, Ordering::Relaxed)).copied());
        mine.map(|at| (at, of(&items[at]))).collect::<Vec<_>>()
    };
    let mut made: Vec<(usize, Result<T, ReplayError>)> = thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        let ended =
            started.into_iter().flat_map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.collect()
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}

#[test]
fn each_is_made_once_and_in_its_order() {
    let setups: Vec<Setup> = ["pytorch", "poorwill", "cumem", "pytorch", "torch_memory_saver", "cumem"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    let made = side_by_side(&setups, |setup| setup, |setup| Ok(setup.to_string())).unwrap();
    assert_eq!(made, setups.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(side_by_side(&setups[..0], |setup| setup, |_| Ok(())).unwrap(), []);
}
