//! The C interface beside `cudaMalloc` and `cudaFree`.
//!
//! Functions that return `int` return 0, or a code of `cudaError_t` with [`poorwill_tms_last_error`].

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::{ptr, slice};

use poorwill::DeviceRange;

use crate::code::Failure;
use crate::environment::Backend;
use crate::message::{self, code_of, guarded};
use crate::saver::saver;
use crate::thread::{self, Inside, text};

/// Sets the tag of the calling thread's allocations.
///
/// # Safety
/// `tag` is NULL or a terminated text.
#[unsafe(no_mangle)]
unsafe extern "C" fn tms_set_current_tag(tag: *const c_char) -> c_int {
    // SAFETY: N2, as the caller promises.
    let tag = unsafe { text(tag) };
    code_of(|| tag.map(thread::set_tag).ok_or_else(|| null("the tag")))
}

/// Valid until the calling thread sets another.
#[unsafe(no_mangle)]
extern "C" fn tms_get_current_tag() -> *const c_char {
    thread::tag()
}

/// Begins or ends a region of the calling thread.
#[unsafe(no_mangle)]
extern "C" fn tms_set_interesting_region(is_interesting: u8) {
    thread::set_interesting(is_interesting != 0);
}

/// Whether the calling thread is in a region.
#[unsafe(no_mangle)]
extern "C" fn tms_get_interesting_region() -> bool {
    guarded(|_| false, thread::is_interesting)
}

/// Sets whether the calling thread's allocations are backed up in host memory.
#[unsafe(no_mangle)]
extern "C" fn tms_set_enable_cpu_backup(enable: u8) {
    thread::set_cpu_backup(enable != 0);
}

/// Whether the calling thread's allocations are backed up in host memory.
#[unsafe(no_mangle)]
extern "C" fn tms_get_enable_cpu_backup() -> bool {
    guarded(|_| false, thread::cpu_backup)
}

/// Sets whether the calling thread's allocations are backed up on disk.
#[unsafe(no_mangle)]
extern "C" fn tms_set_enable_disk_backup(enable: u8) {
    thread::set_disk_backup(enable != 0);
}

/// Whether the calling thread's allocations are backed up on disk.
#[unsafe(no_mangle)]
extern "C" fn tms_get_enable_disk_backup() -> bool {
    guarded(|_| false, thread::disk_backup)
}

/// Sets what becomes of the calling thread's backups in host memory: `pinned` or `mmap`.
///
/// # Safety
/// `backend` is NULL or a terminated text.
#[unsafe(no_mangle)]
unsafe extern "C" fn tms_set_cpu_backup_backend(backend: *const c_char) -> c_int {
    // SAFETY: N2, as the caller promises.
    let backend = unsafe { text(backend) };
    code_of(|| {
        let name = backend.ok_or_else(|| null("the backend"))?.to_string_lossy();
        let named = Backend::named(&name);
        let backend =
            named.ok_or_else(|| Failure::Argument(format!("`{name}` is no backend: use pinned or mmap")))?;
        thread::set_backend(backend);
        Ok(())
    })
}

/// `pinned` or `mmap`; NULL for a wrong environment.
#[unsafe(no_mangle)]
extern "C" fn tms_get_cpu_backup_backend() -> *const c_char {
    guarded(|_| ptr::null(), || Ok(thread::backend()?.name().as_ptr()))
}

/// Sets the folder of backups on disk; an error once one was opened in another.
///
/// # Safety
/// `folder` is NULL or a terminated text.
#[unsafe(no_mangle)]
unsafe extern "C" fn tms_set_disk_backup_dir(folder: *const c_char) -> c_int {
    // SAFETY: N2, as the caller promises.
    let folder = unsafe { text(folder) };
    code_of(|| {
        let folder = folder.ok_or_else(|| null("the folder"))?;
        saver().settings()?.set_disk_folder(Path::new(OsStr::from_bytes(folder.to_bytes())))
    })
}

/// Allocations in regions fail where less than this would stay free.
#[unsafe(no_mangle)]
extern "C" fn set_memory_margin_bytes(margin_bytes: u64) -> c_int {
    code_of(|| {
        saver().settings()?.set_margin_bytes(margin_bytes);
        Ok(())
    })
}

/// Sets whether backups can still be read after a resume from now on.
#[unsafe(no_mangle)]
extern "C" fn tms_set_retain_cpu_backup(retain: u8) -> c_int {
    code_of(|| {
        saver().settings()?.set_retains(retain != 0);
        Ok(())
    })
}

/// Whether backups can still be read after a resume from now on.
#[unsafe(no_mangle)]
extern "C" fn tms_get_retain_cpu_backup() -> bool {
    guarded(|_| false, || saver().settings()?.retains())
}

/// Puts the memory of a tag to sleep; of all, for NULL or an empty text.
///
/// # Safety
/// `tag` is NULL or a terminated text.
#[unsafe(no_mangle)]
unsafe extern "C" fn tms_pause(tag: *const c_char) -> c_int {
    // SAFETY: N2, as the caller promises.
    let tag = unsafe { text(tag) };
    code_of(|| {
        let _inside = Inside::enter();
        saver().pause(name(tag).as_deref())
    })
}

/// Wakes the memory of a tag; all, for NULL or an empty text.
///
/// # Safety
/// `tag` is NULL or a terminated text.
#[unsafe(no_mangle)]
unsafe extern "C" fn tms_resume(tag: *const c_char) -> c_int {
    // SAFETY: N2, as the caller promises.
    let tag = unsafe { text(tag) };
    code_of(|| {
        let _inside = Inside::enter();
        saver().resume(name(tag).as_deref())
    })
}

/// The host's bytes of paused memory, within one allocation, until the next pause or resume. They must not be written.
/// NULL without an error where there is no backup.
#[unsafe(no_mangle)]
extern "C" fn tms_get_cpu_backup_pointer(pointer: *const u8, bytes: u64) -> *mut u8 {
    message::forget_error();
    let found = || saver().backup(DeviceRange::new(pointer.addr() as u64, bytes));
    guarded(|_| ptr::null_mut(), || Ok(found()?.unwrap_or(ptr::null()).cast_mut()))
}

/// Declares memory whose bytes the next pause need not keep: `count` pairs of an address and a length in bytes.
///
/// # Safety
/// `pairs` has `count` pairs, or `count` is 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn poorwill_tms_set_unused(pairs: *const u64, count: usize) -> c_int {
    code_of(|| {
        let ranges = match (count, pairs.is_null()) {
            (0, _) => Vec::new(),
            (_, true) => return Err(null("the list of pairs")),
            _ => {
                // SAFETY: not NULL, and else as the caller promises.
                let pairs = unsafe { slice::from_raw_parts(pairs.cast::<[u64; 2]>(), count) };
                pairs.iter().map(|[addr, bytes]| DeviceRange::new(*addr, *bytes)).collect()
            }
        };
        saver().set_unused(ranges)
    })
}

/// Writes the reports of the last pause and resume as JSON, cut to `bytes` with the ending zero. Returns the length of
/// the whole text, or -1.
///
/// # Safety
/// `buffer` has `bytes` bytes, or `bytes` is 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn poorwill_tms_report(buffer: *mut c_char, bytes: usize) -> c_int {
    guarded(
        |_| -1,
        || {
            let report = saver().report()?;
            if bytes > 0 && !buffer.is_null() {
                let cut = report.len().min(bytes - 1);
                // SAFETY: the caller has space for them, and it is not the report's.
                unsafe { buffer.copy_from_nonoverlapping(report.as_ptr().cast(), cut) };
                // SAFETY: within the caller's space.
                let end = unsafe { buffer.add(cut) };
                // SAFETY: as above.
                unsafe { end.write(0) };
            }
            Ok(c_int::try_from(report.len()).unwrap_or(c_int::MAX))
        },
    )
}

/// The bytes from `pointer` to the end of its allocation in a region; 0 for other memory.
#[unsafe(no_mangle)]
extern "C" fn poorwill_tms_owns(pointer: *const c_void) -> u64 {
    guarded(|_| 0, || saver().owned_bytes(pointer.addr() as u64))
}

/// The calling thread's last error, until its next one.
#[unsafe(no_mangle)]
extern "C" fn poorwill_tms_last_error() -> *const c_char {
    message::last_error()
}

/// The calling thread's last note, until its next one: something that is no error and may surprise.
#[unsafe(no_mangle)]
extern "C" fn poorwill_tms_last_message() -> *const c_char {
    message::last_note()
}

fn name(tag: Option<&CStr>) -> Option<String> {
    tag.map(|tag| tag.to_string_lossy().into_owned()).filter(|tag| !tag.is_empty())
}

fn null(what: &str) -> Failure {
    Failure::Argument(format!("{what} is NULL"))
}
