//! Routes: which arena, and which tag, PyTorch's segments are taken from.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use poorwill::{AllocRequest, Block, DeviceRange, DeviceSpec, PoolError, StreamId, Tag};

use super::segments::{Book, Moment};
use crate::arena::{Failed, Opened};

/// Most pairs of an arena and a tag in the life of a process.
pub(super) const ROUTES_MAX: usize = 256;

/// How long a segment waits for work on freed memory before more is created: longer than the copies and conversions of
/// a load, which would map all that they have freed meanwhile.
const PATIENCE: Duration = Duration::from_millis(250);

/// All routes of this process. Never torn down: PyTorch gives segments back until the very end.
#[derive(Debug)]
pub(super) struct Routes {
    routes: [OnceLock<Route>; ROUTES_MAX],
    /// How many there are. Held by who adds one.
    count: Mutex<usize>,
    /// The routes of `poorwill_alloc`, by the number of the device.
    by_device: Mutex<HashMap<u32, usize>>,
    book: Book,
    /// What was refused last, until somebody asks.
    refusal: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Route {
    /// An arena that was closed is not kept.
    opened: Weak<Opened>,
    tag: Tag,
    ordinal: u32,
    /// The names of PyTorch's streams.
    streams: Mutex<HashMap<usize, StreamId>>,
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
}

pub(super) fn routes() -> &'static Routes {
    static ROUTES: OnceLock<Routes> = OnceLock::new();
    ROUTES.get_or_init(|| Routes {
        routes: [const { OnceLock::new() }; ROUTES_MAX],
        count: Mutex::new(0),
        by_device: Mutex::default(),
        book: Book::default(),
        refusal: Mutex::new(None),
    })
}

impl Routes {
    /// The number of the route to an arena and a tag, made if need be.
    pub(super) fn to(&self, opened: &Arc<Opened>, tag: &Tag) -> Result<usize, NoRoute> {
        let DeviceSpec::Cuda { ordinal } = *opened.device.spec() else {
            return Err(NoRoute::NoGpu { device: opened.device.spec().clone() });
        };
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
        let streams = Mutex::default();
        // Nobody else sets it: the count is held.
        let _ = route.set(Route { opened: Arc::downgrade(opened), tag: tag.clone(), ordinal, streams });
        *count += 1;
        Ok(number)
    }

    pub(super) fn alloc(&self, number: usize, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
        let Some(route) = self.routes.get(number).and_then(OnceLock::get) else {
            return self.refuse("an allocator that nobody has made was called");
        };
        match route.alloc(bytes, device, stream) {
            Ok((opened, block)) => {
                self.book.add(opened, block);
                match usize::try_from(block.range.addr) {
                    Ok(addr) => ptr::with_exposed_provenance_mut(addr),
                    Err(error) => self.refuse(error),
                }
            }
            Err(error) => self.refuse(error),
        }
    }

    /// Has `poorwill_alloc` take this route for the route's device.
    pub(super) fn make_default(&self, number: usize) {
        if let Some(route) = self.routes.get(number).and_then(OnceLock::get) {
            lock(&self.by_device).insert(route.ordinal, number);
        }
    }

    pub(super) fn alloc_by_default(&self, bytes: isize, device: c_int, stream: usize) -> *mut c_void {
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
        match self.book.free(place) {
            // A closed arena has taken everything back itself, and a forked child has nothing to give.
            Ok(_) | Err(PoolError::Closed | PoolError::WrongProcess(_)) => {}
            Err(error) => *lock(&self.refusal) = Some(error.to_string()),
        }
    }

    pub(super) fn moment(&self) -> Moment {
        self.book.moment()
    }

    pub(super) fn carve(
        &self,
        moment: Moment,
        place: DeviceRange,
        holes: &[DeviceRange],
    ) -> Result<u64, PoolError> {
        self.book.carve(moment, place, holes)
    }

    pub(super) fn begins_at(&self, addr: u64) -> bool {
        self.book.begins_at(addr)
    }

    pub(super) fn held(&self) -> (usize, u64) {
        self.book.held()
    }

    /// What was refused last. It is forgotten then.
    pub(super) fn take_refusal(&self) -> Option<String> {
        lock(&self.refusal).take()
    }

    fn refuse(&self, why: impl ToString) -> *mut c_void {
        *lock(&self.refusal) = Some(why.to_string());
        ptr::null_mut()
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
        let bytes = u64::try_from(bytes).map_err(|error| error.to_string())?;
        let stream = self.stream(&opened, stream)?;
        let request = AllocRequest::new(bytes, self.tag.clone()).on(stream).patient_for(PATIENCE);
        let block = opened.with(|arena| arena.alloc(&request)).map_err(|error| match error {
            Failed::Closed(words) => words,
            Failed::Pool(error) => error.to_string(),
        })?;
        Ok((opened, block))
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

/// The name of a stream of PyTorch's on the device of an arena.
pub(super) fn watch(opened: &Opened, stream: usize) -> Result<StreamId, String> {
    let Some(gpu) = opened.device.cuda() else { return Err(format!("{} is no GPU", opened.device.spec())) };
    // SAFETY: P5.
    unsafe { gpu.adopt_stream(stream) }.map_err(|error| error.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
