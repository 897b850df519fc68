//! A block that frees itself.

use std::fmt;
use std::ops::Deref;

use poorwill_core::{AllocRequest, Block, PoolError};

use crate::arena::Arena;

/// A live block of an [`Arena`], freed on drop; made by [`Arena::alloc_owned`].
///
/// It keeps the arena alive, and dereferences to its [`Block`]. Other streams may reuse the memory as after
/// [`Arena::free`].
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
    is_armed: bool,
}

impl Arena {
    /// As [`Arena::alloc`]; the block is freed on drop and keeps the arena alive.
    ///
    /// # Errors
    /// As [`Arena::alloc`].
    pub fn alloc_owned(&self, request: &AllocRequest) -> Result<OwnedBlock, PoolError> {
        let block = self.alloc(request)?;
        Ok(OwnedBlock { arena: self.clone(), block, is_armed: true })
    }
}

impl OwnedBlock {
    /// The block's arena.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Frees the block and returns the error that a drop ignores.
    ///
    /// # Errors
    /// As [`Arena::free`].
    pub fn free(mut self) -> Result<(), PoolError> {
        self.is_armed = false;
        self.arena.free(self.block.id)
    }

    /// Leaves the freeing to the caller. For [`Arena::free_part`] and foreign interfaces.
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
            // Freeing does not call the device. It fails only without a block to free: after a close, a panic
            // in the pool, a free by handle, or a fork.
            let _ = self.arena.free(self.block.id);
        }
    }
}
