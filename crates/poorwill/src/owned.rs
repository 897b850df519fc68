//! A block that frees itself.
//!
//! An [`OwnedBlock`] frees its block when it is dropped, however that comes about (an early return, a panic), and keeps the
//! arena until then, so that the memory does not go before it. [`OwnedBlock::free`] and [`OwnedBlock::into_block`] take
//! it by value: afterwards nobody frees the block a second time.

use std::fmt;
use std::ops::Deref;

use poorwill_core::{Block, PoolError};

use crate::arena::Arena;

/// A live block of an [`Arena`] that is freed when this is dropped; made by [`Arena::alloc_owned`].
///
/// It dereferences to its [`Block`]. Its memory is free as after [`Arena::free`]: at once for the block's own stream, for
/// others after the work that is queued by then.
///
/// ```
/// # use poorwill::{AllocRequest, Arena, Config, Tag};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let block = arena.alloc_owned(&AllocRequest::new(1 << 20, Tag::weights()))?;
/// arena.write_all(block.id, 0, b"the weights")?; // If this fails, the block is freed.
/// drop(block);
/// assert_eq!(arena.stats()?.live_bytes, 0);
/// # Ok(())
/// # }
/// ```
///
/// A block is freed once:
/// ```compile_fail,E0382
/// # fn twice(block: poorwill::OwnedBlock) -> Result<(), poorwill::PoolError> {
/// block.free()?;
/// block.free()
/// # }
/// ```
#[must_use = "the block is freed when this is dropped"]
pub struct OwnedBlock {
    arena: Arena,
    block: Block,
    /// Whether dropping this frees it.
    is_armed: bool,
}

impl OwnedBlock {
    pub(crate) fn new(arena: Arena, block: Block) -> Self {
        Self { arena, block, is_armed: true }
    }

    /// The arena that it is from.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Frees the block, and tells what dropping it cannot: that it had been taken away before.
    ///
    /// # Errors
    /// `StaleBlock` when somebody freed it by its handle, and `Closed` when the arena was closed. `WrongProcess` in a fork
    /// of the process that opened the arena, and `Poisoned` after a panic inside of the pool. None leaves it to free.
    pub fn free(mut self) -> Result<(), PoolError> {
        self.is_armed = false;
        self.arena.free(self.block.id)
    }

    /// The block, which whoever calls this frees: for [`Arena::free_part`], or for callers over a foreign interface.
    #[must_use = "nothing else frees the block"]
    pub fn into_block(mut self) -> Block {
        self.is_armed = false;
        self.block
    }
}

impl Deref for OwnedBlock {
    type Target = Block;

    fn deref(&self) -> &Block {
        &self.block
    }
}

impl fmt::Debug for OwnedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedBlock").field(&self.block).finish()
    }
}

impl Drop for OwnedBlock {
    fn drop(&mut self) {
        if self.is_armed {
            // Freeing asks the device nothing. It fails only where there is no block to free: the arena was closed or
            // is poisoned, the block was freed by its handle, or this is a fork, and the block its parent's.
            let _ = self.arena.free(self.block.id);
        }
    }
}
