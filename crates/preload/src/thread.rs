//! What each thread has set: its region, its tag, and how its memory is backed up.
//!
//! A thread that ends counts as outside of any region.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use crate::backup::BackupKind;
use crate::code::{Failure, Result};
use crate::environment::{self, Backend};

thread_local! {
    static FLAGS: RefCell<Flags> = const { RefCell::new(Flags::new()) };
    /// Whether this thread is inside of a call of this library.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// The device whose primary context this thread has made current.
    static READY: Cell<Option<c_int>> = const { Cell::new(None) };
}

/// `None` is what the environment says.
struct Flags {
    tag: Option<CString>,
    is_interesting: Option<bool>,
    cpu_backup: Option<bool>,
    disk_backup: Option<bool>,
    backend: Option<Backend>,
}

const DEFAULT_TAG: &CStr = c"default";

impl Flags {
    const fn new() -> Self {
        Self { tag: None, is_interesting: None, cpu_backup: None, disk_backup: None, backend: None }
    }
}

/// A region: whose memory it is, and how it is backed up.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) tag: String,
    pub(crate) kind: BackupKind,
}

/// The calling thread's region; `None` outside of one, and inside of this library.
pub(crate) fn region() -> Result<Option<Region>> {
    if INSIDE.try_with(Cell::get).unwrap_or(true) || !is_interesting()? {
        return Ok(None);
    }
    let kind = match (cpu_backup()?, disk_backup()?) {
        (true, true) => {
            return Err(Failure::Argument(
                "backups go to host memory or to disk: enable one of the two".to_owned(),
            ));
        }
        (true, false) => BackupKind::Cpu(backend()?),
        (false, true) => BackupKind::Disk,
        (false, false) => BackupKind::None,
    };
    let tag = read(|flags| flags.tag.clone()).flatten();
    let tag = tag.as_deref().unwrap_or(DEFAULT_TAG).to_string_lossy().into_owned();
    Ok(Some(Region { tag, kind }))
}

/// Marks the thread as inside of this library until it is dropped. Allocations meanwhile are the runtime's.
#[derive(Debug)]
pub(crate) struct Inside {
    before: bool,
}

impl Inside {
    pub(crate) fn enter() -> Self {
        Self { before: INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(self.before));
    }
}

/// Whether the thread must still make the context of `device` current; the next call says no.
pub(crate) fn is_new_on(device: c_int) -> bool {
    READY.try_with(|ready| ready.replace(Some(device)) != Some(device)).unwrap_or(true)
}

pub(crate) fn is_interesting() -> Result<bool> {
    flag(|flags| &mut flags.is_interesting, environment::ENABLE)
}

pub(crate) fn cpu_backup() -> Result<bool> {
    flag(|flags| &mut flags.cpu_backup, environment::CPU_BACKUP)
}

pub(crate) fn disk_backup() -> Result<bool> {
    flag(|flags| &mut flags.disk_backup, environment::DISK_BACKUP)
}

pub(crate) fn backend() -> Result<Backend> {
    read(|flags| flags.backend).flatten().map_or_else(environment::backend, Ok)
}

/// Valid until the thread sets another.
pub(crate) fn tag() -> *const c_char {
    let set = read(|flags| flags.tag.as_ref().map(|tag| tag.as_ptr())).flatten();
    set.unwrap_or(DEFAULT_TAG.as_ptr())
}

pub(crate) fn set_interesting(is_interesting: bool) {
    write(|flags| flags.is_interesting = Some(is_interesting));
}

pub(crate) fn set_cpu_backup(cpu_backup: bool) {
    write(|flags| flags.cpu_backup = Some(cpu_backup));
}

pub(crate) fn set_disk_backup(disk_backup: bool) {
    write(|flags| flags.disk_backup = Some(disk_backup));
}

pub(crate) fn set_backend(backend: Backend) {
    write(|flags| flags.backend = Some(backend));
}

pub(crate) fn set_tag(tag: &CStr) {
    write(|flags| flags.tag = Some(tag.to_owned()));
}

/// Reads the environment once for each thread.
fn flag(of: impl Fn(&mut Flags) -> &mut Option<bool>, variable: &'static str) -> Result<bool> {
    let flag = FLAGS.try_with(|flags| {
        let mut flags = flags.borrow_mut();
        let flag = of(&mut flags);
        match *flag {
            Some(set) => Ok(set),
            None => environment::flag(variable).inspect(|set| *flag = Some(*set)),
        }
    });
    flag.unwrap_or(Ok(false))
}

fn read<T>(of: impl FnOnce(&Flags) -> T) -> Option<T> {
    FLAGS.try_with(|flags| of(&flags.borrow())).ok()
}

fn write(change: impl FnOnce(&mut Flags)) {
    let _ = FLAGS.try_with(|flags| change(&mut flags.borrow_mut()));
}

/// A text that C passed; `None` for NULL.
///
/// # Safety
/// It is NULL or a terminated text that stays as it is during `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not NULL, and else as the caller promises.
    (!ptr::eq(text, ptr::null())).then(|| unsafe { CStr::from_ptr(text) })
}
