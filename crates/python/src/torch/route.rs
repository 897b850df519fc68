//! Routes: the pairs of an arena and a tag that PyTorch's segments come from.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use poorwill::{AllocRequest, Block, DeviceRange, DeviceSpec, PoolError, StreamId, Tag, chain};

use super::pending_call;
use super::segments::{SegmentSerial, SegmentTable};
use crate::registry::{ArenaError, Opened};

/// Most routes in the life of a process.
pub(super) const ROUTES_MAX: usize = 256;

/// How long a segment waits to reuse freed memory before more is created. Longer than a load's copies and
/// conversions, which would otherwise map all that they free.
const REUSE_TIMEOUT: Duration = Duration::from_millis(250);

/// All routes of this process. Never dropped: PyTorch frees segments until the process ends.
///
/// A forked child has none. It allocates and frees nothing, and takes no lock, which a thread that does not
/// exist there might hold.
#[derive(Debug)]
pub(crate) struct Routes {
    /// The owning process; 0 before the first route.
    process: AtomicU32,
    routes: [OnceLock<Route>; ROUTES_MAX],
    /// Locked by the thread that adds a route.
    count: Mutex<usize>,
    /// The route of `poorwill_alloc`, by device number.
    by_device: Mutex<HashMap<u32, usize>>,
    table: SegmentTable,
    /// The last refusal of each thread, in order of time, until it is read.
    refusals: Mutex<Vec<Refusal>>,
}

#[derive(Debug)]
struct Refusal {
    message: String,
    /// The thread that was refused.
    thread: usize,
}

#[derive(Debug)]
struct Route {
    /// Does not keep a closed arena.
    opened: Weak<Opened>,
    tag: Tag,
    ordinal: u32,
    /// By CUDA handle.
    streams: Mutex<HashMap<usize, StreamId>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("{device} is no GPU: PyTorch's tensors need an arena on one, like poorwill.arena(\"cuda:0\")")]
    NotGpu { device: DeviceSpec },
    #[error(
        "this process has had {ROUTES_MAX} pairs of an arena and a tag, the most there can be: use arenas and tags again \
         instead of opening others"
    )]
    TooMany,
    #[error(transparent)]
    Forked(#[from] Forked),
}

/// This is a fork of the owning process.
#[derive(Debug, thiserror::Error)]
#[error(
    "PyTorch's segments are those of process {owner}, and this is its fork {}: use a process that was started afresh, \
     as multiprocessing's \"spawn\" does",
    process::id()
)]
pub(crate) struct Forked {
    owner: u32,
}

pub(crate) fn routes() -> &'static Routes {
    static ROUTES: OnceLock<Routes> = OnceLock::new();
    ROUTES.get_or_init(|| Routes {
        process: AtomicU32::new(0),
        routes: [const { OnceLock::new() }; ROUTES_MAX],
        count: Mutex::new(0),
        by_device: Mutex::default(),
        table: SegmentTable::default(),
        refusals: Mutex::default(),
    })
}

impl Routes {
    /// Makes this process the owner; fails if another is.
    fn own_by_this_process(&self) -> Result<(), Forked> {
        let this = process::id();
        match self.process.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed) {
            Err(owner) if owner != this => Err(Forked { owner }),
            _ => Ok(()),
        }
    }

    pub(super) fn is_here(&self) -> bool {
        self.process.load(Ordering::Relaxed) == process::id()
    }

    /// The number of the route to a tag, created on first use.
    pub(crate) fn to(&self, opened: &Arc<Opened>, tag: &Tag) -> Result<usize, RouteError> {
        let DeviceSpec::Cuda { ordinal } = *opened.device().spec() else {
            return Err(RouteError::NotGpu { device: opened.device().spec().clone() });
        };
        self.own_by_this_process()?;
        let mut count = lock(&self.count);
        let known = self.routes[..*count].iter().position(|route| {
            route
                .get()
                .is_some_and(|route| ptr::eq(route.opened.as_ptr(), Arc::as_ptr(opened)) && route.tag == *tag)
        });
        if let Some(known) = known {
            return Ok(known);
        }
        let number = *count;
        let Some(route) = self.routes.get(number) else { return Err(RouteError::TooMany) };
        let (opened, tag, streams) = (Arc::downgrade(opened), tag.clone(), Mutex::default());
        // Cannot fail: `count` is locked.
        let _ = route.set(Route { opened, tag, ordinal, streams });
        *count += 1;
        Ok(number)
    }

    pub(super) fn alloc(&self, number: usize, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
        if self.own_by_this_process().is_err() {
            return ptr::null_mut();
        }
        let Some(route) = self.routes.get(number).and_then(OnceLock::get) else {
            return self.refuse("an unknown allocator was called".to_owned());
        };
        match route.alloc(bytes, device, stream) {
            Ok((opened, block)) => {
                self.table.add(opened, route.tag.clone(), block);
                self.forget_refusal();
                pending_call::schedule();
                match usize::try_from(block.range.addr) {
                    Ok(addr) => ptr::with_exposed_provenance_mut(addr),
                    Err(error) => self.refuse(error.to_string()),
                }
            }
            Err(error) => self.refuse(error),
        }
    }

    pub(crate) fn make_default(&self, number: usize) {
        let route = self.routes.get(number).and_then(OnceLock::get).filter(|_| self.is_here());
        if let Some(route) = route {
            lock(&self.by_device).insert(route.ordinal, number);
        }
    }

    pub(super) fn alloc_by_default(&self, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
        if self.own_by_this_process().is_err() {
            return ptr::null_mut();
        }
        let number =
            u32::try_from(device).ok().and_then(|ordinal| lock(&self.by_device).get(&ordinal).copied());
        match number {
            Some(number) => self.alloc(number, bytes, device, stream),
            None => self.refuse(format!(
                "poorwill_alloc has no arena on cuda:{device}: name one with poorwill.torch.library(arena)"
            )),
        }
    }

    pub(super) fn free(&self, range: DeviceRange) {
        if !self.is_here() {
            return;
        }
        match self.table.free(range) {
            // A closed arena has released everything itself.
            Ok(_) | Err(PoolError::Closed) => {}
            Err(error) => self.record_refusal(chain(&error)),
        }
    }

    pub(super) fn take_closed(&self) -> Vec<Arc<Opened>> {
        if self.is_here() { self.table.take_closed() } else { Vec::new() }
    }

    pub(super) fn last_serial(&self) -> SegmentSerial {
        if self.is_here() { self.table.last_serial() } else { SegmentSerial(0) }
    }

    pub(super) fn carve(
        &self,
        serial: SegmentSerial,
        range: DeviceRange,
        holes: &[DeviceRange],
    ) -> Result<u64, PoolError> {
        if self.is_here() { self.table.carve(serial, range, holes) } else { Ok(0) }
    }

    pub(super) fn begins_at(&self, addr: u64) -> bool {
        self.is_here() && self.table.begins_at(addr)
    }

    pub(crate) fn tag_at(&self, opened: &Arc<Opened>, addr: u64) -> Option<Tag> {
        if self.is_here() { self.table.tag_at(opened, addr) } else { None }
    }

    pub(super) fn held(&self, ordinal: Option<u32>) -> (usize, u64) {
        if self.is_here() { self.table.held(ordinal) } else { (0, 0) }
    }

    /// Takes this thread's last refusal, or else any thread's, which may have worked for this one. An
    /// allocation clears its thread's. In a forked child it is always [`Forked`].
    pub(super) fn take_refusal(&self) -> Option<String> {
        match self.process.load(Ordering::Relaxed) {
            0 => None,
            owner if owner != process::id() => Some(Forked { owner }.to_string()),
            _ => {
                let (thread, mut refusals) = (thread_key(), lock(&self.refusals));
                let own = refusals.iter().position(|refusal| refusal.thread == thread);
                let number = own.or(refusals.len().checked_sub(1))?;
                Some(refusals.remove(number).message)
            }
        }
    }

    fn refuse(&self, message: String) -> *mut c_void {
        self.record_refusal(message);
        ptr::null_mut()
    }

    fn record_refusal(&self, message: String) {
        let thread = thread_key();
        let mut refusals = lock(&self.refusals);
        refusals.retain(|refusal| refusal.thread != thread);
        refusals.push(Refusal { message, thread });
    }

    /// PyTorch retries after it freed what it could.
    fn forget_refusal(&self) {
        let thread = thread_key();
        lock(&self.refusals).retain(|refusal| refusal.thread != thread);
    }
}

impl Route {
    fn alloc(&self, bytes: isize, device: c_int, stream: usize) -> Result<(Arc<Opened>, Block), String> {
        let Some(opened) = self.opened.upgrade().filter(|opened| !opened.is_closed()) else {
            return Err(format!("the arena of `{}` has been closed: open one again", self.tag));
        };
        if u32::try_from(device) != Ok(self.ordinal) {
            let (own, tag) = (self.ordinal, &self.tag);
            return Err(format!(
                "the pool of `{tag}` is on cuda:{own}, and was asked for memory of cuda:{device}"
            ));
        }
        let Ok(bytes) = u64::try_from(bytes) else {
            return Err(format!(
                "cannot allocate {bytes} bytes for `{}`: a size is never negative",
                self.tag
            ));
        };
        opened.check_margin(bytes)?;
        let stream = self.stream(&opened, stream)?;
        let mut request =
            AllocRequest::new(bytes, self.tag.clone()).on(stream).waiting_for_streams(REUSE_TIMEOUT);
        request.is_freed_in_parts = !is_one_block(bytes);
        match opened.with(|arena| arena.alloc(&request)) {
            Ok(block) => Ok((opened, block)),
            Err(ArenaError::Closed(message)) => Err(message),
            Err(ArenaError::Pool(error)) => {
                if matches!(error, PoolError::DeviceFull { .. }) {
                    // Others may need the rest of the device. The next trim reports an error of this one.
                    let _ = opened.arena().trim();
                }
                Err(chain(&error))
            }
        }
    }

    fn stream(&self, opened: &Opened, raw: usize) -> Result<StreamId, String> {
        if let Some(known) = lock(&self.streams).get(&raw) {
            return Ok(*known);
        }
        let adopted = adopt_stream(opened, raw)?;
        lock(&self.streams).insert(raw, adopted);
        Ok(adopted)
    }
}

/// Whether PyTorch requests this size for a single block. It splits segments of 20 MiB, for blocks of 1 to 10
/// MiB, and smaller ones.
fn is_one_block(bytes: u64) -> bool {
    bytes >= 10 << 20 && bytes != 20 << 20
}

pub(super) fn adopt_stream(opened: &Opened, stream: usize) -> Result<StreamId, String> {
    let Some(gpu) = opened.device().cuda() else {
        return Err(format!("{} is no GPU", opened.device().spec()));
    };
    // SAFETY: P5.
    unsafe { gpu.adopt_stream(stream) }.map_err(|error| error.to_string())
}

/// Distinguishes live threads; works also while a thread ends.
fn thread_key() -> usize {
    thread_local!(static KEY: u8 = const { 0 });
    KEY.with(|key| ptr::from_ref(key).addr())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
