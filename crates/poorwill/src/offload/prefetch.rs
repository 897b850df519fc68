//! A forward pass over layers that live in host memory: each is brought to the device while others are computed.
//!
//! A [`Prefetcher`] has a few slots of an arena, at addresses that stay, a stream for copies and a stream for
//! computing. Layer *i* goes to slot *i* modulo their number. Two orders hold, by events on the device:
//!
//! - computing a layer begins when its copy has ended;
//! - the copy of a layer begins when computing the layer that had the slot before has ended.
//!
//! A copy is queued as soon as what it waits for is: the next ones are on their way while the host queues the
//! computing of a layer, however long that takes. Nothing else waits, and the host waits only at the end of a pass,
//! once everything is queued. (Where the host memory is pageable, a driver may make copies while the call that queues
//! them lasts.)
//!
//! Whatever fails, a pass returns only when nothing of it is in flight, or the device could not be made to say so;
//! the next pass waits first then. Slots, streams and events are given back with the prefetcher.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{
    AllocRequest, Block, ByteSize, DeviceRange, DriverError, HostBuffer, Op, Pending, PoolError, StreamId,
    Tag,
};

use super::stream::{Event, Stream};
use crate::arena::Arena;

/// What a prefetcher has on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slots {
    /// What the blocks are.
    pub tag: Tag,
    /// How many: two or more, or nothing is copied while something is computed.
    pub count: NonZeroUsize,
    /// Size of each: that of the largest layer.
    pub bytes: u64,
}

impl Slots {
    /// `count` blocks of `bytes` bytes for `tag`.
    #[must_use]
    pub fn new(tag: Tag, count: NonZeroUsize, bytes: u64) -> Self {
        Self { tag, count, bytes }
    }
}

/// A layer whose computing is to be queued now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadyLayer {
    /// Which layer.
    pub layer: usize,
    /// Where its bytes will be when the stream has come to what is queued now.
    pub range: DeviceRange,
    /// The stream to queue on, and no other.
    pub stream: StreamId,
}

/// Brings layers to the device ahead of their computing. The module's documentation says in which order.
#[derive(Debug)]
pub struct Prefetcher<'a> {
    arena: &'a Arena,
    slots: Vec<Block>,
    copy_stream: Stream,
    compute_stream: Stream,
    /// Whether nothing of an earlier pass is in flight.
    is_complete: bool,
}

impl<'a> Prefetcher<'a> {
    /// Takes the slots, each beginning on a granule, and makes the streams.
    ///
    /// # Errors
    /// As for [`Arena::alloc`]; `Driver` when there is no stream to be had. Nothing is kept then.
    pub fn new(arena: &'a Arena, slots: &Slots) -> Result<Self, PoolError> {
        let driver = arena.driver();
        let stream = || Stream::new(driver).map_err(failed("make a stream"));
        let (copy_stream, compute_stream) = (stream()?, stream()?);
        let mut prefetcher =
            Self { arena, slots: Vec::new(), copy_stream, compute_stream, is_complete: true };
        let request = AllocRequest::new(slots.bytes, slots.tag.clone())
            .aligned_to(driver.info().granule_bytes)
            .on(prefetcher.copy_stream.id())
            .freed_whole();
        for _ in 0..slots.count.get() {
            let block = arena.alloc(&request)?;
            prefetcher.slots.push(block);
            arena.record_use(block.id, prefetcher.compute_stream.id())?;
        }
        Ok(prefetcher)
    }

    /// The slots. They stay where they are.
    #[must_use]
    pub fn slots(&self) -> &[Block] {
        &self.slots
    }

    /// Brings in each layer in turn and has it computed: `compute` queues that on the stream it is told, and may
    /// read the range and whatever else it knows to be there. Returns when everything has ended.
    ///
    /// # Errors
    /// `Driver` with what is wrong about a layer that is empty or larger than a slot, before anything is queued;
    /// `Asleep` when the slots sleep; `Driver` with what the device or `compute` says. What the slots hold is not
    /// specified then.
    pub fn forward(
        &mut self,
        layers: &[Arc<HostBuffer>],
        compute: &mut dyn FnMut(ReadyLayer) -> DriverResult<()>,
    ) -> Result<(), PoolError> {
        self.check(layers)?;
        self.finish_last_pass()?;
        let mut copies = Vec::with_capacity(layers.len());
        let queued = self.queue(layers, compute, &mut copies);
        let waited = self.end_pass();
        let copied = waited_for(copies);
        queued.and(copied).and(waited)
    }

    /// Frees the slots and ends the streams.
    ///
    /// # Errors
    /// What was refused; it is tried again when this is dropped, which cannot tell.
    pub fn close(mut self) -> Result<(), PoolError> {
        self.end()
    }

    /// The stream of copies. Between two passes, others may queue work on it that has to do with the slots.
    #[must_use]
    pub fn copy_stream(&self) -> StreamId {
        self.copy_stream.id()
    }

    /// The stream of computing, likewise.
    #[must_use]
    pub fn compute_stream(&self) -> StreamId {
        self.compute_stream.id()
    }

    fn check(&self, layers: &[Arc<HostBuffer>]) -> Result<(), PoolError> {
        let slot_bytes = self.slots.first().map_or(0, |slot| slot.requested_bytes);
        let is_invalid = |memory: &&Arc<HostBuffer>| memory.is_empty() || memory.len() as u64 > slot_bytes;
        let Some(layer) = layers.iter().position(|memory| is_invalid(&memory)) else { return Ok(()) };
        let (size, slot) = (ByteSize(layers[layer].len() as u64), ByteSize(slot_bytes));
        let reason = format!(
            "layer {layer} has {size}, and a slot {slot}: layers have at least a byte, and slots the size of the \
             largest"
        );
        Err(failed("copy a layer")(DriverError::invalid(Op::CopyToDevice, reason)))
    }

    fn queue(
        &mut self,
        layers: &[Arc<HostBuffer>],
        compute: &mut dyn FnMut(ReadyLayer) -> DriverResult<()>,
        copies: &mut Vec<Pending<()>>,
    ) -> Result<(), PoolError> {
        let ordered = failed("order two streams");
        self.is_complete = false;
        let mut ahead = layers.iter().enumerate();
        let mut copied = VecDeque::with_capacity(self.slots.len());
        for (layer, memory) in ahead.by_ref().take(self.slots.len()) {
            copied.push_back(self.queue_copy(layer, memory, copies)?);
        }
        for (layer, memory) in layers.iter().enumerate() {
            if let Some(copied) = copied.pop_front() {
                self.compute_stream.wait_event(&copied).map_err(&ordered)?;
            }
            let addr = self.slots[layer % self.slots.len()].range.addr;
            let range = DeviceRange::new(addr, memory.len() as u64);
            compute(ReadyLayer { layer, range, stream: self.compute_stream.id() })
                .map_err(failed("compute a layer"))?;
            if let Some((next, memory)) = ahead.next() {
                // It has the slot of the layer that was just queued.
                let used = self.compute_stream.record_event().map_err(&ordered)?;
                self.copy_stream.wait_event(&used).map_err(&ordered)?;
                copied.push_back(self.queue_copy(next, memory, copies)?);
            }
        }
        Ok(())
    }

    /// Queues the copy of a layer to its slot, and says when it has been made.
    fn queue_copy(
        &self,
        layer: usize,
        memory: &Arc<HostBuffer>,
        copies: &mut Vec<Pending<()>>,
    ) -> Result<Event, PoolError> {
        let (slot, bytes) = (self.slots[layer % self.slots.len()].id, memory.len() as u64);
        let pool = self.arena.pool();
        copies.push(pool.write(self.copy_stream.id(), slot, 0, Arc::clone(memory), 0, bytes)?);
        self.copy_stream.record_event().map_err(failed("order two streams"))
    }

    /// Waits for what an earlier pass has left, if it has.
    fn finish_last_pass(&mut self) -> Result<(), PoolError> {
        if self.is_complete { Ok(()) } else { self.end_pass() }
    }

    fn end_pass(&mut self) -> Result<(), PoolError> {
        let (is_complete, outcome) = self.wait_streams();
        self.is_complete = is_complete;
        outcome
    }

    /// Waits for both streams. Whether nothing is in flight on them, and what was said first.
    fn wait_streams(&self) -> (bool, Result<(), PoolError>) {
        let (copied, computed) = (self.copy_stream.wait_all(), self.compute_stream.wait_all());
        (copied.0 && computed.0, copied.1.and(computed.1).map_err(failed("wait for a pass")))
    }

    /// Does all of it that has not been done.
    fn end(&mut self) -> Result<(), PoolError> {
        let finished = self.finish_last_pass();
        let mut freed = Ok(());
        // The pool keeps the memory until the streams are past it.
        for slot in self.slots.drain(..) {
            freed = freed.and(self.arena.free(slot.id));
        }
        let closed = self.copy_stream.close().and(self.compute_stream.close());
        freed.and(finished).and(closed.map_err(failed("end a stream")))
    }
}

impl Drop for Prefetcher<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Waits for all of them, and says what the first said that failed.
fn waited_for(copies: Vec<Pending<()>>) -> Result<(), PoolError> {
    let outcomes = copies.into_iter().map(Pending::wait);
    outcomes.fold(Ok(()), Result::and).map_err(failed("copy a layer"))
}

/// An error of the driver's in an operation.
fn failed(op: &'static str) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::Driver { op, source }
}
