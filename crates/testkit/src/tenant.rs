//! Blocks with known bytes, and small changes to them.

use std::sync::Arc;

use fastrand::Rng;
use poorwill_core::{AllocRequest, Block, HostBuffer, Pool, StreamId, Tag};

use crate::pattern;
use crate::storing::Storing;

/// A live block with known bytes.
#[derive(Debug)]
pub struct Known {
    /// The block.
    pub block: Block,
    /// Its tag.
    pub tag: Tag,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The known blocks of a pool.
#[derive(Debug)]
pub struct Tenant {
    /// Their pool.
    pub pool: Arc<Pool>,
    /// The blocks.
    pub blocks: Vec<Known>,
    random: Rng,
    storing: Storing,
}

impl Tenant {
    /// No blocks yet; `seed` is that of the random generator.
    #[must_use]
    pub fn new(pool: &Arc<Pool>, seed: u64) -> Self {
        Self {
            pool: Arc::clone(pool),
            blocks: Vec::new(),
            random: Rng::with_seed(seed),
            storing: Storing::Raw,
        }
    }

    /// Sets which bytes new blocks have.
    #[must_use]
    pub fn storing(mut self, storing: Storing) -> Self {
        self.storing = storing;
        self
    }

    /// A random number less than `below`.
    pub fn random(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// Bytes of a granule.
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.pool.driver().info().granule_bytes
    }

    /// Allocates a block and fills it with random bytes. Blocks of a granule or more are aligned to granules.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn load(&mut self, bytes: u64, tag: &Tag) -> usize {
        self.load_on(bytes, tag, StreamId::DEFAULT)
    }

    /// As [`Tenant::load`], on `stream`.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn load_on(&mut self, bytes: u64, tag: &Tag, stream: StreamId) -> usize {
        let align = if bytes >= self.granule() { self.granule() } else { 512 };
        let is_freed_in_parts = self.random(2) == 0;
        let mut request = AllocRequest::new(bytes, tag.clone()).on(stream).aligned_to(align);
        request.is_freed_in_parts = is_freed_in_parts;
        let block = self.pool.alloc(&request).unwrap();
        let seed = self.random(u64::MAX);
        let bytes = self.storing.bytes(seed, usize::try_from(bytes).unwrap());
        self.blocks.push(Known { block, tag: tag.clone(), bytes });
        self.write(self.blocks.len() - 1);
        self.blocks.len() - 1
    }

    /// Writes the known bytes of a block.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn write(&self, nth: usize) {
        let Known { block, bytes, .. } = &self.blocks[nth];
        let src = Arc::new(HostBuffer::from(bytes.clone()));
        let len = bytes.len() as u64;
        self.pool.write(StreamId::DEFAULT, block.id, 0, src, 0, len).unwrap().wait().unwrap();
    }

    /// Changes one byte.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn touch(&mut self, nth: usize, offset: u64) {
        let known = &mut self.blocks[nth];
        let byte = &mut known.bytes[usize::try_from(offset).unwrap()];
        *byte = self.storing.changed(*byte);
        let src = Arc::new(HostBuffer::from(vec![*byte]));
        self.pool.write(StreamId::DEFAULT, known.block.id, offset, src, 0, 1).unwrap().wait().unwrap();
    }

    /// Changes a random byte of a granule.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn touch_granule(&mut self, nth: usize, granule: u64) {
        let granule_bytes = self.granule();
        let within = self.random(granule_bytes.min(self.blocks[nth].bytes.len() as u64));
        self.touch(nth, granule * granule_bytes + within);
    }

    /// Frees a block.
    ///
    /// # Panics
    /// If the pool refuses.
    pub fn free(&mut self, nth: usize) {
        let known = self.blocks.swap_remove(nth);
        self.pool.free(known.block.id).unwrap();
    }

    /// Checks every byte and every address.
    ///
    /// # Panics
    /// If one differs.
    pub fn verify(&self) {
        for (nth, Known { block, tag, bytes }) in self.blocks.iter().enumerate() {
            assert_eq!(self.pool.block(block.id).unwrap(), *block, "block {nth} has moved");
            let read = pattern::read(&self.pool, block.id, bytes.len()).unwrap();
            // Comparing whole blocks is faster than searching for the byte.
            if read != *bytes {
                let wrong = read.iter().zip(bytes).position(|(read, known)| read != known);
                panic!("first wrong byte of block {nth} of `{tag}` at {}: {wrong:?}", block.range);
            }
        }
    }

    /// Bytes of the granules that blocks of a tag touch.
    #[must_use]
    pub fn touched_bytes(&self, tag: &Tag) -> u64 {
        let granule = self.granule();
        let of_tag = self.blocks.iter().filter(|known| known.tag == *tag);
        let granules = of_tag.flat_map(|known| {
            let range = known.block.range;
            range.addr / granule..range.end().div_ceil(granule)
        });
        granules.collect::<std::collections::BTreeSet<u64>>().len() as u64 * granule
    }
}
