//! Reads into host memory: in place where possible, else through a reader's buffer.

use std::iter::Peekable;
use std::mem;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverError, Op};

use super::super::Buffer;
use super::error::LoadError;
use super::layout::Layout;
use crate::checkpoint::Checkpoint;
use crate::reader::{self, FileRange, RangeRead, Storage, buffer_bytes, fits, index};

pub(super) struct Task<'m> {
    range: &'m FileRange,
    memory: &'m mut [u8],
}

#[derive(Debug, Default)]
pub(super) struct ReadWorker {
    pub(super) staging: Staging,
    pub(super) direct_bytes: u64,
    pub(super) staged_bytes: u64,
    pub(super) buffered_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Staging {
    memory: Vec<u8>,
}

impl Staging {
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.memory.capacity() as u64
    }

    pub(super) fn take(&mut self, bytes: u64) -> Result<&mut [u8], LoadError> {
        let missing = index(bytes).saturating_sub(self.memory.len());
        self.memory.try_reserve_exact(missing).map_err(|_| LoadError::Staging { bytes })?;
        self.memory.resize(self.memory.len() + missing, 0);
        Ok(&mut self.memory)
    }
}

pub(super) struct Sink<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) storage: &'a dyn Storage,
    pub(super) layout: &'a Layout,
}

impl Sink<'_> {
    pub(super) fn tasks<'m>(
        &self,
        nth: usize,
        ranges: &mut Peekable<impl Iterator<Item = &'m FileRange>>,
        made: &'m mut Buffer,
    ) -> DriverResult<Vec<Task<'m>>> {
        let wrong = |words: &str| DriverError::invalid(Op::HostAlloc, words);
        let mut memory = made.as_mut_slice().ok_or_else(|| wrong("memory that was just made is in use"))?;
        let (mut tasks, mut at) = (Vec::new(), 0);
        while let Some(range) = ranges.next_if(|range| self.layout.span(range).0 == nth) {
            let (_, begin, end) = self.layout.span(range);
            tasks.push(Task { range, memory: split(&mut memory, begin - at, end - begin) });
            at = end;
        }
        Ok(tasks)
    }

    pub(super) fn read(&self, task: Task<'_>, worker: &mut ReadWorker) -> Result<u64, LoadError> {
        let (Task { range, mut memory }, storage) = (task, self.storage);
        let refused = |error| LoadError::Checkpoint(range.refused(self.checkpoint, error));
        let is_in_place = fits(storage, range, memory);
        let is_direct = if is_in_place {
            reader::read(storage, range, memory).map_err(refused)?.is_direct
        } else {
            let staging = worker.staging.take(buffer_bytes(storage, range))?;
            let RangeRead { mut begin, is_direct } =
                reader::read(storage, range, staging).map_err(refused)?;
            let mut at = self.layout.span(range).1;
            for part in &range.parts {
                let location = self.layout.location(part).offset;
                let to = split(&mut memory, location - at, part.bytes);
                to.copy_from_slice(&staging[begin..begin + to.len()]);
                (begin, at) = (begin + to.len(), location + part.bytes);
            }
            is_direct
        };
        *match (is_direct, is_in_place) {
            (true, true) => &mut worker.direct_bytes,
            (true, false) => &mut worker.staged_bytes,
            (false, _) => &mut worker.buffered_bytes,
        } += range.bytes;
        Ok(range.bytes)
    }
}

fn split<'m>(memory: &mut &'m mut [u8], gap: u64, bytes: u64) -> &'m mut [u8] {
    let (_, rest) = mem::take(memory).split_at_mut(index(gap));
    let (cut, rest) = rest.split_at_mut(index(bytes));
    *memory = rest;
    cut
}
