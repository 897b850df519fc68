//! The C functions by which PyTorch's caching allocator gets and frees segments.
//!
//! PyTorch calls them with its allocator's lock held, on threads that may hold Python's. So they take neither
//! lock, run no Python and call no PyTorch. They hold no lock of ours while an arena calls the driver, and
//! let no panic out.
//!
//! PyTorch cannot pass an arena and a tag, so each pair of them, a *route*, has its own function.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{mem, ptr};

use poorwill::DeviceRange;

use super::route::{ROUTES_MAX, routes};

/// Allocates from the arena that `poorwill.torch.library` set for the device. NULL without one, or if it is
/// full.
#[unsafe(no_mangle)]
extern "C" fn poorwill_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    guarded(ptr::null_mut(), || routes().alloc_by_default(bytes, device, stream.addr()))
}

/// Frees a segment; ignores addresses that are not ours.
#[unsafe(no_mangle)]
extern "C" fn poorwill_free(segment: *mut c_void, bytes: isize, _device: c_int, _stream: *mut c_void) {
    let bytes = u64::try_from(bytes).unwrap_or(0);
    let range = DeviceRange::new(segment.addr() as u64, bytes);
    guarded((), || routes().free(range));
}

extern "C" fn alloc_on<const ROUTE: usize>(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    guarded(ptr::null_mut(), || routes().alloc(ROUTE, bytes, device, stream.addr()))
}

fn guarded<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        // Dropping the payload might panic again.
        mem::forget(panic);
        otherwise
    })
}

type Alloc = extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;

macro_rules! row {
    ($row:literal) => {
        [
            alloc_on::<{ $row * 16 }>,
            alloc_on::<{ $row * 16 + 1 }>,
            alloc_on::<{ $row * 16 + 2 }>,
            alloc_on::<{ $row * 16 + 3 }>,
            alloc_on::<{ $row * 16 + 4 }>,
            alloc_on::<{ $row * 16 + 5 }>,
            alloc_on::<{ $row * 16 + 6 }>,
            alloc_on::<{ $row * 16 + 7 }>,
            alloc_on::<{ $row * 16 + 8 }>,
            alloc_on::<{ $row * 16 + 9 }>,
            alloc_on::<{ $row * 16 + 10 }>,
            alloc_on::<{ $row * 16 + 11 }>,
            alloc_on::<{ $row * 16 + 12 }>,
            alloc_on::<{ $row * 16 + 13 }>,
            alloc_on::<{ $row * 16 + 14 }>,
            alloc_on::<{ $row * 16 + 15 }>,
        ]
    };
}

static ALLOC: [[Alloc; 16]; ROUTES_MAX / 16] = [
    row!(0),
    row!(1),
    row!(2),
    row!(3),
    row!(4),
    row!(5),
    row!(6),
    row!(7),
    row!(8),
    row!(9),
    row!(10),
    row!(11),
    row!(12),
    row!(13),
    row!(14),
    row!(15),
];

/// The alloc and free functions of a route.
pub(crate) fn addresses(route: usize) -> Option<(usize, usize)> {
    let alloc = *ALLOC.get(route / 16)?.get(route % 16)?;
    let free: extern "C" fn(*mut c_void, isize, c_int, *mut c_void) = poorwill_free;
    Some((alloc as usize, free as usize))
}
