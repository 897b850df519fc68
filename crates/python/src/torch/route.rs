//! Routes: which arena, and which tag, PyTorch's segments are taken from.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use poorwill::{AllocRequest, Block, DeviceRange, DeviceSpec, PoolError, StreamId, Tag, chain};

use super::afterwards;
use super::segments::{Book, Moment};
use crate::arena::{Failed, Opened};

/// Most pairs of an arena and a tag in the life of a process.
pub(super) const ROUTES_MAX: usize = 256;

/// How long a segment waits for work on freed memory before more is created: longer than the copies and conversions of
/// a load, which would map all that they have freed meanwhile.
const PATIENCE: Duration = Duration::from_millis(250);

/// All routes of this process. Never torn down: PyTorch gives segments back until the very end.
///
/// In a forked child there are none: nothing is handed out there, nothing taken back, and no lock waited for, which
/// a thread may hold that does not exist there.
#[derive(Debug)]
pub(super) struct Routes {
    /// Whose they are; 0 as long as they are nobody's.
    process: AtomicU32,
    routes: [OnceLock<Route>; ROUTES_MAX],
    /// How many there are. Held by who adds one.
    count: Mutex<usize>,
    /// The routes of `poorwill_alloc`, by the number of the device.
    by_device: Mutex<HashMap<u32, usize>>,
    book: Book,
    /// What was refused to each thread last, until somebody asks, in the order of time.
    refusals: Mutex<Vec<Refusal>>,
}

#[derive(Debug)]
struct Refusal {
    words: String,
    /// Whose request it was: the mark of the thread.
    thread: usize,
}

#[derive(Debug)]
struct Route {
    /// An arena that was closed is not kept.
    opened: Weak<Opened>,
    tag: Tag,
    ordinal: u32,
    /// The names of PyTorch's streams.
    streams: Mutex<HashMap<usize, StreamId>>,
    /// How many scopes say that PyTorch gives large segments back without having cut them.
    uncut: AtomicUsize,
}

/// Why there is no route.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoute {
    #[error("{device} is no GPU: PyTorch's tensors need an arena on one, like poorwill.arena(\"cuda:0\")")]
    NoGpu { device: DeviceSpec },
    #[error(
        "this process has had {ROUTES_MAX} pairs of an arena and a tag, the most there can be: use arenas and tags again \
         instead of opening others"
    )]
    TooMany,
    #[error(transparent)]
    Forked(#[from] Forked),
}

/// The caller is a fork of the process whose routes these are.
#[derive(Debug, thiserror::Error)]
#[error(
    "PyTorch's segments are those of process {owner}, and this is its fork {}: use a process that was started afresh, \
     as multiprocessing's \"spawn\" does",
    process::id()
)]
pub(super) struct Forked {
    owner: u32,
}

pub(super) fn routes() -> &'static Routes {
    static ROUTES: OnceLock<Routes> = OnceLock::new();
    ROUTES.get_or_init(|| Routes {
        process: AtomicU32::new(0),
        routes: [const { OnceLock::new() }; ROUTES_MAX],
        count: Mutex::new(0),
        by_device: Mutex::default(),
        book: Book::default(),
        refusals: Mutex::default(),
    })
}

impl Routes {
    /// Makes them this process's, unless they are another's.
    fn own(&self) -> Result<(), Forked> {
        let this = process::id();
        match self.process.compare_exchange(0, this, Ordering::Relaxed, Ordering::Relaxed) {
            Err(owner) if owner != this => Err(Forked { owner }),
            _ => Ok(()),
        }
    }

    /// Whether there may be anything, and it is this process's.
    pub(super) fn is_here(&self) -> bool {
        self.process.load(Ordering::Relaxed) == process::id()
    }

    /// The number of the route to an arena and a tag, made if need be.
    pub(super) fn to(&self, opened: &Arc<Opened>, tag: &Tag) -> Result<usize, NoRoute> {
        let DeviceSpec::Cuda { ordinal } = *opened.device.spec() else {
            return Err(NoRoute::NoGpu { device: opened.device.spec().clone() });
        };
        self.own()?;
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
        let Some(route) = self.routes.get(number) else { return Err(NoRoute::TooMany) };
        let (streams, uncut) = Default::default();
        // Nobody else sets it: the count is held.
        let _ =
            route.set(Route { opened: Arc::downgrade(opened), tag: tag.clone(), ordinal, streams, uncut });
        *count += 1;
        Ok(number)
    }

    pub(super) fn alloc(&self, number: usize, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
        if self.own().is_err() {
            return ptr::null_mut();
        }
        let Some(route) = self.routes.get(number).and_then(OnceLock::get) else {
            return self.refuse("an allocator that nobody has made was called".to_owned());
        };
        match route.alloc(bytes, device, stream) {
            Ok((opened, block)) => {
                self.book.add(opened, block);
                self.forget_refusal();
                afterwards::note();
                match usize::try_from(block.range.addr) {
                    Ok(addr) => ptr::with_exposed_provenance_mut(addr),
                    Err(error) => self.refuse(error.to_string()),
                }
            }
            Err(error) => self.refuse(error),
        }
    }

    /// Has `poorwill_alloc` take this route for the route's device.
    pub(super) fn make_default(&self, number: usize) {
        let route = self.routes.get(number).and_then(OnceLock::get).filter(|_| self.is_here());
        if let Some(route) = route {
            lock(&self.by_device).insert(route.ordinal, number);
        }
    }

    /// Notes that a scope begins, or ends, in which segments of this route are given back as a whole.
    pub(super) fn leave_uncut(&self, number: usize, begins: bool) {
        if let Some(route) = self.routes.get(number).and_then(OnceLock::get).filter(|_| self.is_here()) {
            if begins {
                route.uncut.fetch_add(1, Ordering::Relaxed);
            } else {
                route.uncut.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn alloc_by_default(&self, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
        if self.own().is_err() {
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

    pub(super) fn free(&self, place: DeviceRange) {
        if !self.is_here() {
            return;
        }
        match self.book.free(place) {
            // A closed arena has taken everything back itself.
            Ok(_) | Err(PoolError::Closed) => {}
            Err(error) => self.note(chain(&error)),
        }
    }

    pub(super) fn take_closed(&self) -> Vec<Arc<Opened>> {
        if self.is_here() { self.book.take_closed() } else { Vec::new() }
    }

    pub(super) fn moment(&self) -> Moment {
        if self.is_here() { self.book.moment() } else { Moment(0) }
    }

    pub(super) fn carve(
        &self,
        moment: Moment,
        place: DeviceRange,
        holes: &[DeviceRange],
    ) -> Result<u64, PoolError> {
        if self.is_here() { self.book.carve(moment, place, holes) } else { Ok(0) }
    }

    pub(super) fn begins_at(&self, addr: u64) -> bool {
        self.is_here() && self.book.begins_at(addr)
    }

    pub(super) fn held(&self, ordinal: Option<u32>) -> (usize, u64) {
        if self.is_here() { self.book.held(ordinal) } else { (0, 0) }
    }

    /// What was refused last to this thread, or else to any, which may have worked for this one; unless the same thread
    /// has been served since. It is forgotten then. In a forked child, why everything is.
    pub(super) fn take_refusal(&self) -> Option<String> {
        match self.process.load(Ordering::Relaxed) {
            0 => None,
            owner if owner != process::id() => Some(Forked { owner }.to_string()),
            _ => {
                let (thread, mut refusals) = (mark_of_thread(), lock(&self.refusals));
                let own = refusals.iter().position(|refusal| refusal.thread == thread);
                let number = own.or(refusals.len().checked_sub(1))?;
                Some(refusals.remove(number).words)
            }
        }
    }

    fn refuse(&self, words: String) -> *mut c_void {
        self.note(words);
        ptr::null_mut()
    }

    fn note(&self, words: String) {
        let thread = mark_of_thread();
        let mut refusals = lock(&self.refusals);
        refusals.retain(|refusal| refusal.thread != thread);
        refusals.push(Refusal { words, thread });
    }

    /// PyTorch asks again, when it has given back what it could.
    fn forget_refusal(&self) {
        let thread = mark_of_thread();
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
        let stream = self.stream(&opened, stream)?;
        let mut request = AllocRequest::new(bytes, self.tag.clone()).on(stream).patient_for(PATIENCE);
        request.is_freed_whole = is_one_block(bytes) && self.uncut.load(Ordering::Relaxed) > 0;
        match opened.with(|arena| arena.alloc(&request)) {
            Ok(block) => Ok((opened, block)),
            Err(Failed::Closed(words)) => Err(words),
            Err(Failed::Pool(error)) => {
                if matches!(error, PoolError::DeviceFull { .. }) {
                    // The last that the device had was not enough: others may need it now. What is refused here, the
                    // next trim tells.
                    let _ = opened.arena.trim();
                }
                Err(chain(&error))
            }
        }
    }

    /// The name of a stream of PyTorch's.
    fn stream(&self, opened: &Opened, raw: usize) -> Result<StreamId, String> {
        if let Some(known) = lock(&self.streams).get(&raw) {
            return Ok(*known);
        }
        let adopted = watch(opened, raw)?;
        lock(&self.streams).insert(raw, adopted);
        Ok(adopted)
    }
}

/// Whether PyTorch asks for a segment of this size for one block: it cuts those of 20 MiB, which it asks for where blocks
/// of 1 to 10 MiB are to go, and smaller ones.
fn is_one_block(bytes: u64) -> bool {
    bytes >= 10 << 20 && bytes != 20 << 20
}

/// The name of a stream of PyTorch's on the device of an arena.
pub(super) fn watch(opened: &Opened, stream: usize) -> Result<StreamId, String> {
    let Some(gpu) = opened.device.cuda() else { return Err(format!("{} is no GPU", opened.device.spec())) };
    // SAFETY: P5.
    unsafe { gpu.adopt_stream(stream) }.map_err(|error| error.to_string())
}

/// Tells the threads that there are from each other. Also there while a thread ends.
fn mark_of_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| ptr::from_ref(mark).addr())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
