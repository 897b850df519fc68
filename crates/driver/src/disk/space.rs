//! Which ranges of a file are in use. Pure.

use std::collections::BTreeMap;

/// First fit; the file grows at its end and shrinks there.
#[derive(Debug, Default)]
pub(super) struct Space {
    /// Free ranges below the end, by offset; never neighbours.
    free: BTreeMap<u64, u64>,
    end: u64,
    used_bytes: u64,
}

impl Space {
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Where the file ends.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The offset of `bytes` bytes that are now in use; `None` where a file cannot be as long.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        debug_assert!(bytes > 0, "ranges without bytes would share their offset with the next");
        let fit = self.free.iter().find(|(_, free)| **free >= bytes).map(|(at, free)| (*at, *free));
        let at = match fit {
            Some((at, free)) => {
                self.free.remove(&at);
                if free > bytes {
                    self.free.insert(at + bytes, free - bytes);
                }
                at
            }
            None => {
                let at = self.end;
                self.end = at.checked_add(bytes).filter(|end| i64::try_from(*end).is_ok())?;
                at
            }
        };
        self.used_bytes += bytes;
        Some(at)
    }

    pub(super) fn give_back(&mut self, at: u64, bytes: u64) {
        let (mut start, mut len) = (at, bytes);
        if let Some((before, free)) = self.free.range(..at).next_back().map(|(at, free)| (*at, *free))
            && before + free == at
        {
            self.free.remove(&before);
            (start, len) = (before, len + free);
        }
        if let Some(behind) = self.free.remove(&(at + bytes)) {
            len += behind;
        }
        if start + len == self.end {
            self.end = start;
        } else {
            self.free.insert(start, len);
        }
        self.used_bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_all_space_comes_back() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut space, mut used) = (Space::default(), Vec::<(u64, u64)>::new());
        for _ in 0..2_000 {
            if used.len() < 40 && random.bool() {
                let bytes = random.u64(1..20) * 4096;
                let at = space.take(bytes).unwrap();
                assert!(used.iter().all(|(other, len)| at + bytes <= *other || other + len <= at));
                used.push((at, bytes));
            } else if !used.is_empty() {
                let (at, bytes) = used.swap_remove(random.usize(..used.len()));
                space.give_back(at, bytes);
            }
            assert_eq!(space.used_bytes(), used.iter().map(|(_, bytes)| bytes).sum::<u64>());
            assert_eq!(space.end(), used.iter().map(|(at, bytes)| at + bytes).max().unwrap_or(0));
        }
        used.drain(..).for_each(|(at, bytes)| space.give_back(at, bytes));
        assert_eq!((space.end(), space.used_bytes()), (0, 0));
        assert_eq!(space.take(u64::MAX), None);
    }
}
