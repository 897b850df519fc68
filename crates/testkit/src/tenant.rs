//! Whoever lives in a pool: blocks whose bytes are known, and small changes of them.

use std::sync::Arc;

use fastrand::Rng;
use poorwill_core::{AllocRequest, Block, HostBuffer, Pool, StreamId, Tag};

use crate::pattern;

/// A live block and what it must read as.
#[derive(Debug)]
pub struct Known {
    /// The block.
    pub block: Block,
    /// Its tag.
    pub tag: Tag,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The blocks of a pool, and a source of chance.
#[derive(Debug)]
pub struct Tenant {
    /// Where they are.
    pub pool: Arc<Pool>,
    /// The blocks.
    pub blocks: Vec<Known>,
    random: Rng,
}

impl Tenant {
    /// Nobody yet, whose chance begins with `seed`.
    #[must_use]
    pub fn new(pool: &Arc<Pool>, seed: u64) -> Self {
        Self { pool: Arc::clone(pool), blocks: Vec::new(), random: Rng::with_seed(seed) }
    }

    /// A number below `below`.
    pub fn random(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// Bytes of a granule.
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.pool.driver().info().granule_bytes
    }

    /// A new block of so many bytes, filled with bytes of its own. Large ones begin where a granule does.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn load(&mut self, bytes: u64, tag: &Tag) -> usize {
        self.load_on(bytes, tag, StreamId::DEFAULT)
    }

    /// The same for work on `stream`.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn load_on(&mut self, bytes: u64, tag: &Tag, stream: StreamId) -> usize {
        let align = if bytes >= self.granule() { self.granule() } else { 512 };
        let is_freed_whole = self.random(2) == 0;
        let mut request = AllocRequest::new(bytes, tag.clone()).on(stream).aligned_to(align);
        request.is_freed_whole = is_freed_whole;
        let block = self.pool.alloc(&request).unwrap();
        let seed = self.random(u64::MAX);
        let bytes = pattern::bytes(seed, usize::try_from(bytes).unwrap());
        self.blocks.push(Known { block, tag: tag.clone(), bytes });
        self.write(self.blocks.len() - 1);
        self.blocks.len() - 1
    }

    /// Writes a block as it is known.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn write(&self, nth: usize) {
        let Known { block, bytes, .. } = &self.blocks[nth];
        let src = Arc::new(HostBuffer::from(bytes.clone()));
        let len = bytes.len() as u64;
        self.pool.write(StreamId::DEFAULT, block.id, 0, src, 0, len).unwrap().wait().unwrap();
    }

    /// Changes one byte at `offset`.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn touch(&mut self, nth: usize, offset: u64) {
        let known = &mut self.blocks[nth];
        let byte = &mut known.bytes[usize::try_from(offset).unwrap()];
        *byte = !*byte;
        let src = Arc::new(HostBuffer::from(vec![*byte]));
        self.pool.write(StreamId::DEFAULT, known.block.id, offset, src, 0, 1).unwrap().wait().unwrap();
    }

    /// Changes a byte anywhere in granule `granule` of a block.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn touch_granule(&mut self, nth: usize, granule: u64) {
        let granule_bytes = self.granule();
        let within = self.random(granule_bytes.min(self.blocks[nth].bytes.len() as u64));
        self.touch(nth, granule * granule_bytes + within);
    }

    /// Gives a block back.
    ///
    /// # Panics
    /// When the pool refuses.
    pub fn free(&mut self, nth: usize) {
        let known = self.blocks.swap_remove(nth);
        self.pool.free(known.block.id).unwrap();
    }

    /// Every byte is what it must be, and every block where it was.
    ///
    /// # Panics
    /// When one is not.
    pub fn verify(&self) {
        for (nth, Known { block, tag, bytes }) in self.blocks.iter().enumerate() {
            assert_eq!(self.pool.block(block.id).unwrap(), *block, "block {nth} has moved");
            let read = pattern::read(&self.pool, block.id, bytes.len()).unwrap();
            // Whole blocks are compared faster than bytes are looked for.
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
