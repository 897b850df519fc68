//! The calling thread's last error and last note. Each text is printed at most once, up to a number of texts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::{mem, ptr};

use crate::code::{Failure, Result, SUCCESS, UNKNOWN};

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
    static NOTE: RefCell<CString> = RefCell::default();
}

/// Each text is kept for ever, and who has so many reads no more.
const PRINTED_MAX: usize = 100;

static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Runs `work`. A failure or a panic becomes `otherwise` of its code, and the thread's last error.
pub(crate) fn guarded<T>(otherwise: impl FnOnce(c_int) -> T, work: impl FnOnce() -> Result<T>) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => {
            let text = failure.to_string();
            if matches!(failure, Failure::Setting { .. }) {
                print(&text);
            }
            keep(&ERROR, &text);
            otherwise(failure.code())
        }
        Err(panic) => {
            // Dropping the payload might panic again.
            mem::forget(panic);
            keep(&ERROR, "a thread panicked in poorwill's preload library: this is a bug, please report it");
            otherwise(UNKNOWN)
        }
    }
}

/// As [`guarded`], for a call that returns a code only.
pub(crate) fn code_of(work: impl FnOnce() -> Result<()>) -> c_int {
    guarded(|code| code, || work().map(|()| SUCCESS))
}

/// What is no error, and may surprise.
pub(crate) fn note(text: &str) {
    print(text);
    keep(&NOTE, text);
}

/// For a call whose result says less than its error.
pub(crate) fn forget_error() {
    keep(&ERROR, "");
}

/// Valid until the thread's next error.
pub(crate) fn last_error() -> *const c_char {
    kept(&ERROR)
}

/// Valid until the thread's next note.
pub(crate) fn last_note() -> *const c_char {
    kept(&NOTE)
}

type Slot = std::thread::LocalKey<RefCell<CString>>;

fn keep(slot: &'static Slot, text: &str) {
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    // A thread that ends keeps nothing.
    let _ = slot.try_with(|slot| slot.replace(text));
}

fn kept(slot: &'static Slot) -> *const c_char {
    slot.try_with(|slot| slot.borrow().as_ptr()).unwrap_or(ptr::null())
}

fn print(text: &str) {
    // In a forked child a thread that does not exist there may hold the lock, so it is not waited for.
    let Ok(mut printed) = PRINTED.try_lock() else { return };
    if printed.len() < PRINTED_MAX && printed.insert(text.to_owned()) {
        eprintln!("poorwill: {text}");
        if printed.len() == PRINTED_MAX {
            eprintln!("poorwill: no further notes are printed");
        }
    }
}
