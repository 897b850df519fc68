//! Copies layers from host memory ahead of their computation.

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

/// The device memory of a prefetcher.
///
/// ```
/// use poorwill::Tag;
/// use poorwill::offload::Slots;
///
/// let slots = Slots::new(Tag::weights(), 2.try_into()?, 1 << 20);
/// assert_eq!(slots.count.get(), 2);
/// # Ok::<(), std::num::TryFromIntError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slots {
    /// Tag of the blocks.
    pub tag: Tag,
    /// How many; at least 2 to overlap copies with computation.
    pub count: NonZeroUsize,
    /// Size of the largest layer.
    pub bytes: u64,
}

impl Slots {
    /// `count` blocks of `bytes` bytes.
    #[must_use]
    pub fn new(tag: Tag, count: NonZeroUsize, bytes: u64) -> Self {
        Self { tag, count, bytes }
    }
}

/// A layer to compute now.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::offload::{Prefetcher, ReadyLayer, Slots};
/// use poorwill::{Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let layers = [Arc::new(vec![7; 1000].into())];
/// let mut prefetcher = Prefetcher::new(&arena, &Slots::new(Tag::weights(), 2.try_into()?, 1000))?;
/// prefetcher.forward(&layers, &mut |ready: ReadyLayer| {
///     println!("layer {} is at {:#x} for {}", ready.layer, ready.range.addr, ready.stream);
///     Ok(())
/// })?;
/// prefetcher.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadyLayer {
    /// Its index.
    pub layer: usize,
    /// Its bytes on the device, for work on `stream`.
    pub range: DeviceRange,
    /// The only stream to queue on.
    pub stream: StreamId,
}

/// A forward pass over layers in host memory, with copies ahead of computation.
///
/// Layer *i* uses slot *i* modulo their number. Events on the device order two things:
///
/// - a layer's computation starts after its copy;
/// - a layer's copy starts after the computation of the slot's previous layer.
///
/// A copy is queued once the work it waits for is queued, so copies run while the host queues computation.
/// The host waits only at the end of a pass. (With pageable memory a driver may copy inside the queuing
/// call.)
///
/// A pass returns when none of its work is in flight, or the device fails to confirm that. Then the next pass
/// waits first. Dropping the prefetcher releases slots, streams and events.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::offload::{Prefetcher, Slots};
/// use poorwill::{Arena, Config, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let arena = Arena::open(Config::on("host:64MiB".parse()?))?;
/// let layers = [1, 2, 3].map(|byte| Arc::new(vec![byte; 1000].into()));
/// let two = 2.try_into()?;
/// let mut prefetcher = Prefetcher::new(&arena, &Slots::new(Tag::weights(), two, 1000))?;
/// let mut order = Vec::new();
/// prefetcher.forward(&layers, &mut |ready| {
///     order.push(ready.layer); // Launch kernels on `ready.stream` that read `ready.range`.
///     Ok(())
/// })?;
/// assert_eq!(order, [0, 1, 2]);
/// prefetcher.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Prefetcher<'a> {
    arena: &'a Arena,
    slots: Vec<Block>,
    copy_stream: Stream,
    compute_stream: Stream,
    /// Whether no earlier work is in flight.
    is_complete: bool,
}

impl<'a> Prefetcher<'a> {
    /// Allocates the slots, aligned to granules, and creates the streams.
    ///
    /// # Errors
    /// As [`Arena::alloc`]; `Driver` without a stream.
    pub fn new(arena: &'a Arena, slots: &Slots) -> Result<Self, PoolError> {
        let driver = arena.driver();
        let stream = || Stream::new(driver).map_err(failed("make a stream"));
        let (copy_stream, compute_stream) = (stream()?, stream()?);
        let mut prefetcher =
            Self { arena, slots: Vec::new(), copy_stream, compute_stream, is_complete: true };
        let request = AllocRequest::new(slots.bytes, slots.tag.clone())
            .aligned_to(driver.info().granule_bytes)
            .on(prefetcher.copy_stream.id());
        for _ in 0..slots.count.get() {
            let block = arena.alloc(&request)?;
            prefetcher.slots.push(block);
            arena.record_use(block.id, prefetcher.compute_stream.id())?;
        }
        Ok(prefetcher)
    }

    /// The slots, at fixed addresses.
    #[must_use]
    pub fn slots(&self) -> &[Block] {
        &self.slots
    }

    /// Copies each layer and lets `compute` queue its computation on the given stream. Returns after all work
    /// completes.
    ///
    /// # Errors
    /// After all but the first, the contents of the slots are unspecified.
    /// - `Driver` for an empty layer, or one larger than a slot, before anything is queued.
    /// - `Asleep` for sleeping slots; `Driver` with an error of the device or of `compute`.
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

    /// Frees the slots and destroys the streams.
    ///
    /// # Errors
    /// The first refusal; the drop tries again.
    pub fn close(mut self) -> Result<(), PoolError> {
        self.end()
    }

    /// The stream of copies. Between passes, callers may queue work on the slots here.
    #[must_use]
    pub fn copy_stream(&self) -> StreamId {
        self.copy_stream.id()
    }

    /// The stream of computation, with the same rule.
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
                // Its slot is that of the layer just queued.
                let used = self.compute_stream.record_event().map_err(&ordered)?;
                self.copy_stream.wait_event(&used).map_err(&ordered)?;
                copied.push_back(self.queue_copy(next, memory, copies)?);
            }
        }
        Ok(())
    }

    /// The event marks the copy's end.
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

    fn finish_last_pass(&mut self) -> Result<(), PoolError> {
        if self.is_complete { Ok(()) } else { self.end_pass() }
    }

    fn end_pass(&mut self) -> Result<(), PoolError> {
        let (is_complete, outcome) = self.wait_streams();
        self.is_complete = is_complete;
        outcome
    }

    /// Whether both streams are complete, and the first error.
    fn wait_streams(&self) -> (bool, Result<(), PoolError>) {
        let (copied, computed) = (self.copy_stream.wait_all(), self.compute_stream.wait_all());
        (copied.0 && computed.0, copied.1.and(computed.1).map_err(failed("wait for a pass")))
    }

    fn end(&mut self) -> Result<(), PoolError> {
        let finished = self.finish_last_pass();
        let mut freed = Ok(());
        // The pool keeps the memory until both streams are done with it.
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

fn waited_for(copies: Vec<Pending<()>>) -> Result<(), PoolError> {
    let outcomes = copies.into_iter().map(Pending::wait);
    outcomes.fold(Ok(()), Result::and).map_err(failed("copy a layer"))
}

fn failed(op: &'static str) -> impl Fn(DriverError) -> PoolError {
    move |source| PoolError::Driver { op, source }
}
