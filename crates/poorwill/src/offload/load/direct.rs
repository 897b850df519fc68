//! Measures the storage: reads files directly and discards the bytes.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use super::LoadError;
use super::sink::Staging;
use crate::checkpoint::Checkpoint;
use crate::reader::{self, FileRange, Files, PageCache, RANGE_BYTES_MAX, Storage, buffer_bytes};

/// Reads all tensors past the page cache into the readers' own memory. `None` if a file is not read directly.
///
/// # Errors
/// `Checkpoint` for a failed read; `Staging`.
pub fn read_directly(checkpoint: &Checkpoint, readers: NonZeroUsize) -> Result<Option<u64>, LoadError> {
    let files = Files::of(checkpoint, PageCache::Emptied);
    let are_direct = || (0..checkpoint.files().len()).all(|file| files.direct(file).is_some());
    if !are_direct() {
        return Ok(None);
    }
    let ranges = reader::ranges(checkpoint.tensors(), RANGE_BYTES_MAX, |_, _| true);
    let mut workers: Vec<Staging> = (0..readers.get()).map(|_| Staging::default()).collect();
    let read = |range: FileRange, staging: &mut Staging| {
        let read = reader::read(&files, &range, staging.take(buffer_bytes(&files, &range))?);
        read.map(|_| range.bytes).map_err(|error| LoadError::from(range.refused(checkpoint, error)))
    };
    reader::run(&mut workers, [Ok(ranges)], read, &mut |_| ControlFlow::Continue(()))?;
    Ok(are_direct().then(|| checkpoint.bytes()))
}
