//! Work on a buffer by all cores, part by part.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// Far above what starting a thread costs; a multiple of what patterns begin at.
const PART_BYTES: usize = 4 << 20;

/// The smallest of what `act` finds; it gets each part's offset. Threads that cannot be started are done without.
pub(crate) fn first(bytes: &mut [u8], act: impl Fn(u64, &mut [u8]) -> Option<u64> + Sync) -> Option<u64> {
    let parts = Mutex::new((0..).step_by(PART_BYTES).zip(bytes.chunks_mut(PART_BYTES)));
    let count = lock(&parts).size_hint().0;
    let found = Mutex::new(None);
    let work = || {
        loop {
            let next = lock(&parts).next();
            let Some((offset, part)) = next else { return };
            if let Some(at) = act(offset, part) {
                let mut found = lock(&found);
                *found = Some(found.map_or(at, |other: u64| other.min(at)));
            }
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 1..cores.min(count) {
            if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A panic of one thread is one of the scope.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_visited_once_and_the_first_find_counts() {
        for bytes in [0, 1, PART_BYTES, 5 * PART_BYTES + 7] {
            let mut buffer = vec![0; bytes];
            let visited = |offset: u64, part: &mut [u8]| {
                assert!(offset.is_multiple_of(PART_BYTES as u64));
                part.iter_mut().for_each(|byte| *byte += 1);
                None
            };
            assert_eq!(first(&mut buffer, visited), None);
            assert!(buffer.iter().all(|byte| *byte == 1));
        }
        let mut buffer = vec![0; 5 * PART_BYTES];
        let wrong = [3 * PART_BYTES + 2, 2 * PART_BYTES + 9, 4 * PART_BYTES];
        wrong.iter().for_each(|at| buffer[*at] = 1);
        let found = first(&mut buffer, |offset, part| {
            part.iter().position(|byte| *byte == 1).map(|at| offset + at as u64)
        });
        assert_eq!(found, Some(2 * PART_BYTES as u64 + 9));
    }
}
