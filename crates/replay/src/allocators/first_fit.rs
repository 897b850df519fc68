//! The first of many ranges by address that is long enough, found without a look at each of those before it.

/// Chunks of more ranges are halved.
const CHUNK_RANGES_MAX: usize = 128;

/// Ranges by where they begin, in chunks of which the longest range is known.
#[derive(Debug, Default)]
pub(super) struct FirstFit {
    /// By address. None is empty.
    chunks: Vec<Chunk>,
}

#[derive(Debug, Default)]
struct Chunk {
    /// Addresses and lengths.
    ranges: Vec<(u64, u64)>,
    longest: u64,
}

impl Chunk {
    fn of(ranges: Vec<(u64, u64)>) -> Self {
        let longest = ranges.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        Self { ranges, longest }
    }

    fn begins_at_or_below(&self, addr: u64) -> bool {
        self.ranges.first().is_some_and(|(first, _)| *first <= addr)
    }

    fn set(&mut self, addr: u64, bytes: u64) {
        let mut before = 0;
        match self.ranges.binary_search_by_key(&addr, |(addr, _)| *addr) {
            Ok(at) if bytes == 0 => (_, before) = self.ranges.remove(at),
            Ok(at) => before = std::mem::replace(&mut self.ranges[at].1, bytes),
            Err(_) if bytes == 0 => {}
            Err(at) => self.ranges.insert(at, (addr, bytes)),
        }
        if bytes >= self.longest {
            self.longest = bytes;
        } else if before == self.longest {
            *self = Self::of(std::mem::take(&mut self.ranges));
        }
    }
}

impl FirstFit {
    /// How long the range is that begins at an address; nothing if none does.
    pub(super) fn set(&mut self, addr: u64, bytes: u64) {
        if self.chunks.is_empty() {
            self.chunks.push(Chunk::default());
        }
        let at = self.chunks.partition_point(|chunk| chunk.begins_at_or_below(addr)).saturating_sub(1);
        let chunk = &mut self.chunks[at];
        chunk.set(addr, bytes);
        if chunk.ranges.is_empty() {
            self.chunks.remove(at);
        } else if chunk.ranges.len() > CHUNK_RANGES_MAX {
            let upper = chunk.ranges.split_off(CHUNK_RANGES_MAX / 2);
            *chunk = Chunk::of(std::mem::take(&mut chunk.ranges));
            self.chunks.insert(at + 1, Chunk::of(upper));
        }
    }

    /// Where the first range of so many bytes or more begins.
    pub(super) fn first(&self, bytes: u64) -> Option<u64> {
        let chunk = self.chunks.iter().find(|chunk| chunk.longest >= bytes)?;
        chunk.ranges.iter().find(|(_, length)| *length >= bytes).map(|(addr, _)| *addr)
    }
}

#[test]
fn the_first_one_that_is_long_enough_is_found() {
    let mut random = fastrand::Rng::with_seed(3);
    let (mut ranges, mut all) = (FirstFit::default(), std::collections::BTreeMap::new());
    let mut most_chunks = 0;
    for turn in 0..10_000_u64 {
        let addr = random.u64(0..2000);
        // More are removed than added at the end.
        let bytes = if random.u64(0..10_000) < turn { 0 } else { random.u64(1..1_000_000) };
        ranges.set(addr, bytes);
        if bytes == 0 {
            all.remove(&addr);
        } else {
            all.insert(addr, bytes);
        }
        let asked = random.u64(1..1_100_000);
        let first = all.iter().find(|(_, bytes)| **bytes >= asked).map(|(addr, _)| *addr);
        assert_eq!(ranges.first(asked), first, "{turn}: {asked}");
        most_chunks = most_chunks.max(ranges.chunks.len());
    }
    assert!(most_chunks > 5, "{most_chunks}");
    all.into_keys().for_each(|addr| ranges.set(addr, 0));
    assert!(ranges.first(0).is_none() && ranges.chunks.is_empty());
}
