//! What a mock engine holds: memory of the host device that is there, written, and gone.
//!
//! One half stands for the weights, the other for the key-value cache. Both are touched, so that the operating system
//! counts them as this process's, and both are dropped by a sleep, without a copy. What the weights are follows from
//! the model's name: each page is unlike every other, so that one that is missing, stale or in another's place shows
//! in [`Memory::sample`].

use std::sync::{Mutex, PoisonError};

use poorwill::{
    AllocRequest, Arena, Block, ByteSize, Config, DeviceSpec, PoolError, Tag, WakeRequest, chain,
};

use crate::MockEngineError;
use crate::chance::{hash, mix};

/// Least that one can hold.
pub(crate) const BYTES_MIN: u64 = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// How much is written at a time, and how long the weights' noise is before it comes again with other numbers in it.
const PIECE_BYTES: usize = 1 << 20;

/// What the device has beside what is asked of it: room for whole pieces of the pool.
const SLACK_BYTES: u64 = 128 << 20;

/// What each sleep of one that leaks leaves.
const LEAK_BYTES: usize = 4 << 20;

/// How many pages of each half are looked at before text comes from them.
const WEIGHTS_PAGES: u64 = 16;
const KV_CACHE_PAGES: u64 = 4;

/// A half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Weights,
    KvCache,
}

impl Part {
    pub(crate) const ALL: [Self; 2] = [Self::Weights, Self::KvCache];

    /// vLLM's name of it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::KvCache => "kv_cache",
        }
    }

    fn tag(self) -> Tag {
        match self {
            Self::Weights => Tag::weights(),
            Self::KvCache => Tag::kv_cache(),
        }
    }
}

/// What is written to the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// What the model has.
    Right,
    /// Something else.
    Wrong,
    /// Nothing yet: the memory is taken, and what is in it means nothing.
    Undefined,
}

/// What looking at the memory gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sampled {
    /// How far the bytes are from what they are to be; 0 for not at all.
    Bytes(u64),
    /// There are none.
    Nothing,
}

/// The memory. All of its methods block.
#[derive(Debug)]
pub(crate) struct Memory {
    arena: Arena,
    weights: Block,
    kv_cache: Block,
    seed: u64,
    /// What the pages that are looked at come to where their bytes are right.
    expected: u64,
    leaked: Mutex<Vec<Vec<u8>>>,
}

impl Memory {
    /// Takes `bytes`, and writes them.
    pub(crate) fn open(model: &str, bytes: u64) -> Result<Self, MockEngineError> {
        let fail = |reason: String| MockEngineError::Memory { bytes: ByteSize(bytes), reason };
        if bytes < BYTES_MIN {
            return Err(fail(format!("it is less than {}: give it more", ByteSize(BYTES_MIN))));
        }
        let capacity_bytes =
            bytes.checked_add(SLACK_BYTES).ok_or_else(|| fail("it is too much: give it less".to_owned()))?;
        let arena = Arena::open(Config::on(DeviceSpec::Host { capacity_bytes }))
            .map_err(|error| fail(chain(&error)))?;
        let of_pool = |error: PoolError| fail(chain(&error));
        let kv_cache_bytes = bytes / 2;
        let alloc = |bytes, part: Part| arena.alloc(&AllocRequest::new(bytes, part.tag()));
        let weights = alloc(bytes - kv_cache_bytes, Part::Weights).map_err(of_pool)?;
        let kv_cache = alloc(kv_cache_bytes, Part::KvCache).map_err(of_pool)?;
        let seed = hash(model.as_bytes());
        let mut memory = Self { arena, weights, kv_cache, seed, expected: 0, leaked: Mutex::new(Vec::new()) };
        memory.expected = memory.expected();
        memory.fill(Part::Weights, Contents::Right).map_err(of_pool)?;
        memory.fill(Part::KvCache, Contents::Right).map_err(of_pool)?;
        Ok(memory)
    }

    /// What is mapped for the two halves now, in bytes.
    pub(crate) fn held_bytes(&self) -> Result<u64, PoolError> {
        Ok(self.arena.stats()?.mapped_bytes)
    }

    /// What was leaked, in bytes.
    pub(crate) fn leaked_bytes(&self) -> usize {
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).iter().map(Vec::len).sum()
    }

    /// Gives halves back to the system. What is gone stays gone.
    pub(crate) fn release(&self, parts: &[Part]) -> Result<(), PoolError> {
        if parts.is_empty() {
            return Ok(());
        }
        let tags: Vec<Tag> = parts.iter().map(|part| part.tag()).collect();
        self.arena.discard(&tags).map(drop)
    }

    /// Takes memory for halves again, and writes it. A half that was never given back stays as it is, unless it is to be
    /// wrong.
    pub(crate) fn bring_back(&self, parts: &[Part], weights: Contents) -> Result<(), PoolError> {
        for part in parts {
            let is_gone = !self.has(*part)?;
            if is_gone {
                self.arena.wake(&WakeRequest::of([part.tag()]))?;
            }
            let contents = if *part == Part::Weights { weights } else { Contents::Right };
            if is_gone || contents == Contents::Wrong {
                self.fill(*part, contents)?;
            }
        }
        Ok(())
    }

    /// Whether a half has memory.
    pub(crate) fn has(&self, part: Part) -> Result<bool, PoolError> {
        Ok(self.arena.tag_state(&part.tag())?.is_held())
    }

    /// Writes the weights, where they have memory.
    pub(crate) fn load_weights(&self, contents: Contents) -> Result<(), PoolError> {
        if self.has(Part::Weights)? { self.fill(Part::Weights, contents) } else { Ok(()) }
    }

    /// Takes a little that nobody gives back.
    pub(crate) fn leak(&self) {
        // Not zeros: those would take nothing until somebody wrote to them.
        let leaked = vec![0xa5; LEAK_BYTES];
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).push(leaked);
    }

    /// Looks at a few pages of both halves.
    pub(crate) fn sample(&self) -> Result<Sampled, PoolError> {
        let mut seen = 0;
        for (part, offset) in self.sampled_pages() {
            let page = u64::try_from(PAGE_BYTES).unwrap_or(u64::MAX);
            let bytes = match self.arena.read_vec(self.block(part).id, offset, page) {
                Ok(bytes) => bytes,
                Err(PoolError::Asleep { .. } | PoolError::Undefined { .. }) => return Ok(Sampled::Nothing),
                Err(error) => return Err(error),
            };
            seen = mix(seen ^ hash(&bytes));
        }
        Ok(Sampled::Bytes(seen ^ self.expected))
    }

    /// The same for what is to be there, without looking.
    fn expected(&self) -> u64 {
        let noise = noise(self.seed);
        self.sampled_pages().fold(0, |seen, (part, offset)| {
            let page = match part {
                Part::KvCache => vec![0; PAGE_BYTES],
                Part::Weights => {
                    let at = usize::try_from(offset).unwrap_or(0) % PIECE_BYTES;
                    let mut page = noise[at..at + PAGE_BYTES].to_vec();
                    stamp(&mut page, self.seed, offset);
                    page
                }
            };
            mix(seen ^ hash(&page))
        })
    }

    /// Pages at even distances, the first and the last among them.
    fn sampled_pages(&self) -> impl Iterator<Item = (Part, u64)> {
        let page = u64::try_from(PAGE_BYTES).unwrap_or(u64::MAX);
        let of = move |part: Part, block: &Block, count: u64| {
            let last = block.requested_bytes / page - 1;
            (0..count).map(move |nth| (part, last * nth / (count - 1) * page))
        };
        of(Part::Weights, &self.weights, WEIGHTS_PAGES).chain(of(
            Part::KvCache,
            &self.kv_cache,
            KV_CACHE_PAGES,
        ))
    }

    fn fill(&self, part: Part, contents: Contents) -> Result<(), PoolError> {
        let seed = match contents {
            Contents::Wrong => !self.seed,
            Contents::Right | Contents::Undefined => self.seed,
        };
        let is_noise = part == Part::Weights && contents != Contents::Undefined;
        let mut piece = if is_noise { noise(seed) } else { vec![0; PIECE_BYTES] };
        let block = self.block(part);
        let mut offset = 0;
        while offset < block.requested_bytes {
            let rest = usize::try_from(block.requested_bytes - offset).unwrap_or(PIECE_BYTES);
            let piece = &mut piece[..rest.min(PIECE_BYTES)];
            if is_noise {
                let mut at = offset;
                for page in piece.chunks_mut(PAGE_BYTES) {
                    stamp(page, seed, at);
                    at += u64::try_from(PAGE_BYTES).unwrap_or(0);
                }
            }
            self.arena.write_all(block.id, offset, piece)?;
            offset += u64::try_from(piece.len()).unwrap_or(u64::MAX);
        }
        if contents == Contents::Undefined {
            return Ok(());
        }
        self.arena.mark_restored(&[part.tag()]).map(drop)
    }

    fn block(&self, part: Part) -> &Block {
        match part {
            Part::Weights => &self.weights,
            Part::KvCache => &self.kv_cache,
        }
    }
}

/// A piece of noise.
fn noise(seed: u64) -> Vec<u8> {
    let mut piece = vec![0; PIECE_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut piece);
    piece
}

/// Writes to the beginning of a page where it belongs.
fn stamp(page: &mut [u8], seed: u64, offset: u64) {
    let stamp = mix(seed ^ offset).to_le_bytes();
    page.iter_mut().zip(stamp).for_each(|(byte, stamp)| *byte = stamp);
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = (5 << 20) + 12_345;

    #[test]
    fn what_comes_back_is_right_wrong_or_nothing() {
        let memory = Memory::open("one", BYTES).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
        memory.release(&Part::ALL).unwrap();
        assert_eq!((memory.sample().unwrap(), memory.held_bytes().unwrap()), (Sampled::Nothing, 0));
        memory.bring_back(&Part::ALL, Contents::Right).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
        assert!(memory.held_bytes().unwrap() >= BYTES);
        memory.release(&Part::ALL).unwrap();
        memory.bring_back(&Part::ALL, Contents::Wrong).unwrap();
        assert!(matches!(memory.sample().unwrap(), Sampled::Bytes(1..)));
        memory.release(&[Part::Weights]).unwrap();
        memory.bring_back(&Part::ALL, Contents::Undefined).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Nothing);
        assert!(memory.held_bytes().unwrap() >= BYTES);
        memory.load_weights(Contents::Right).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
    }

    #[test]
    fn a_byte_in_a_page_that_is_looked_at_shows() {
        let memory = Memory::open("one", BYTES).unwrap();
        for (part, offset) in memory.sampled_pages().collect::<Vec<_>>() {
            let block = memory.block(part).id;
            let before = memory.arena.read_vec(block, offset + 100, 1).unwrap();
            memory.arena.write_all(block, offset + 100, &[!before[0]]).unwrap();
            assert!(matches!(memory.sample().unwrap(), Sampled::Bytes(1..)), "{part:?} {offset}");
            memory.arena.write_all(block, offset + 100, &before).unwrap();
        }
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
    }

    #[test]
    fn models_differ() {
        let [one, two] = ["one", "two"].map(|model| Memory::open(model, BYTES_MIN).unwrap());
        assert_ne!(one.expected, two.expected);
    }

    #[test]
    fn too_little_and_too_much_are_refused() {
        for (bytes, word) in [(0, "1 MiB"), (BYTES_MIN - 1, "1 MiB"), (u64::MAX, "less")] {
            let error = Memory::open("one", bytes).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn what_is_leaked_stays() {
        let memory = Memory::open("one", BYTES_MIN).unwrap();
        memory.leak();
        memory.release(&Part::ALL).unwrap();
        memory.leak();
        assert_eq!(memory.leaked_bytes(), 2 * LEAK_BYTES);
    }
}
