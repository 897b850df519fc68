//! The boundary between policy and machine: the [`Driver`] trait and its contract.
//!
//! Each rule has a name in brackets, and tests in `poorwill_testkit::contract`, which runs with every driver.
//!
//! # What a driver is
//!
//! One device, seen by one process. Three parts of its memory have separate lifetimes: address space
//! (*reservations*), physical memory (*backings*), and *mappings* between the two. Sizes and addresses are multiples
//! of [`DeviceInfo::granule_bytes`] unless a call says otherwise. Work that moves bytes is queued on *streams*.
//!
//! # What every call promises
//!
//! - **\[atomic\]** A failed call has changed nothing, not even in part: no address, memory or mapping.
//! - **\[no-memory\]** A failure does not affect later calls.
//! - **\[threads\]** Any thread may make any call at any time. Calls on the same objects are ordered as if by one
//!   lock.
//! - **\[validate\]** Bad arguments are [`DriverErrorKind::InvalidArgument`] or a more specific kind, never undefined
//!   behaviour: zero sizes, fractions of a granule, overlapping ranges, unknown or released handles.
//! - **\[process\]** In a process forked after the driver was opened, every call is
//!   [`DriverErrorKind::WrongProcess`]. Dropping the driver there changes nothing that the parent holds.
//!
//! # The objects
//!
//! ```text
//! reserve ──► reservation ─┐                       ┌─► unmap ──► unreserve
//!                          ├─► map ──► set_access ─┤
//! create ───► backing ─────┘     (copies, digests) └─► (backing) release
//! ```
//!
//! - **\[reserve\]** returns granule-aligned addresses, exclusive until `unreserve`. That takes exactly a reserved
//!   range, in which nothing is mapped.
//! - **\[create\]** takes physical memory of unspecified content: `free_bytes` falls by exactly the size.
//!   [`DriverErrorKind::OutOfMemory`] holds how much the device has.
//! - **\[map\]** puts a whole backing at a range of its size, inside one reservation, where nothing is mapped.
//!   Touching it faults until `set_access`.
//! - **\[access\]** `set_access` opens a wholly mapped range for reading and writing. A second call does nothing.
//! - **\[unmap\]** removes all mappings in a range in one step. The range must begin and end where mappings do,
//!   without gaps. Touching it then faults. The backings keep their bytes for the next mapping.
//! - **\[release\]** returns a backing's memory to the device at once, or with its last unmap. A released backing
//!   cannot be mapped or released again.
//! - **\[shared-memory\]** Where there is a [`DeviceInfo::memory_name`], other processes can have memory of
//!   `create_shared`. `export` gives a descriptor of it, and `import` makes another backing of the same bytes, also where the
//!   descriptor was sent. The memory stays in use, with its bytes, until its last backing, mapping and descriptor are gone.
//!   It goes back to the device then, whatever became of the process that created it. Elsewhere these calls are
//!   [`DriverErrorKind::Unsupported`]. What was imported can be exported again. A forked child has no
//!   descriptor that the device keeps for it.
//! - **\[in-flight\]** The caller unmaps only when no work on the range is in flight. A driver that can detect such
//!   work refuses with [`DriverErrorKind::Busy`]; others need not.
//!
//! # Streams, events, and copies
//!
//! - **\[order\]** Work on one stream runs in the order queued, on different streams in any order, unless an event
//!   says otherwise. [`StreamId::DEFAULT`] always exists.
//! - **\[streams\]** `check_stream` is one look-up, without a device call. Numbers of destroyed streams are never
//!   reused. A stream exists until its queued work has finished, so an unknown stream has none left.
//! - **\[owned\]** A copy owns or shares its host buffer until it has finished, so safe code cannot free it before.
//!   Dropping a [`Pending`] neither cancels nor waits. After `wait` the driver holds no reference to the buffer.
//!   Copies with memory of `host_alloc` are only queued by the call; with other memory it may last until they are
//!   done. Dropping memory of `host_alloc` never waits.
//! - **\[ended\]** [`Pending::has_ended`] never waits. Once it returns true, `wait` returns at once. A driver with
//!   [`DeviceInfo::kernel_copies`] or [`DeviceInfo::links`] supports it for every copy to the device.
//! - **\[links\]** Copies on a stream of `stream_create_over_link` keep every promise of other copies. A driver may refuse
//!   other work there as `Unsupported`. If the other device fails, what was queued there has ended: waiting for the stream
//!   and destroying it succeed, and waiting for a copy fails.
//! - **\[kernel-copies\]** Copies on a stream of `stream_create_kernel_copies` keep every promise of other copies.
//!   What the kernel cannot copy (not page-locked, odd bytes) is copied as elsewhere, in stream order.
//! - **\[within\]** Copies from device memory to device memory keep the promises of other copies on their stream. They read
//!   what other devices wrote there before they were queued.
//! - **\[ranges\]** Copies, `zero` and `digest` fail at the call with [`DriverErrorKind::NotMapped`] unless their
//!   device range is mapped with access. Copies may begin and end at any byte.
//! - **\[codes\]** `encode` writes the code of [`crate::codec`], or nothing where it does not fit. Its digests are
//!   of what decoding the stored bytes gives, also if the granule changes meanwhile. `decode` of any bytes
//!   succeeds, and digests what it has written. Where the host encodes, these calls may last until it is done.
//! - **\[events\]** Recording an event on a stream creates it. It has passed when everything queued there before it
//!   has finished. Queries never block.
//! - **\[host-work\]** `launch_host` runs a host function after everything queued on the stream, and holds the stream
//!   until it returns. The function must not call the driver, or drop its host memory. It must not wait for functions of
//!   other streams: some machines run all on one thread. A panic in it fails that work only.
//! - **\[capture\]** The owner of a stream may capture its work into a graph. `capturing` names such a stream among
//!   those that the driver created or adopted, without harm to the capture; without graph support, none. Meanwhile
//!   `synchronize`, and calls that would queue, record or wait on that stream, or destroy it, are refused with
//!   [`DriverErrorKind::Capturing`]. These and all other calls, on any thread, leave the capture valid. The
//!   exceptions are queries and waits of an event recorded there at the instant the capture began.
//! - **\[synchronize\]** returns when all work queued on the device before it has finished.
//!
//! # Errors
//!
//! A [`DriverError`] names the operation; its kind tells what the caller can do. Besides \[validate\] it is
//! unforeseeable: memory that is gone, or [`DriverErrorKind::Device`] with the words of the device or operating
//! system.

mod encode;
mod error;
mod host_memory;
mod pending;
mod save;
mod types;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

pub use encode::{
    check as check_codes, decoded, decoded_on_the_host, encoded, encoded_on_the_host, measured_on_the_host,
};
pub use error::{DriverError, DriverErrorKind, Op};
pub use host_memory::{HostBuffer, HostMemory};
pub use pending::Pending;
pub use save::{check as check_save, digests as digests_of_saved};
pub use types::{
    BackingId, CodePart, CopyPart, DeviceInfo, DeviceRange, Encoded, EventId, HostMemoryInfo, MemoryInfo,
    MovePart, ProcessMemory, Scratch, StreamId,
};

use crate::digest::Digest;

/// Result of a driver call.
pub type Result<T> = std::result::Result<T, DriverError>;

/// A function of the host that a stream will run.
pub type HostWork = Box<dyn FnOnce() + Send>;

/// One device as one process sees it. See the module for the contract.
///
/// ```
/// use poorwill::{Device, StreamId};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = Device::open(&"host:64MiB".parse()?)?.driver();
/// let granule_bytes = driver.info().granule_bytes;
/// let range = driver.reserve(granule_bytes)?;
/// let backing = driver.create(granule_bytes)?;
/// driver.map(range, backing)?;
/// driver.set_access(range)?;
/// driver.zero(StreamId::DEFAULT, range)?.wait()?;
/// driver.unmap(range)?;
/// driver.release(backing)?;
/// driver.unreserve(range)?;
/// # Ok(())
/// # }
/// ```
pub trait Driver: Send + Sync + fmt::Debug {
    /// The device's properties, which never change.
    fn info(&self) -> &DeviceInfo;

    /// Fails in a forked child. Costs no system call.
    ///
    /// # Errors
    /// `WrongProcess`.
    fn check_process(&self) -> Result<()>;

    /// Reserves `bytes` of address space.
    ///
    /// # Errors
    /// `OutOfAddressSpace`.
    fn reserve(&self, bytes: u64) -> Result<DeviceRange>;

    /// Releases a reservation.
    ///
    /// # Errors
    /// `InvalidArgument` unless the range is one reservation; `AlreadyMapped` when something is mapped in it.
    fn unreserve(&self, range: DeviceRange) -> Result<()>;

    /// Takes `bytes` of physical memory.
    ///
    /// # Errors
    /// `OutOfMemory`, with the sizes.
    fn create(&self, bytes: u64) -> Result<BackingId>;

    /// Takes `bytes` of physical memory that other processes can have; see \[shared-memory\].
    ///
    /// # Errors
    /// As for [`Driver::create`]; `Unsupported`.
    fn create_shared(&self, bytes: u64) -> Result<BackingId> {
        let _ = bytes;
        Err(unshared(Op::Create))
    }

    /// A descriptor of a backing's memory, which keeps it in use; see \[shared-memory\].
    ///
    /// # Errors
    /// `UnknownHandle`; `InvalidArgument` for a backing that was neither created as shared nor imported; `Unsupported`.
    fn export(&self, backing: BackingId) -> Result<OwnedFd> {
        let _ = backing;
        Err(unshared(Op::Export))
    }

    /// A backing of the memory behind a descriptor of [`Driver::export`], which has `bytes` bytes; see
    /// \[shared-memory\].
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor of anything else. Other sizes than its own are refused here or by
    /// [`Driver::map`]. `Unsupported`.
    fn import(&self, memory: BorrowedFd<'_>, bytes: u64) -> Result<BackingId> {
        let _ = (memory, bytes);
        Err(unshared(Op::Import))
    }

    /// Releases a backing; see \[release\].
    ///
    /// # Errors
    /// `UnknownHandle`, also when it was released before.
    fn release(&self, backing: BackingId) -> Result<()>;

    /// Maps the whole of `backing` at `range`.
    ///
    /// # Errors
    /// `AlreadyMapped`; `InvalidArgument` when sizes differ or the range leaves its reservation; `UnknownHandle`;
    /// `OutOfMemory` when the machine's own tables are full.
    fn map(&self, range: DeviceRange, backing: BackingId) -> Result<()>;

    /// Opens `range` for reading and writing by the device (and, on the host device, by its process).
    ///
    /// # Errors
    /// `NotMapped` when part of it is not mapped; `OutOfMemory` as for [`Driver::map`].
    fn set_access(&self, range: DeviceRange) -> Result<()>;

    /// As [`Driver::set_access`], but for this device alone, whichever others its memory is open to.
    ///
    /// # Errors
    /// As for that.
    fn set_own_access(&self, range: DeviceRange) -> Result<()> {
        self.set_access(range)
    }

    /// Removes all mappings in `range`.
    ///
    /// # Errors
    /// `NotMapped` unless the range is exactly a run of mappings; `Busy` when work on it is known to be in flight.
    fn unmap(&self, range: DeviceRange) -> Result<()>;

    /// Creates a stream.
    ///
    /// # Errors
    /// `Device` when the machine has no more of them.
    fn stream_create(&self) -> Result<StreamId>;

    /// Creates a stream of lower priority, where the device has priorities.
    ///
    /// # Errors
    /// As for [`Driver::stream_create`].
    fn stream_create_background(&self) -> Result<StreamId> {
        self.stream_create()
    }

    /// Creates a stream whose copies to the device a kernel makes, where [`DeviceInfo::kernel_copies`] is true; see
    /// \[kernel-copies\].
    ///
    /// # Errors
    /// As for [`Driver::stream_create`].
    fn stream_create_kernel_copies(&self) -> Result<StreamId> {
        self.stream_create()
    }

    /// Creates a stream whose copies take the link of another device to host memory, that with this number of
    /// [`DeviceInfo::links`]. It takes time, and memory of that device, until the last such stream is destroyed. Only copies
    /// are queued on it, and those of [`Scratch::copies`].
    ///
    /// # Errors
    /// `InvalidArgument` for a link that does not exist; `Unsupported` where that device has no memory left, for one;
    /// otherwise what the device reports.
    fn stream_create_over_link(&self, link: usize) -> Result<StreamId> {
        let reason = format!("there is no link {link} of another device");
        Err(DriverError::invalid(Op::StreamCreate, reason))
    }

    /// Destroys a stream after the work queued on it has finished.
    ///
    /// # Errors
    /// `UnknownHandle`; `InvalidArgument` for [`StreamId::DEFAULT`].
    fn stream_destroy(&self, stream: StreamId) -> Result<()>;

    /// Fails unless `stream` exists: the default one, or one created or adopted by this driver; see \[streams\].
    ///
    /// # Errors
    /// `UnknownHandle`; `WrongProcess`.
    fn check_stream(&self, stream: StreamId) -> Result<()>;

    /// Waits for everything queued on `stream`.
    ///
    /// # Errors
    /// `UnknownHandle`, or what the device reports.
    fn stream_synchronize(&self, stream: StreamId) -> Result<()>;

    /// Makes later work on `stream` wait for `event`.
    ///
    /// # Errors
    /// `UnknownHandle`.
    fn stream_wait_event(&self, stream: StreamId, event: EventId) -> Result<()>;

    /// Records an event after everything queued on `stream`.
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

    /// Destroys an event, passed or not.
    ///
    /// # Errors
    /// `UnknownHandle`.
    fn event_destroy(&self, event: EventId) -> Result<()>;

    /// A stream known to this driver that is being captured into a graph, if any; see \[capture\].
    ///
    /// # Errors
    /// What the device reports.
    fn capturing(&self) -> Result<Option<StreamId>> {
        Ok(None)
    }

    /// The time for timeouts, deadlines and copy speeds. It never goes back.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// `Capturing` while a stream is being captured; what the device reports.
    fn synchronize(&self) -> Result<()>;

    /// Queues copies from `src` to the device, as one unit of work.
    ///
    /// # Errors
    /// `NotMapped`; `InvalidArgument` when a part leaves the buffer; at `wait`, what the device reports. The ranges'
    /// bytes are then unspecified, and the buffer's intact.
    fn copy_to_device(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CopyPart],
    ) -> Result<Pending<()>>;

    /// Queues copies from the device into `dst`, as one unit of work; `wait` returns it.
    ///
    /// # Errors
    /// As for [`Driver::copy_to_device`]. The buffer of a failed copy is dropped once nothing touches it.
    fn copy_to_host(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CopyPart],
    ) -> Result<Pending<HostBuffer>>;

    /// Queues copies from device memory to device memory, as one unit of work. Of imported memory, that may be another
    /// device's.
    ///
    /// # Errors
    /// `NotMapped`; `InvalidArgument` where the two ranges of a part share a byte; at `wait`, what the device reports. The
    /// bytes copied to are then unspecified.
    fn copy_within(&self, stream: StreamId, parts: &[MovePart]) -> Result<Pending<()>>;

    /// Queues the writing of zeros.
    ///
    /// # Errors
    /// `NotMapped`; at `wait`, what the device reports.
    fn zero(&self, stream: StreamId, range: DeviceRange) -> Result<Pending<()>>;

    /// Queues copies of whole granules from the device into `dst`. `wait` returns it, and [`Digest::of`] each stored
    /// granule, in the order of the parts. Bytes are digested as stored, never on the device.
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

    /// Queues measuring: bytes of the code of each granule in `ranges`, which begin and end on granules; in order.
    ///
    /// # Errors
    /// As for [`Driver::digest`]; `Unsupported` for granules that have no code.
    fn encoded_bytes(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<u64>>> {
        measured_on_the_host(self, stream, ranges)
    }

    /// Queues encoding of granules into their slots in `dst`; see \[codes\]. `wait` returns it, with what was
    /// stored of each granule: `None` where its code does not fit.
    ///
    /// # Errors
    /// As for [`Driver::save`]; `Unsupported` for granules that have no code.
    fn encode(
        &self,
        stream: StreamId,
        dst: HostBuffer,
        parts: &[CodePart],
    ) -> Result<Pending<(HostBuffer, Vec<Option<Encoded>>)>> {
        encoded_on_the_host(self, stream, dst, parts)
    }

    /// Queues decoding of granules from their slots in `src`; see \[codes\]. `wait` returns the digests of the
    /// granules. A driver may pass codes through `scratch`.
    ///
    /// # Errors
    /// As for [`Driver::copy_to_device`]; `Unsupported` for granules that have no code.
    fn decode(
        &self,
        stream: StreamId,
        src: Arc<HostBuffer>,
        parts: &[CodePart],
        scratch: Option<Scratch>,
    ) -> Result<Pending<Vec<Digest>>> {
        let _ = scratch;
        decoded_on_the_host(self, stream, &src, parts)
    }

    /// Queues [`Digest::of`] each granule in `ranges`, which begin and end on granules; in order.
    ///
    /// # Errors
    /// `NotMapped`; `InvalidArgument`; at `wait`, what the device reports.
    fn digest(&self, stream: StreamId, ranges: &[DeviceRange]) -> Result<Pending<Vec<Digest>>>;

    /// Queues a host function; see \[host-work\].
    ///
    /// # Errors
    /// `UnknownHandle`; at `wait`, what the device reports, or that the function panicked.
    fn launch_host(&self, stream: StreamId, work: HostWork) -> Result<Pending<()>>;

    /// Memory of the device now.
    ///
    /// # Errors
    /// What the device reports.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Exactly `bytes` of host memory, more than 0, from which the device copies fastest. Its content is unspecified.
    /// The call may wait for work on the device.
    ///
    /// # Errors
    /// `OutOfHostMemory`.
    fn host_alloc(&self, bytes: u64) -> Result<HostBuffer>;

    /// Several buffers as from [`Driver::host_alloc`], of exactly these sizes. All are known at the call, so several
    /// threads can make them. Each can be waited for on its own, in any order, or dropped to free it.
    ///
    /// # Errors
    /// `OutOfHostMemory` when known at the call; else at `wait`.
    fn host_alloc_all(&self, sizes: &[u64]) -> Result<Vec<Pending<HostBuffer>>> {
        let buffers = sizes.iter().map(|bytes| self.host_alloc(*bytes));
        let buffers: Vec<HostBuffer> = buffers.collect::<Result<_>>()?;
        Ok(buffers.into_iter().map(|buffer| Pending::new(|| Ok(buffer))).collect())
    }

    /// Makes host memory in the background for buffers of these sizes, which a later call then finds unused. It only saves
    /// time: what cannot be had is not made.
    fn host_make_ahead(&self, sizes: &[u64]) {
        let _ = sizes;
    }

    /// The driver's host memory for buffers.
    fn host_memory(&self) -> HostMemoryInfo {
        HostMemoryInfo::default()
    }

    /// Releases dropped host memory that the driver keeps for later. The call may wait for all work on the device.
    ///
    /// # Errors
    /// What the device reports.
    fn host_trim(&self) -> Result<()>;
}

fn unshared(op: Op) -> DriverError {
    let reason = "this device has no memory that other processes can have";
    DriverError::new(op, DriverErrorKind::Unsupported { reason: reason.into() })
}
