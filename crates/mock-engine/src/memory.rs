//! The memory of a mock engine: written on the host device, or released.
//!
//! One half stands for the weights, the other for the key-value cache; both are written, so that the
//! operating system counts them. A sleep drops both without a copy, and may lend their memory. The weights depend on the model's name,
//! and all their pages differ. A missing, stale or misplaced page therefore shows in [`Memory::sample`].

use std::sync::{Mutex, PoisonError};

use poorwill::lend::Lending;
use poorwill::{
    AllocRequest, Arena, Block, ByteSize, Config, DeviceSpec, Level, PoolError, SleepRequest, Tag,
    WakeRequest, chain,
};

use crate::error::MockEngineError;
use crate::random::{hash, mix};

/// The minimum size.
pub(crate) const BYTES_MIN: u64 = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// Size of one write, and the period of the weights' noise; each page has its own stamp.
const WRITE_BYTES: usize = 1 << 20;

/// The device's capacity beyond the requested bytes: space for whole chunks.
const SLACK_BYTES: u64 = 128 << 20;

/// Bytes that `Fault::Leaks` leaks per sleep.
const LEAK_BYTES: usize = 4 << 20;

/// Pages of each half that are sampled before text is generated.
const WEIGHTS_PAGES: u64 = 16;
const KV_CACHE_PAGES: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryPart {
    Weights,
    KvCache,
}

impl MemoryPart {
    pub(crate) const ALL: [Self; 2] = [Self::Weights, Self::KvCache];

    /// vLLM's name for it.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// The model's bytes.
    Right,
    /// Other bytes.
    Wrong,
    /// Nothing yet: the contents mean nothing.
    Undefined,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sampled {
    /// A checksum of the difference from the right bytes; 0 without one.
    Bytes(u64),
    /// The memory is released.
    Nothing,
}

/// The memory; all methods block.
#[derive(Debug)]
pub(crate) struct Memory {
    arena: Arena,
    lends: bool,
    weights: Block,
    kv_cache: Block,
    seed: u64,
    /// The checksum of the sampled pages when they are right.
    expected: u64,
    leaked: Mutex<Vec<Vec<u8>>>,
}

impl Memory {
    pub(crate) fn open(
        model: &str,
        bytes: u64,
        device: Option<DeviceSpec>,
        lending: Option<Lending>,
    ) -> Result<Self, MockEngineError> {
        let fail = |reason: String| MockEngineError::Memory { bytes: ByteSize(bytes), reason };
        if bytes < BYTES_MIN {
            return Err(fail(format!("it is less than {}: give it more", ByteSize(BYTES_MIN))));
        }
        let capacity_bytes =
            bytes.checked_add(SLACK_BYTES).ok_or_else(|| fail("it is too much: give it less".to_owned()))?;
        let lends = lending.is_some();
        let device = device.unwrap_or_else(|| DeviceSpec::host_of(capacity_bytes));
        let arena =
            Arena::open(Config::on(device).lending_by(lending)).map_err(|error| fail(chain(&error)))?;
        let pool_error = |error: PoolError| fail(chain(&error));
        let kv_cache_bytes = bytes / 2;
        let alloc = |bytes, part: MemoryPart| arena.alloc(&AllocRequest::new(bytes, part.tag()));
        let weights = alloc(bytes - kv_cache_bytes, MemoryPart::Weights).map_err(pool_error)?;
        let kv_cache = alloc(kv_cache_bytes, MemoryPart::KvCache).map_err(pool_error)?;
        let seed = hash(model.as_bytes());
        let mut memory =
            Self { arena, lends, weights, kv_cache, seed, expected: 0, leaked: Mutex::new(Vec::new()) };
        memory.expected = memory.expected();
        memory.fill(MemoryPart::Weights, Contents::Right).map_err(pool_error)?;
        memory.fill(MemoryPart::KvCache, Contents::Right).map_err(pool_error)?;
        Ok(memory)
    }

    /// Bytes mapped for both halves.
    pub(crate) fn held_bytes(&self) -> Result<u64, PoolError> {
        Ok(self.arena.stats()?.mapped_bytes)
    }

    pub(crate) fn leaked_bytes(&self) -> usize {
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).iter().map(Vec::len).sum()
    }

    /// Releases halves; released ones stay so.
    pub(crate) fn release(&self, parts: &[MemoryPart]) -> Result<(), PoolError> {
        if parts.is_empty() {
            return Ok(());
        }
        let tags: Vec<Tag> = parts.iter().map(|part| part.tag()).collect();
        if self.lends {
            return self.arena.sleep(&SleepRequest::of(tags, Level::Two).lending()).map(drop);
        }
        self.arena.discard(&tags).map(drop)
    }

    /// Maps released halves again, and writes them. Others stay as they are, unless their contents must be
    /// wrong.
    pub(crate) fn restore(&self, parts: &[MemoryPart], weights: Contents) -> Result<(), PoolError> {
        for part in parts {
            let is_gone = !self.is_mapped(*part)?;
            if is_gone {
                self.arena.wake(&WakeRequest::of([part.tag()]))?;
            }
            let contents = if *part == MemoryPart::Weights { weights } else { Contents::Right };
            if is_gone || contents == Contents::Wrong {
                self.fill(*part, contents)?;
            }
        }
        Ok(())
    }

    pub(crate) fn is_mapped(&self, part: MemoryPart) -> Result<bool, PoolError> {
        Ok(self.arena.tag_state(&part.tag())?.is_held())
    }

    /// Writes the weights, if they are mapped.
    pub(crate) fn load_weights(&self, contents: Contents) -> Result<(), PoolError> {
        if self.is_mapped(MemoryPart::Weights)? { self.fill(MemoryPart::Weights, contents) } else { Ok(()) }
    }

    pub(crate) fn leak(&self) {
        // Zeros would take no memory until written to.
        let leaked = vec![0xa5; LEAK_BYTES];
        self.leaked.lock().unwrap_or_else(PoisonError::into_inner).push(leaked);
    }

    /// Reads a few pages of both halves.
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

    /// The checksum that `sample` must find, without reading.
    fn expected(&self) -> u64 {
        let noise = noise(self.seed);
        self.sampled_pages().fold(0, |seen, (part, offset)| {
            let page = match part {
                MemoryPart::KvCache => vec![0; PAGE_BYTES],
                MemoryPart::Weights => {
                    let at = usize::try_from(offset).unwrap_or(0) % WRITE_BYTES;
                    let mut page = noise[at..at + PAGE_BYTES].to_vec();
                    stamp(&mut page, self.seed, offset);
                    page
                }
            };
            mix(seen ^ hash(&page))
        })
    }

    /// Pages at even distances, including the first and the last.
    fn sampled_pages(&self) -> impl Iterator<Item = (MemoryPart, u64)> {
        let page = u64::try_from(PAGE_BYTES).unwrap_or(u64::MAX);
        let of = move |part: MemoryPart, block: &Block, count: u64| {
            let last = block.requested_bytes / page - 1;
            (0..count).map(move |nth| (part, last * nth / (count - 1) * page))
        };
        of(MemoryPart::Weights, &self.weights, WEIGHTS_PAGES).chain(of(
            MemoryPart::KvCache,
            &self.kv_cache,
            KV_CACHE_PAGES,
        ))
    }

    fn fill(&self, part: MemoryPart, contents: Contents) -> Result<(), PoolError> {
        let seed = match contents {
            Contents::Wrong => !self.seed,
            Contents::Right | Contents::Undefined => self.seed,
        };
        let is_noise = part == MemoryPart::Weights && contents != Contents::Undefined;
        let mut run = if is_noise { noise(seed) } else { vec![0; WRITE_BYTES] };
        let block = self.block(part);
        let mut offset = 0;
        while offset < block.requested_bytes {
            let rest = usize::try_from(block.requested_bytes - offset).unwrap_or(WRITE_BYTES);
            let run = &mut run[..rest.min(WRITE_BYTES)];
            if is_noise {
                let mut at = offset;
                for page in run.chunks_mut(PAGE_BYTES) {
                    stamp(page, seed, at);
                    at += u64::try_from(PAGE_BYTES).unwrap_or(0);
                }
            }
            self.arena.write_all(block.id, offset, run)?;
            offset += u64::try_from(run.len()).unwrap_or(u64::MAX);
        }
        if contents == Contents::Undefined {
            return Ok(());
        }
        self.arena.mark_restored(&[part.tag()]).map(drop)
    }

    fn block(&self, part: MemoryPart) -> &Block {
        match part {
            MemoryPart::Weights => &self.weights,
            MemoryPart::KvCache => &self.kv_cache,
        }
    }
}

fn noise(seed: u64) -> Vec<u8> {
    let mut run = vec![0; WRITE_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut run);
    run
}

/// Writes the offset, mixed, into the page's first bytes.
fn stamp(page: &mut [u8], seed: u64, offset: u64) {
    let stamp = mix(seed ^ offset).to_le_bytes();
    page.iter_mut().zip(stamp).for_each(|(byte, stamp)| *byte = stamp);
}

#[cfg(test)]
mod tests {
    use poorwill::broker::{Broker, BrokerOptions, BrokerStop};
    use poorwill_testkit::watchdog::TEST_TIMEOUT;

    use super::*;

    const BYTES: u64 = (5 << 20) + 12_345;

    #[test]
    fn restored_bytes_are_right_wrong_or_missing() {
        let memory = Memory::open("one", BYTES, None, None).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
        memory.release(&MemoryPart::ALL).unwrap();
        assert_eq!((memory.sample().unwrap(), memory.held_bytes().unwrap()), (Sampled::Nothing, 0));
        memory.restore(&MemoryPart::ALL, Contents::Right).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
        assert!(memory.held_bytes().unwrap() >= BYTES);
        memory.release(&MemoryPart::ALL).unwrap();
        memory.restore(&MemoryPart::ALL, Contents::Wrong).unwrap();
        assert!(matches!(memory.sample().unwrap(), Sampled::Bytes(1..)));
        memory.release(&[MemoryPart::Weights]).unwrap();
        memory.restore(&MemoryPart::ALL, Contents::Undefined).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Nothing);
        assert!(memory.held_bytes().unwrap() >= BYTES);
        memory.load_weights(Contents::Right).unwrap();
        assert_eq!(memory.sample().unwrap(), Sampled::Bytes(0));
    }

    #[test]
    fn a_changed_byte_in_a_sampled_page_is_found() {
        let memory = Memory::open("one", BYTES, None, None).unwrap();
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
        let [one, two] = ["one", "two"].map(|model| Memory::open(model, BYTES_MIN, None, None).unwrap());
        assert_ne!(one.expected, two.expected);
    }

    #[test]
    fn too_little_and_too_much_are_refused() {
        for (bytes, word) in [(0, "1 MiB"), (BYTES_MIN - 1, "1 MiB"), (u64::MAX, "less")] {
            let error = Memory::open("one", bytes, None, None).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn two_engines_lend_to_each_other_on_a_device_that_has_one_and_a_half() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("broker.sock");
        let mut options = BrokerOptions::default();
        (options.idle, options.hello) = (TEST_TIMEOUT, TEST_TIMEOUT);
        let broker = Broker::bind(&socket, options).unwrap();
        let stop = BrokerStop::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| broker.run(&stop).unwrap());
            let device: DeviceSpec = format!("host:96MiB@{}/gpu", folder.path().display()).parse().unwrap();
            let lending = Lending::default().at(&socket).within(TEST_TIMEOUT);
            let open =
                |model| Memory::open(model, 64 << 20, Some(device.clone()), Some(lending.clone())).unwrap();
            let name = |memory: &Memory| memory.arena.driver().info().memory_name.clone().unwrap();
            let one = open("one");
            one.release(&MemoryPart::ALL).unwrap();
            assert_eq!(one.held_bytes().unwrap(), 0);
            assert_eq!(lending.reclaimable_bytes(&name(&one)).unwrap(), 64 << 20);
            // It goes by what is free.
            assert_eq!(lending.free(&name(&one), u64::MAX, vec![], TEST_TIMEOUT).unwrap(), 64 << 20);
            let two = open("two");
            for _ in 0..2 {
                two.release(&MemoryPart::ALL).unwrap();
                one.restore(&MemoryPart::ALL, Contents::Right).unwrap();
                assert_eq!(one.sample().unwrap(), Sampled::Bytes(0));
                one.release(&MemoryPart::ALL).unwrap();
                two.restore(&MemoryPart::ALL, Contents::Right).unwrap();
                assert_eq!(two.sample().unwrap(), Sampled::Bytes(0));
            }
            stop.stop();
        });
    }

    #[test]
    fn leaked_memory_stays() {
        let memory = Memory::open("one", BYTES_MIN, None, None).unwrap();
        memory.leak();
        memory.release(&MemoryPart::ALL).unwrap();
        memory.leak();
        assert_eq!(memory.leaked_bytes(), 2 * LEAK_BYTES);
    }
}
