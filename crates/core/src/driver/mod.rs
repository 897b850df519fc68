//! The boundary between policy and machine: the [`Driver`] trait and its contract.
//!
//! The contract is written the way a hardware interface is. Each rule has a name in brackets; the
//! suite `poorwill_testkit::contract` has a test per rule and is instantiated for every driver.
//!
//! # What a driver is
//!
//! One device, seen by one process. Its memory has three parts that come and go separately: address
//! space (*reservations*), physical memory (*backings*), and *mappings* between the two. All sizes and
//! addresses in these calls are multiples of [`DeviceInfo::granule_bytes`] unless a call says otherwise.
//! Work that moves bytes is queued on *streams* and finishes later.
//!
//! # What every call promises
//!
//! - **\[atomic\]** A call that returns an error has changed nothing: no address is reserved, no memory is
//!   held, no mapping is added, removed or half-removed.
//! - **\[no-memory\]** An error is never remembered: the next call is judged on its own.
//! - **\[threads\]** Every call may be made from any thread at any time; calls that touch the same objects
//!   are ordered as if one lock were held.
//! - **\[validate\]** Bad arguments (sizes that are zero or no multiple of the granule, ranges that overlap,
//!   unknown or already released handles) are [`DriverErrorKind::InvalidArgument`] or a more specific kind,
//!   never undefined behaviour.
//! - **\[process\]** In a process forked after the driver was opened every call is
//!   [`DriverErrorKind::WrongProcess`], and dropping it does nothing to what the parent holds.
//!
//! # The objects
//!
//! ```text
//! reserve ──► reservation ─┐                       ┌─► unmap ──► unreserve
//!                          ├─► map ──► set_access ─┤
//! create ───► backing ─────┘     (copies, digests) └─► (backing) release
//! ```
//!
//! - **\[reserve\]** gives addresses aligned to the granule that belong to nobody else until `unreserve`,
//!   which takes exactly a reserved range in which nothing is mapped.
//! - **\[create\]** takes physical memory: `free_bytes` falls by exactly the size. What it holds is not
//!   specified. When the device has less, [`DriverErrorKind::OutOfMemory`] says how much it has.
//! - **\[map\]** puts a whole backing at a range of the same size inside one reservation where nothing is
//!   mapped yet. A mapping has no access until `set_access`; touching it faults.
//! - **\[access\]** `set_access` opens a range for reading and writing; all of it must be mapped. Opening it
//!   twice does nothing.
//! - **\[unmap\]** removes every mapping in a range in one step; the range must begin and end where mappings
//!   do and hold no gap. Bytes stay in the backing: mapped again, they are the same.
//!   Touching the range faults from then on.
//! - **\[release\]** gives a backing up. Its memory returns to the device at once when it is not mapped,
//!   otherwise with its last unmap. A released backing cannot be mapped or released again.
//! - **\[quiet\]** The caller unmaps only when no work on the range is in flight. A driver that can tell
//!   refuses with [`DriverErrorKind::Busy`]; one that cannot is not obliged to notice.
//!
//! # Streams, events, and bytes in motion
//!
//! - **\[order\]** Work on one stream runs in the order it was queued; work on different streams in any
//!   order, unless an event says otherwise. [`StreamId::DEFAULT`] always exists.
//! - **\[streams\]** `check_stream` tells whether a stream exists: one look-up, without a call of the device. The number
//!   of a stream that was destroyed is never given out again. A stream stays known until the work queued on it has
//!   finished, so none of it is left when the stream is unknown.
//! - **\[owned\]** A copy owns or shares its host buffer until it has finished, so safe code cannot free what
//!   a copy still touches. Dropping a [`Pending`] neither cancels nor waits. When `wait` has returned, the
//!   driver holds no reference to the buffer any more. A copy with memory of `host_alloc` is queued and the call
//!   returns; with other memory the call may last until the copy has been done. Dropping memory of `host_alloc`
//!   waits for nothing.
//! - **\[ended\]** Where [`Pending::has_ended`] tells anything of a copy, it tells without waiting; once it has said so,
//!   `wait` returns at once. A driver with [`DeviceInfo::kernel_copies`] tells it of every copy to the device.
//! - **\[ways\]** Copies on a stream of `stream_create_kernel_copies` keep every promise that other copies keep. Those
//!   that the device's kernel cannot make (of memory that is not page-locked, or at odd bytes) are made like others, in
//!   their turn.
//! - **\[ranges\]** Copies, `zero` and `digest` check at the call that their device range is mapped with access,
//!   and fail with [`DriverErrorKind::NotMapped`] otherwise. Copies may begin and end at any byte.
//! - **\[events\]** An event is made by recording it on a stream; it has passed when everything queued there
//!   before it has finished. Queries never block.
//! - **\[host-work\]** `launch_host` runs a function of the host when everything queued on the stream before it
//!   has finished, and holds the stream until it returns. The function must not call the driver (nor
//!   drop host memory of its), and may not rely on functions of other streams to run meanwhile: some machines run
//!   all of them on one thread. A panic in it fails that piece of work and nothing else.
//! - **\[capture\]** The owner of a stream may have what is queued there captured into a graph instead of run.
//!   `capturing` names such a stream, of those that the driver made or was told of, and does the capture no harm;
//!   where no graphs are captured it never does. Meanwhile `synchronize`, and calls that would queue, record or wait
//!   on that stream, or end it, are refused with [`DriverErrorKind::Capturing`] and leave the capture valid. So does
//!   every other call, on whichever thread, but for queries and waits of an event that was recorded there in the instant
//!   in which the capture began.
//! - **\[synchronize\]** returns when all work queued on the device by then has finished.
//!
//! # Errors
//!
//! A [`DriverError`] names the operation; its kind says what the caller can do about it. Only what a caller
//! cannot foresee is left after \[validate\]: memory that is gone, and [`DriverErrorKind::Device`], a failure
//! that the device or the operating system reports in its own words.

mod error;
mod host_memory;
mod pending;
mod save;
mod types;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

pub use error::{DriverError, DriverErrorKind, Op};
pub use host_memory::{HostBuffer, HostMemory};
pub use pending::Pending;
pub use save::{check as check_save, digests as digests_of_saved};
pub use types::{
    BackingId, CopyPart, DeviceInfo, DeviceRange, EventId, HostMemoryInfo, MemoryInfo, ProcessMemory,
    StreamId,
};

use crate::digest::Digest;

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// A function of the host that a stream will run.
pub type HostWork = Box<dyn FnOnce() + Send>;

/// One device as one process sees it. The module's documentation is the contract.
pub trait Driver: Send + Sync + fmt::Debug {
    /// What the device is. Never changes while the driver is open.
    fn info(&self) -> &DeviceInfo;

    /// Fails with [`DriverErrorKind::WrongProcess`] in a forked child. Costs no system call.
    ///
    /// # Errors
    /// `WrongProcess`.
    fn check_process(&self) -> Result<()>;

    /// Reserves `bytes` of address space.
    ///
    /// # Errors
    /// `OutOfAddressSpace` when there is no such range left.
    fn reserve(&self, bytes: u64) -> Result<DeviceRange>;

    /// Gives a whole reservation back.
    ///
    /// # Errors
    /// `InvalidArgument` when the range is not one reservation; `AlreadyMapped` when something is mapped in it.
    fn unreserve(&self, range: DeviceRange) -> Result<()>;

    /// Takes `bytes` of physical memory.
    ///
    /// # Errors
    /// `OutOfMemory` with the sizes when the device has less.
    fn create(&self, bytes: u64) -> Result<BackingId>;

    /// Gives a backing's memory up; see \[release\].
    ///
    /// # Errors
    /// `UnknownHandle` when it was released before or never existed.
    fn release(&self, backing: BackingId) -> Result<()>;

    /// Puts the whole of `backing` at `range`.
    ///
    /// # Errors
    /// `AlreadyMapped` when part of the range is; `InvalidArgument` when sizes differ or the range leaves its
    /// reservation; `UnknownHandle`; `OutOfMemory` where the machine's own tables find no room.
    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()>;

    /// Opens `range` for reading and writing by the device (and, on the host device, by its process).
    ///
    /// # Errors
    /// `NotMapped` when part of the range is not mapped; `OutOfMemory` as for [`Driver::map`].
    fn set_access(&self, range: DeviceRange) -> Result<()>;

    /// Removes all mappings in `range`.
    ///
    /// # Errors
    /// `NotMapped` when the range is not exactly a run of mappings; `Busy` when work on it is known to be in
    /// flight.
    fn unmap(&self, range: DeviceRange) -> Result<()>;

    /// Makes a stream.
    ///
    /// # Errors
    /// `Device` when the machine has no more of them.
    fn stream_create(&self) -> Result<StreamId>;

    /// Makes a stream whose work gives way to that of other streams, where the device can tell them apart.
    ///
    /// # Errors
    /// As for [`Driver::stream_create`].
    fn stream_create_background(&self) -> Result<StreamId> {
        self.stream_create()
    }

    /// Makes a stream whose copies to the device are made by a kernel, beside what the device's copy engines do, where
    /// [`DeviceInfo::kernel_copies`] is true; see \[ways\]. In all else it is a stream like others.
    ///
    /// # Errors
    /// As for [`Driver::stream_create`].
    fn stream_create_kernel_copies(&self) -> Result<StreamId> {
        self.stream_create()
    }

    /// Ends a stream after the work queued on it has finished.
    ///
    /// # Errors
    /// `UnknownHandle`; `InvalidArgument` for [`StreamId::DEFAULT`].
    fn stream_destroy(&self, stream: StreamId) -> Result<()>;

    /// Whether `stream` exists: the default stream, and each that this driver made or was told of and that was not
    /// destroyed since; see \[streams\].
    ///
    /// # Errors
    /// `UnknownHandle`; `WrongProcess`.
    fn check_stream(&self, stream: StreamId) -> Result<()>;

    /// Waits for everything queued on `stream`.
    ///
    /// # Errors
    /// `UnknownHandle`, or what the device reports.
    fn stream_synchronize(&self, stream: StreamId) -> Result<()>;

    /// Makes work queued on `stream` from now on wait for `event`.
    ///
    /// # Errors
    /// `UnknownHandle`.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()>;

    /// Records an event behind everything queued on `stream`.
    ///
    /// # Errors
    /// `UnknownHandle`.
    fn event_record(&self, stream: StreamId) -> Result<EventId>;

    /// Whether an event has passed.
    ///
    /// # Errors
    /// `UnknownHandle`, or what the device reports.
    fn event_query(&self, event: EventId) -> Result<bool>;

    /// Waits until an event has passed.
    ///
    /// # Errors
    /// `UnknownHandle`, or what the device reports.
    fn event_synchronize(&self, event: EventId) -> Result<()>;

    /// Forgets an event, passed or not.
    ///
    /// # Errors
    /// `UnknownHandle`.
    fn event_destroy(&self, event: EventId) -> Result<()>;

    /// A stream whose work is being captured into a graph, if there is one among those that this driver knows; see
    /// \[capture\].
    ///
    /// # Errors
    /// What the device reports.
    fn capturing(&self) -> Result<Option<StreamId>> {
        Ok(None)
    }

    /// The time, for whatever goes by it: stream_wait_max, deadlines, and how fast copies are. It never goes back.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// `Capturing` while a stream is being captured; what the device reports.
    fn synchronize(&self) -> Result<()>;

    /// Queues copies from `src` to the device, each of `part.device.bytes` bytes, as one piece of work.
    ///
    /// # Errors
    /// `NotMapped`; `InvalidArgument` when a part leaves the buffer; at `wait`, what the device reports (the
    /// ranges' bytes are then unspecified, the buffer's are intact).
    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>>;

    /// Queues copies from the device into `dst`, as one piece of work; `wait` gives the buffer back.
    ///
    /// # Errors
    /// As for [`Driver::copy_to_device`]; a buffer whose copy failed is dropped once nothing touches it.
    fn copy_to_host(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<HostBuffer>>;

    /// Queues the writing of zeros.
    ///
    /// # Errors
    /// `NotMapped`; at `wait`, what the device reports.
    fn zero(&self, stream: StreamId, range: DeviceRange) -> Result<Pending<()>>;

    /// Queues copies of whole granules from the device into `dst`, and [`Digest::of`] each as it arrived there;
    /// `wait` gives the buffer back, and one digest per granule, in the order of the parts. What is digested are
    /// the stored bytes, never those on the device.
    ///
    /// # Errors
    /// As for [`Driver::copy_to_host`]; `InvalidArgument` when a part does not begin and end on granules.
    fn save(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<(HostBuffer, Vec<Digest>)>> {
        let granule_bytes = self.info().granule_bytes;
        save::check(granule_bytes, parts)?;
        let parts_to_digest = parts.to_vec();
        let copy = self.copy_to_host(stream, dst, parts)?;
        Ok(copy.then(move |copied| {
            let buffer = copied?;
            let digests = save::digests(&buffer, granule_bytes, &parts_to_digest)?;
            Ok((buffer, digests))
        }))
    }

    /// Queues [`Digest::of`] each granule in `ranges`, which begin and end on granules; one digest per
    /// granule, in order.
    ///
    /// # Errors
    /// `NotMapped`; `InvalidArgument`; at `wait`, what the device reports.
    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>>;

    /// Queues a function of the host; see \[host-work\].
    ///
    /// # Errors
    /// `UnknownHandle`; at `wait`, what the device reports, or that the function panicked.
    fn launch_host(&self, stream: StreamId, work: HostWork) -> Result<Pending<()>>;

    /// Memory of the device now.
    ///
    /// # Errors
    /// What the device reports.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Host memory of exactly `bytes` bytes, from which the device copies fastest; any size but 0. What it holds
    /// is not specified. The call may wait for work on the device.
    ///
    /// # Errors
    /// `OutOfHostMemory`.
    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer>;

    /// Host memory for several buffers at once, each as from [`Driver::host_alloc`]. All of it is announced with
    /// the call, so that it can be made by several threads, exactly as much as is asked for; each buffer can be
    /// waited for by itself, in any order. Dropping one that was not waited for gives it back.
    ///
    /// # Errors
    /// `OutOfHostMemory` when it is known at the call that not all of it is to be had; the same at `wait`.
    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        let buffers = sizes.iter().map(|bytes| self.host_alloc(*bytes));
        let buffers: Vec<HostBuffer> = buffers.collect::<Result<_>>()?;
        Ok(buffers.into_iter().map(|buffer| Pending::new(|| Ok(buffer))).collect())
    }

    /// Host memory that the driver has for buffers.
    fn host_memory(&self) -> HostMemoryInfo {
        HostMemoryInfo::default()
    }

    /// Gives host memory back that was dropped and that the driver keeps for later, if it does. The call may wait
    /// for all work on the device.
    ///
    /// # Errors
    /// What the device reports.
    fn host_trim(&self) -> Result<()>;
}
