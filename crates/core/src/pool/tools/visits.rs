//! Counts how often tags, segments and blocks are visited, for tests of how work grows. Elsewhere it does nothing.

#[cfg(test)]
thread_local! {
    static COUNT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// One more was visited.
#[inline]
pub(in crate::pool) fn count() {
    #[cfg(test)]
    COUNT.with(|count| count.set(count.get() + 1));
}

/// How many this thread visits in `work`.
#[cfg(test)]
pub(in crate::pool) fn of<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = COUNT.get();
    let done = work();
    (COUNT.get() - before, done)
}
