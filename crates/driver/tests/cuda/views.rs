//! Host memory of other owners that the GPU accesses in place. It is registered once for all views, found if
//! already page-locked, and released with the last view.

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, Symbol};
use poorwill_core::{Driver, DriverErrorKind};
use poorwill_driver::cuda::HostView;
use poorwill_driver::{BufferPin, CudaConfig, CudaDevice};
use poorwill_fake_libcuda::Census;
use poorwill_testkit::child;
use poorwill_testkit::device::cuda_config;
use poorwill_testkit::latch::{Latch, hold};
use poorwill_testkit::watchdog::{TEST_TIMEOUT, eventually};

use crate::turn;

fn open() -> CudaDevice {
    CudaDevice::open(&cuda_config()).unwrap()
}

/// Whole pages of this test's own, so that tests do not share one.
struct Pages(Vec<u8>);

const PAGE: usize = 1 << 16;

impl Pages {
    fn new(pages: usize) -> Self {
        Self(vec![0; (pages + 1) * PAGE])
    }

    /// From here on, in bytes.
    fn range(&self, from: usize, bytes: usize) -> Range<usize> {
        let start = self.0.as_ptr().expose_provenance().next_multiple_of(PAGE) + from;
        start..start + bytes
    }
}

fn seen(device: &CudaDevice, memory: Range<usize>) -> HostView {
    device.host_view(memory, true).unwrap().unwrap()
}

/// Whether it is page-locked.
fn is_locked(device: &CudaDevice, memory: Range<usize>) -> bool {
    device.host_view(memory, false).unwrap().is_some()
}

#[test]
fn memory_is_locked_as_long_as_there_are_views_of_it() {
    let _turn = turn();
    let device = open();
    let pages = Pages::new(4);
    let whole = pages.range(100, 3 * PAGE);
    assert!(!is_locked(&device, whole.clone()), "it has to be locked, and may not be");
    let first = seen(&device, whole.clone());
    assert!(first.is_registered_here());
    // Others of the same memory share what was done for the first: the same bytes at the same addresses.
    let part = seen(&device, pages.range(100 + PAGE, 17));
    assert_eq!(part.device_addr(), first.device_addr() + PAGE as u64);
    let before = seen(&device, pages.range(0, 50));
    assert_eq!(before.device_addr() + 100, first.device_addr(), "another tensor on its first page");
    drop(first);
    assert!(is_locked(&device, whole.clone()));
    drop(before);
    drop(part);
    assert!(!is_locked(&device, whole.clone()), "it has gone with the last");
    drop(seen(&device, whole));
}

#[test]
fn memory_that_lies_half_in_what_is_locked_is_refused() {
    let _turn = turn();
    let device = open();
    let pages = Pages::new(6);
    let middle = seen(&device, pages.range(PAGE + 100, 2 * PAGE));
    // Its last page is locked, its first page is, both are, or all between.
    for (from, bytes) in [(0, PAGE + 200), (2 * PAGE, 3 * PAGE), (0, 6 * PAGE), (PAGE / 2, 3 * PAGE)] {
        let error = device.host_view(pages.range(from, bytes), true).unwrap_err();
        assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }), "{error}");
        assert!(
            error.to_string().contains("share a page") && error.to_string().contains("HostBuffer"),
            "{error}"
        );
    }
    drop(middle);
    for page in 0..6 {
        assert!(!is_locked(&device, pages.range(page * PAGE, PAGE)), "page {page}");
    }
    drop(seen(&device, pages.range(0, 6 * PAGE)));
}

#[test]
fn memory_of_the_device_is_found_and_left_turn() {
    let _turn = turn();
    let device = open();
    let (mut buffer, because) = device.host_buffer(5 << 20, BufferPin::Always).unwrap();
    assert_eq!(because, None);
    buffer[7] = 9;
    let start = buffer.as_ptr().expose_provenance();
    let view = device.host_view(start + 4096..start + 8192, false).unwrap().unwrap();
    assert!(!view.is_registered_here());
    assert_eq!(Some(view.device_addr()), device.pinned_at(&buffer[4096..8192]));
    drop(view);
    assert!(device.pinned_at(&buffer).is_some());
    // A pageable buffer is locked like any other memory.
    let (pageable, _) = device.host_buffer(3 << 20, BufferPin::Never).unwrap();
    let start = pageable.as_ptr().expose_provenance();
    assert_eq!(device.pinned_at(&pageable), None);
    assert!(seen(&device, start..start + (3 << 20)).is_registered_here());
}

#[test]
fn no_bytes_and_no_memory_are_refused() {
    let _turn = turn();
    let device = open();
    let pages = Pages::new(1);
    for (memory, word) in [(pages.range(0, 0), "no bytes"), (usize::MAX - 10..usize::MAX, "no memory")] {
        let error = device.host_view(memory, true).unwrap_err();
        assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn threads_share_registrations() {
    let _turn = turn();
    let device = open();
    let pages = Pages::new(8);
    thread::scope(|scope| {
        for nth in 0..4 {
            let (device, pages) = (&device, &pages);
            scope.spawn(move || {
                for turn in 0..200 {
                    let from = (nth * 13 + turn * 7) % 5 * PAGE + nth;
                    // The owner of the pages shares them with requests for no more than these.
                    match device.host_view(pages.range(from, PAGE / 2), true) {
                        Ok(view) => assert!(view.is_some() && is_locked(device, pages.range(from, PAGE / 2))),
                        Err(error) => assert!(error.to_string().contains("share a page"), "{error}"),
                    }
                }
            });
        }
    });
    for page in 0..8 {
        assert!(!is_locked(&device, pages.range(page * PAGE, PAGE)), "page {page}");
    }
}

/// The fake library's own symbols: what others in the process would call.
struct Others {
    register: Symbol<unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int>,
    unregister: Symbol<unsafe extern "C" fn(*mut c_void) -> c_int>,
    set_current: Symbol<unsafe extern "C" fn(usize) -> c_int>,
    retain: Symbol<unsafe extern "C" fn(*mut usize, c_int) -> c_int>,
    census: Symbol<unsafe extern "C" fn(c_int, *mut Census) -> c_int>,
}

impl Others {
    fn load() -> Self {
        // SAFETY: a library of ours, which the driver under test loads as well.
        let library = unsafe { Library::new(poorwill_fake_libcuda::path()) }.unwrap();
        // SAFETY: the type that the symbol has there.
        let register = unsafe { library.get(b"cuMemHostRegister_v2") }.unwrap();
        // SAFETY: likewise.
        let unregister = unsafe { library.get(b"cuMemHostUnregister") }.unwrap();
        // SAFETY: likewise.
        let set_current = unsafe { library.get(b"cuCtxSetCurrent") }.unwrap();
        // SAFETY: likewise.
        let retain = unsafe { library.get(b"cuDevicePrimaryCtxRetain") }.unwrap();
        // SAFETY: likewise.
        let census = unsafe { library.get(b"poorwillFakeCensus") }.unwrap();
        std::mem::forget(library);
        Self { register, unregister, set_current, retain, census }
    }

    /// Returns when a call waits for all of the device's work.
    fn wait_for_a_call_that_waits(&self) {
        eventually("a call waits", || {
            let mut census = Census::default();
            // SAFETY: `census` outlives the call.
            assert_eq!(unsafe { (self.census)(0, &raw mut census) }, 0);
            census.calls_that_wait > 0
        });
    }

    /// As PyTorch has it: in the primary context.
    fn enter(&self) {
        let mut context = 0;
        // SAFETY: `context` outlives the call.
        assert_eq!(unsafe { (self.retain)(&raw mut context, 0) }, 0);
        // SAFETY: it is retained.
        assert_eq!(unsafe { (self.set_current)(context) }, 0);
    }
}

fn fake() -> CudaDevice {
    CudaDevice::open(&CudaConfig::gpu(0).through(Some(poorwill_fake_libcuda::path()))).unwrap()
}

#[test]
fn what_others_have_locked_is_seen_and_stays_theirs() {
    let _turn = turn();
    let (device, others) = (fake(), Others::load());
    others.enter();
    let pages = Pages::new(4);
    let theirs = pages.range(0, 2 * PAGE);
    let start = std::ptr::with_exposed_provenance_mut(theirs.start);
    // SAFETY: the pages live until the end of the test.
    assert_eq!(unsafe { (others.register)(start, 2 * PAGE, 2) }, 0);
    let view = device.host_view(pages.range(10, PAGE), false).unwrap().unwrap();
    assert!(!view.is_registered_here());
    drop(view);
    // Half page-locked by another owner: never locked in part, never copied.
    let error = device.host_view(pages.range(PAGE, 2 * PAGE), true).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }));
    assert!(error.to_string().contains("128 KiB") && error.to_string().contains("HostBuffer"), "{error}");
    // SAFETY: registered above, and still.
    assert_eq!(unsafe { (others.unregister)(start) }, 0);
    assert!(device.host_view(pages.range(10, PAGE), false).unwrap().is_none());
}

#[test]
fn a_driver_that_refuses_says_so_and_nothing_is_left() {
    // Buffers are made beforehand with calls 1 and on; the view's own is a later one, so that all fail.
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuMemHostRegister_v2:1:1000:2")]) {
        return;
    }
    let device = fake();
    let pages = Pages::new(2);
    let error = device.host_view(pages.range(0, PAGE), true).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("64 KiB") && error.to_string().contains("ulimit"), "{error}");
    assert!(device.host_view(pages.range(0, PAGE), false).unwrap().is_none());
}

#[test]
fn a_registration_that_cannot_end_is_not_shared() {
    if !child::in_a_child(&[("POORWILL_FAKE_CUDA_FAIL", "cuMemHostUnregister:1:2:999")]) {
        return;
    }
    let device = fake();
    let pages = Pages::new(2);
    drop(device.host_view(pages.range(0, PAGE), true).unwrap());
    // Other memory may lie there by now, and the device would see the old.
    let error = device.host_view(pages.range(64, 64), true).unwrap_err();
    assert!(error.to_string().contains("does not release"), "{error}");
    assert!(device.host_view(pages.range(64, 64), true).unwrap().unwrap().is_registered_here());
}

#[test]
fn a_view_outlives_the_device_that_made_it() {
    let _turn = turn();
    let (device, pages) = (fake(), Pages::new(1));
    let view = device.host_view(pages.range(0, PAGE), true).unwrap().unwrap();
    drop(device);
    drop(view);
    let device = fake();
    assert!(device.host_view(pages.range(0, PAGE), false).unwrap().is_none());
    device.check_process().unwrap();
}

#[test]
fn devices_and_gpus_share_registrations_in_any_order_of_release() {
    let _turn = turn();
    let (one, another) = (fake(), fake());
    let gpu = CudaConfig::gpu(1).through(Some(poorwill_fake_libcuda::path()));
    let other_gpu = CudaDevice::open(&gpu).unwrap();
    let pages = Pages::new(2);
    for (first, second) in [(&one, &another), (&one, &other_gpu), (&other_gpu, &one)] {
        let made = seen(first, pages.range(0, PAGE));
        let shares = seen(second, pages.range(100, PAGE / 2));
        assert_eq!(shares.device_addr(), made.device_addr() + 100);
        drop(made);
        assert!(is_locked(second, pages.range(0, PAGE)), "somebody has a view of it");
        drop(shares);
        assert!(!is_locked(first, pages.range(0, PAGE)) && !is_locked(second, pages.range(0, PAGE)));
    }
}

#[test]
fn a_hole_between_what_others_have_locked_is_found() {
    let _turn = turn();
    let (device, others) = (fake(), Others::load());
    others.enter();
    let pages = Pages::new(3);
    let at = |page: usize| std::ptr::with_exposed_provenance_mut(pages.range(page * PAGE, PAGE).start);
    for page in [0, 2] {
        // SAFETY: the pages live until the end of the test.
        assert_eq!(unsafe { (others.register)(at(page), PAGE, 1 | 2) }, 0);
    }
    let (whole, around) = (pages.range(0, 3 * PAGE), pages.range(PAGE - 1, PAGE + 2));
    for memory in [whole, around] {
        assert!(!is_locked(&device, memory.clone()), "not all of it");
        let error = device.host_view(memory, true).unwrap_err();
        assert!(error.to_string().contains("share a page"), "{error}");
    }
    for page in [0, 2] {
        // SAFETY: registered above.
        assert_eq!(unsafe { (others.unregister)(at(page)) }, 0);
    }
}

#[test]
fn memory_that_other_code_has_unlocked_is_forgotten() {
    let _turn = turn();
    let (device, others) = (fake(), Others::load());
    others.enter();
    let pages = Pages::new(1);
    let view = seen(&device, pages.range(0, PAGE));
    let start = std::ptr::with_exposed_provenance_mut(pages.range(0, PAGE).start);
    // SAFETY: registered by the view, of which nothing is read.
    assert_eq!(unsafe { (others.unregister)(start) }, 0);
    drop(view);
    assert!(seen(&device, pages.range(0, PAGE)).is_registered_here());
}

/// The result of a request on a separate thread.
fn requested<T: Send + 'static>(request: impl FnOnce() -> T + Send + 'static) -> mpsc::Receiver<T> {
    let (sender, receiver) = mpsc::channel();
    // The receiver may have given up.
    thread::spawn(move || sender.send(request()).is_ok());
    receiver
}

#[test]
fn a_registration_that_is_ending_does_not_block_other_memory() {
    let _turn = turn();
    let (device, pages) = (Arc::new(fake()), Arc::new(Pages::new(4)));
    let stream = device.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    let (first, other) = (seen(&device, pages.range(0, PAGE)), seen(&device, pages.range(2 * PAGE, PAGE)));
    hold(&*device, stream, &latch);
    let going = thread::spawn(move || drop(first));
    Others::load().wait_for_a_call_that_waits(); // The call that unregisters it.
    let (on, of) = (Arc::clone(&device), Arc::clone(&pages));
    let again = requested(move || is_locked(&on, of.range(0, 10)));
    let (on, of) = (Arc::clone(&device), Arc::clone(&pages));
    let others = requested(move || {
        assert!(is_locked(&on, of.range(2 * PAGE, PAGE)));
        seen(&on, of.range(3 * PAGE, PAGE))
    });
    let others = others.recv_timeout(TEST_TIMEOUT);
    let early = again.try_recv();
    latch.open();
    going.join().unwrap();
    assert!(others.is_ok_and(|view| view.is_registered_here()), "other memory waited for the GPU's work");
    assert!(early.is_err(), "it had gone before the work had ended");
    assert!(!again.recv().unwrap(), "who waited finds that it has gone");
    assert!(!is_locked(&device, pages.range(0, 10)), "it has gone");
    assert!(seen(&device, pages.range(0, 10)).is_registered_here());
    drop(other);
    device.stream_destroy(stream).unwrap();
}

#[test]
fn a_forked_child_releases_nothing_and_waits_for_nothing() {
    let _turn = turn();
    let (device, pages) = (Arc::new(fake()), Pages::new(4));
    let stream = device.stream_create().unwrap();
    let latch = Arc::new(Latch::default());
    let (going, staying) = (seen(&device, pages.range(0, PAGE)), seen(&device, pages.range(2 * PAGE, PAGE)));
    hold(&*device, stream, &latch);
    // A thread that the child does not have is letting go of one.
    let going = thread::spawn(move || drop(going));
    Others::load().wait_for_a_call_that_waits();
    // SAFETY: the child drops what it has, which takes no lock there, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_refused = device.host_view(pages.range(2 * PAGE, PAGE), true).is_err();
        drop((staying, device));
        // SAFETY: ends the child at once, with no destructor of the test harness.
        unsafe { libc::_exit(c_int::from(!is_refused)) };
    }
    let (mut ended, mut status, started) = (0, 0, Instant::now());
    while ended == 0 && started.elapsed() < TEST_TIMEOUT {
        // SAFETY: our own child; `status` outlives the call.
        ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        thread::sleep(Duration::from_millis(5));
    }
    if ended == 0 {
        // SAFETY: our own child.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: likewise.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
    }
    latch.open();
    going.join().unwrap();
    assert_eq!((ended, status), (child, 0), "the child waits, or was given a view");
    assert!(is_locked(&device, pages.range(2 * PAGE, PAGE)), "it is the parent's still");
    drop(staying);
    assert!(!is_locked(&device, pages.range(2 * PAGE, PAGE)));
    device.stream_destroy(stream).unwrap();
}
