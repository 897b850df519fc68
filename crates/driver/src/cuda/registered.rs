//! Host memory of other owners that kernels access in place.
//!
//! Memory that is already page-locked, by this device, PyTorch or other code, is found by its address. Other
//! memory is registered in place, in whole pages, until its last view goes. Overlapping views share a
//! registration, on all devices of the process.
//!
//! Memory with only some pages in a registration is refused. Measured: copying such a view fails with CUDA's
//! "invalid argument", while kernels can read it. A registration that the driver refuses to end blocks
//! overlapping views: other memory may be at its addresses by then.

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
use crate::host_memory::{Region, RegionOptions};
use crate::ledger::{Result, invalid, of};
use crate::process::Owner;

/// The registrations of this process, by start address. Every GPU sees them all, and a view on any device can
/// end one.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// Held while memory is registered, but not while a registration ends: that waits for the GPU.
    entries: Mutex<Entries>,
    changed: Condvar,
}

#[derive(Debug)]
struct Registration {
    end: usize,
    /// 0 where the driver refused to end it.
    views: usize,
    is_ending: bool,
    context: Arc<Primary>,
}

struct ProcessRegistrations {
    owner: Owner,
    api: &'static Api,
    registrations: Arc<Registrations>,
}

/// Host memory as a GPU sees it; its owner keeps it at least as long. Dropping the last view of memory
/// registered here waits for all work on the GPU that registered it.
pub struct HostView {
    context: Arc<Context>,
    registrations: Arc<Registrations>,
    device_addr: u64,
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
    /// The GPU's address of the first byte.
    #[must_use]
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Whether the memory was page-locked for a view, and not by its owner.
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
            self.registrations.remove_view(start);
        }
    }
}

impl Registrations {
    /// One for each driver library; a forked child has its own.
    pub(super) fn of(context: &Context) -> Arc<Self> {
        static ALL: Mutex<Vec<ProcessRegistrations>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |kept: &&ProcessRegistrations| kept.owner == context.owner() && ptr::eq(kept.api, context.api());
        if let Some(kept) = all.iter().find(is_same) {
            return Arc::clone(&kept.registrations);
        }
        let registrations = Arc::<Self>::default();
        let (owner, api) = (context.owner(), context.api());
        all.push(ProcessRegistrations { owner, api, registrations: Arc::clone(&registrations) });
        registrations
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device address, with the start of the registration that gained a view. `None` if the device cannot
    /// see the memory and `may_lock` is false. The context is entered.
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
        let mut entries = self.entries();
        while let Some((start, one)) = last_within(&mut entries, &pages) {
            if one.is_ending {
                entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
            } else if one.views == 0 {
                if !self.end(entries, start) {
                    return Err(not_ended(start));
                }
                entries = self.entries();
            } else if start > pages.start || one.end < pages.end {
                return Err(shares_pages(memory));
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
        let (end, views, is_ending) = (pages.end, usize::from(device.is_ok()), false);
        let context = Arc::clone(context.primary());
        entries.insert(pages.start, Registration { end, views, is_ending, context });
        if device.is_err() {
            self.end(entries, pages.start);
        }
        Ok(Some((device?, Some(pages.start))))
    }

    fn remove_view(&self, start: usize) {
        let mut entries = self.entries();
        let Some(registration) = entries.get_mut(&start) else { return };
        registration.views -= 1;
        if registration.views == 0 {
            self.end(entries, start);
        }
    }

    /// Unregisters memory without views, which waits for the GPU; whether that succeeded. Only callers that
    /// want this memory wait.
    fn end(&self, mut entries: MutexGuard<'_, Entries>, start: usize) -> bool {
        let Some(registration) = entries.get_mut(&start) else { return true };
        registration.is_ending = true;
        // Kept until the lock is released: releasing a context is a driver call.
        let context = Arc::clone(&registration.context);
        drop(entries);
        let ended = unregister(&context, start);
        // Other code may have unregistered it.
        let has_ended = matches!(ended, Some(CuResult::SUCCESS | CuResult::HOST_MEMORY_NOT_REGISTERED));
        let mut entries = self.entries();
        if has_ended {
            entries.remove(&start);
        } else if let Some(registration) = entries.get_mut(&start) {
            registration.is_ending = false;
        }
        drop(entries);
        self.changed.notify_all();
        has_ended
    }
}

type Entries = BTreeMap<usize, Registration>;

/// Registrations never overlap, so the last one suffices.
fn last_within<'a>(entries: &'a mut Entries, pages: &Range<usize>) -> Option<(usize, &'a mut Registration)> {
    let (start, last) = entries.range_mut(..pages.end).next_back()?;
    (last.end > pages.start).then_some((*start, last))
}

fn shares_pages(memory: &Range<usize>) -> DriverErrorKind {
    invalid(format!(
        "{} at {:#x} share a page with memory that is page-locked already; take memory for them that is theirs alone, as \
         a HostBuffer is",
        ByteSize(memory.len() as u64),
        memory.start
    ))
}

fn not_ended(start: usize) -> DriverErrorKind {
    let reason = format!(
        "memory at {start:#x} was page-locked for a view that is gone, and the driver does not release it; use other \
         memory, such as a new HostBuffer"
    );
    DriverErrorKind::Unsupported { reason }
}

/// The context is entered.
fn address(context: &Primary, at: usize) -> Result<CuDeviceptr> {
    let (api, at) = (context.api(), ptr::with_exposed_provenance_mut(at));
    // SAFETY: C2; the driver looks the address up, and touches nothing there.
    api.get(|device| unsafe { (api.mem_host_get_device_pointer)(device, at, 0) })
}

/// Checks every page: one between two registrations may be in neither. The context is entered.
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

/// Works without invalidating captures: the driver unregisters a page when the GPU is done. The context is
/// entered.
pub(super) fn wait_for_all_work(context: &Primary) -> Result<()> {
    let bytes = rustix::param::page_size();
    let no_page = |reason| DriverErrorKind::OutOfHostMemory { asked_bytes: bytes as u64, reason };
    let page = Region::map(&RegionOptions { bytes, huge: false, node: None }).map_err(no_page)?;
    let pages = page.start()..page.start() + bytes;
    let registered = register(context, &pages, &pages);
    if registered.is_ok() && unregister(context, pages.start) != Some(CuResult::SUCCESS) {
        // The page stays mapped: the driver still has it.
        let reason = "the driver does not say when the device's work has ended".to_owned();
        return Err(DriverErrorKind::Unsupported { reason });
    }
    page.unmap();
    registered
}

fn register(context: &Primary, memory: &Range<usize>, pages: &Range<usize>) -> Result<()> {
    let api = context.api();
    let start = ptr::with_exposed_provenance_mut(pages.start);
    // SAFETY: C6, the view's owner keeps the memory as long as the view.
    let registered = unsafe { (api.mem_host_register)(start, pages.len(), REGISTER_FLAGS) };
    match registered {
        CuResult::SUCCESS => Ok(()),
        CuResult::HOST_MEMORY_ALREADY_REGISTERED => Err(shares_pages(memory)),
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

/// `None` where the context cannot be entered. Waits for all work on the device.
fn unregister(context: &Primary, start: usize) -> Option<CuResult> {
    let _entered = context.enter(Op::HostRegister).ok()?;
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: C6, registered here, and no view of it is left.
    Some(unsafe { (context.api().mem_host_unregister)(start) })
}
