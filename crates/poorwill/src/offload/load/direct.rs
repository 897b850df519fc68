//! The files of a checkpoint read directly into nothing: what their storage gives at best.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use super::LoadError;
use super::sink::Staging;
use crate::checkpoint::Checkpoint;
use crate::reader::{self, Files, PIECE_BYTES_MAX, PageCache, Piece, Storage, room_bytes};

/// Reads all tensors of a checkpoint past the page cache, by so many readers, into memory of each reader's own. Gives
/// how many bytes that were; nothing where one of the files is not read so.
///
/// # Errors
/// `Checkpoint` for a file that cannot be read; `Staging`.
pub fn read_directly(checkpoint: &Checkpoint, readers: NonZeroUsize) -> Result<Option<u64>, LoadError> {
    let files = Files::of(checkpoint, PageCache::Emptied);
    let are_direct = || (0..checkpoint.files().len()).all(|file| files.direct(file).is_some());
    if !are_direct() {
        return Ok(None);
    }
    let pieces = reader::pieces(checkpoint.tensors(), PIECE_BYTES_MAX, |_, _| true);
    let mut hands: Vec<Staging> = (0..readers.get()).map(|_| Staging::default()).collect();
    let read = |piece: Piece, staging: &mut Staging| {
        let read = reader::read(&files, &piece, staging.take(room_bytes(&files, &piece))?);
        read.map(|_| piece.bytes).map_err(|fault| LoadError::from(piece.refused(checkpoint, fault)))
    };
    reader::run(&mut hands, [Ok(pieces)], read, &mut |_| ControlFlow::Continue(()))?;
    Ok(are_direct().then(|| checkpoint.bytes()))
}
