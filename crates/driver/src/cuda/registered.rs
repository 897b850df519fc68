//! Host memory of somebody else's that kernels read and write where it is.
//!
//! Memory that is page-locked already, by this device, by PyTorch or by whoever else, is found by its address. Other
//! memory is registered in place, in whole pages, for as long as a view of it is left: the process's book counts the
//! views of each registration, so that two views of one tensor, or of parts of it, share it, whichever devices they are
//! of. Memory that has some of its pages in a registration and others not is refused: the driver copies nothing that
//! lies in two registrations (measured: a copy of such a view ends with CUDA's "invalid argument", while kernels read
//! it). What the driver does not let go of stays in the book, and nothing that overlaps it is seen until it has gone:
//! other memory may have come to its addresses.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{ByteSize, DriverErrorKind, Op};

use super::context::Context;
use super::ffi::{Api, CuDeviceptr, CuResult, REGISTER_FLAGS};
use super::primary::Primary;
use crate::host_memory::{Region, Wish};
use crate::ledger::{Result, invalid, of};
use crate::process::Owner;

/// The registrations of this process, by where they begin. Page-locking is portable: every GPU sees it, whichever device
/// it was made by, and whoever's view goes last ends it.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// Held while memory is registered, and never while one is ended: that waits for the GPU.
    book: Mutex<Book>,
    /// Told when one that was on its way out has gone, or has not.
    turned: Condvar,
}

#[derive(Debug)]
struct Registration {
    end: usize,
    /// None where the driver did not let go of it.
    views: usize,
    /// The driver is letting go of it.
    is_leaving: bool,
    /// Where it was made, and is ended.
    context: Arc<Primary>,
}

/// The registrations of a process with a driver library.
struct Kept {
    owner: Owner,
    api: &'static Api,
    registrations: Arc<Registrations>,
}

/// Host memory as a GPU sees it, at [`HostView::device_addr`], as long as this lives and the memory does: whoever made
/// it keeps the memory. Dropping the last view of memory that was registered for it waits for the work of the GPU that
/// had it registered.
pub struct HostView {
    context: Arc<Context>,
    registrations: Arc<Registrations>,
    device_addr: u64,
    /// Where the registration begins that was made for it, or for another view.
    registered: Option<usize>,
}

impl fmt::Debug for HostView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device_addr, registered, .. } = self;
        f.debug_struct("HostView")
            .field("device_addr", device_addr)
            .field("registered", registered)
            .finish_non_exhaustive()
    }
}

impl HostView {
    /// Where the GPU finds the first byte.
    #[must_use]
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Whether the memory was page-locked for this view or one before it, and not by its owner.
    #[must_use]
    pub fn is_registered_here(&self) -> bool {
        self.registered.is_some()
    }

    pub(super) fn of(
        context: &Arc<Context>,
        registrations: &Arc<Registrations>,
        memory: &Range<usize>,
        may_lock: bool,
    ) -> DriverResult<Option<Self>> {
        let _entered = context.enter(Op::HostRegister)?;
        let found = registrations.find_or_register(context, memory, may_lock);
        let Some((device_addr, registered)) = found.map_err(of(Op::HostRegister))? else { return Ok(None) };
        let (context, registrations) = (Arc::clone(context), Arc::clone(registrations));
        Ok(Some(Self { context, registrations, device_addr, registered }))
    }
}

impl Drop for HostView {
    fn drop(&mut self) {
        let Some(start) = self.registered else { return };
        if self.context.owner().is_here() {
            self.registrations.leave(start);
        }
    }
}

impl Registrations {
    /// Those made with a driver library in this process; a forked child has its own.
    pub(super) fn of(context: &Context) -> Arc<Self> {
        static BOOKS: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
        let mut books = BOOKS.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |kept: &&Kept| kept.owner == context.owner() && ptr::eq(kept.api, context.api());
        if let Some(kept) = books.iter().find(is_same) {
            return Arc::clone(&kept.registrations);
        }
        let registrations = Arc::<Self>::default();
        let (owner, api) = (context.owner(), context.api());
        books.push(Kept { owner, api, registrations: Arc::clone(&registrations) });
        registrations
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the device sees the memory, and the registration that it owes this to, which has one more view; nothing
    /// where it does not see it and it may not be locked. The context has been entered.
    fn find_or_register(
        &self,
        context: &Context,
        memory: &Range<usize>,
        may_lock: bool,
    ) -> Result<Option<(u64, Option<usize>)>> {
        if let Some(device) = context.pinned_at(memory.start, memory.len()) {
            return Ok(Some((device, None)));
        }
        let page = rustix::param::page_size();
        let end = memory.end.checked_next_multiple_of(page);
        let end = end.ok_or_else(|| invalid(format!("{memory:#x?} is no memory")))?;
        let pages = memory.start / page * page..end;
        let mut book = self.book();
        while let Some((start, one)) = last_within(&mut book, &pages) {
            if one.is_leaving {
                book = self.turned.wait(book).unwrap_or_else(PoisonError::into_inner);
            } else if one.views == 0 {
                if !self.end(book, start) {
                    return Err(stuck(start));
                }
                book = self.book();
            } else if start > pages.start || one.end < pages.end {
                return Err(shared(memory));
            } else {
                let device = address(context, memory.start)?; // Each context may see it elsewhere.
                one.views += 1;
                return Ok(Some((device, Some(start))));
            }
        }
        if let Some(device) = seen_at(context, memory) {
            return Ok(Some((device, None)));
        }
        if !may_lock {
            return Ok(None);
        }
        register(context, memory, &pages)?;
        let device = address(context, memory.start);
        let (end, views, is_leaving) = (pages.end, usize::from(device.is_ok()), false);
        let context = Arc::clone(context.primary());
        book.insert(pages.start, Registration { end, views, is_leaving, context });
        if device.is_err() {
            self.end(book, pages.start);
        }
        Ok(Some((device?, Some(pages.start))))
    }

    /// One view less; with the last it ends.
    fn leave(&self, start: usize) {
        let mut book = self.book();
        let Some(registration) = book.get_mut(&start) else { return };
        registration.views -= 1;
        if registration.views == 0 {
            self.end(book, start);
        }
    }

    /// Has the driver let go of one without views, which waits for the GPU; whether it has. Nobody is kept from other
    /// memory meanwhile, and who wants this waits.
    fn end(&self, mut book: MutexGuard<'_, Book>, start: usize) -> bool {
        let Some(registration) = book.get_mut(&start) else { return true };
        registration.is_leaving = true;
        // Kept until the lock is not held any more: giving a context back is a call of the driver's.
        let context = Arc::clone(&registration.context);
        drop(book);
        let ended = unregister(&context, start);
        // Somebody else may have ended it.
        let has_gone = matches!(ended, Some(CuResult::SUCCESS | CuResult::HOST_MEMORY_NOT_REGISTERED));
        let mut book = self.book();
        if has_gone {
            book.remove(&start);
        } else if let Some(registration) = book.get_mut(&start) {
            registration.is_leaving = false;
        }
        drop(book);
        self.turned.notify_all();
        has_gone
    }
}

type Book = BTreeMap<usize, Registration>;

/// The last registration that has some of these pages. They do not overlap one another.
fn last_within<'a>(book: &'a mut Book, pages: &Range<usize>) -> Option<(usize, &'a mut Registration)> {
    let (start, last) = book.range_mut(..pages.end).next_back()?;
    (last.end > pages.start).then_some((*start, last))
}

/// Memory that lies in a page with such as is locked, and not wholly in pages that are.
fn shared(memory: &Range<usize>) -> DriverErrorKind {
    invalid(format!(
        "{} at {:#x} share a page with memory that is page-locked already; take memory for them that is theirs alone, as \
         a HostBuffer is",
        ByteSize(memory.len() as u64),
        memory.start
    ))
}

/// What is locked for nobody, and stays so.
fn stuck(start: usize) -> DriverErrorKind {
    let reason = format!(
        "memory at {start:#x} was page-locked for a view that is gone, and the driver does not let go of it; use other \
         memory, such as a new HostBuffer"
    );
    DriverErrorKind::Unsupported { reason }
}

/// Where the device sees what is page-locked at an address of the host. The context has been entered.
fn address(context: &Primary, at: usize) -> Result<CuDeviceptr> {
    let (api, at) = (context.api(), ptr::with_exposed_provenance_mut(at));
    // SAFETY: C2; the driver looks the address up, and touches nothing there.
    api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, at, 0) })
}

/// Where the device sees memory that somebody has page-locked, all of it: every page is asked for, since there may be
/// one between two registrations that is in none. The context has been entered.
fn seen_at(context: &Primary, memory: &Range<usize>) -> Option<u64> {
    let first = address(context, memory.start).ok()?;
    let is_next = |at: usize| {
        let expected = first.checked_add((at - memory.start) as u64);
        expected.is_some() && address(context, at).ok() == expected
    };
    let page = rustix::param::page_size();
    let mut pages = (memory.start / page * page..memory.end).step_by(page).skip(1);
    (is_next(memory.end - 1) && pages.all(is_next)).then_some(first)
}

/// Waits for all work on the GPU, whoever queued it, and leaves captures alone: the driver lets go of a page when the GPU
/// is done. The context has been entered.
pub(super) fn wait_for_all_work(context: &Primary) -> Result<()> {
    let bytes = rustix::param::page_size();
    let no_page = |reason| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes as u64, reason };
    let page = Region::map(&Wish { bytes, huge: false, node: None }).map_err(no_page)?;
    let pages = page.start()..page.start() + bytes;
    let registered = register(context, &pages, &pages);
    if registered.is_ok() && unregister(context, pages.start) != Some(CuResult::SUCCESS) {
        // The page stays mapped: the driver has it still.
        let reason = "the driver does not say when the device's work has ended".to_owned();
        return Err(DriverErrorKind::Unsupported { reason });
    }
    page.unmap();
    registered
}

fn register(context: &Primary, memory: &Range<usize>, pages: &Range<usize>) -> Result<()> {
    let api = context.api();
    let start = ptr::with_exposed_provenance_mut(pages.start);
    // SAFETY: C6, whoever asks keeps the memory as long as the view.
    let registered = unsafe { (api.mem_host_register)(start, pages.len(), REGISTER_FLAGS) };
    match registered {
        CuResult::SUCCESS => Ok(()),
        CuResult::HOST_MEMORY_ALREADY_REGISTERED => Err(shared(memory)),
        _ => {
            let (size, words) = (ByteSize(memory.len() as u64), api.error(registered));
            let reason = format!(
                "{size} at {:#x} cannot be page-locked in place: {words}; memory that can only be read, device memory \
                 and a limit on locked memory (ulimit -l) are reasons; copy them into a HostBuffer",
                memory.start
            );
            Err(DriverErrorKind::Unsupported { reason })
        }
    }
}

/// What the driver says when it is to let go of memory; nothing where it cannot be asked. Waits for the work of the
/// device.
fn unregister(context: &Primary, start: usize) -> Option<CuResult> {
    let _entered = context.enter(Op::HostRegister).ok()?;
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: C6, registered here, and no view of it is left.
    Some(unsafe { (context.api().mem_host_unregister)(start) })
}
