//! The C functions that PyTorch's caching allocator calls to get and to give back its segments.
//!
//! They are called with the allocator's lock held, and by threads that hold Python's. So nothing here takes the one or
//! the other, runs Python, or calls PyTorch ([`afterwards`](super::afterwards) leaves a call for later); no lock of ours is
//! held while an arena calls the driver; and no panic gets out.
//!
//! Which arena and which tag an allocation is for, PyTorch cannot say. So each pair of them, a *route*, has a function
//! of its own, and PyTorch is given the address of that.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{mem, ptr};

use poorwill::DeviceRange;

use super::route::{ROUTES_MAX, routes};

/// Gives PyTorch a segment of the arena that was named for the device with `poorwill.torch.library`. NULL where none was,
/// or it has no room.
#[unsafe(no_mangle)]
extern "C" fn poorwill_alloc(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    guarded(ptr::null_mut(), || routes().alloc_by_default(bytes, device, stream.addr()))
}

/// Takes a segment back. One that is not ours is left alone.
#[unsafe(no_mangle)]
extern "C" fn poorwill_free(segment: *mut c_void, bytes: isize, _device: c_int, _stream: *mut c_void) {
    let bytes = u64::try_from(bytes).unwrap_or(0);
    let place = DeviceRange::new(segment.addr() as u64, bytes);
    guarded((), || routes().free(place));
}

extern "C" fn alloc_on<const ROUTE: usize>(bytes: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    guarded(ptr::null_mut(), || routes().alloc(ROUTE, bytes, device, stream.addr()))
}

fn guarded<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        // What it carries might panic once more.
        mem::forget(panic);
        otherwise
    })
}

type Alloc = extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;

/// Sixteen routes in a row.
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

/// The addresses of the functions for a route: to get segments, and to give them back.
pub(super) fn addresses(route: usize) -> Option<(usize, usize)> {
    let alloc = *ALLOC.get(route / 16)?.get(route % 16)?;
    let free: extern "C" fn(*mut c_void, isize, c_int, *mut c_void) = poorwill_free;
    Some((alloc as usize, free as usize))
}
