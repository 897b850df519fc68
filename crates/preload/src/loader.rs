//! Symbols behind this library's own: of the global scope, else in what the loader has loaded, whatever its name and scope.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

/// A library or the program, as the loader lists them.
#[derive(Debug)]
struct LoadedObject {
    /// Empty for the program.
    name: CString,
    segments: Vec<Range<u64>>,
}

/// Objects in the loader's order.
#[derive(Debug)]
pub(crate) struct LoadedObjects(Vec<LoadedObject>);

impl LoadedObjects {
    /// Those behind this library. What is ahead passes its calls on to it: they never go back.
    pub(crate) fn behind_own() -> Self {
        let mut objects: Vec<LoadedObject> = Vec::new();
        // SAFETY: `collect` gets this list only, which outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut objects).cast()) };
        let own = objects.iter().position(|object| object.has((collect as *const ()).addr()));
        Self(objects.split_off(own.map_or(0, |own| own + 1)))
    }

    /// A symbol of the caller's dependencies, else of any object. It stays loaded from now on.
    pub(crate) fn symbol(&self, name: &CStr, caller: usize) -> Option<*mut c_void> {
        let of_object =
            |object: &LoadedObject| object.open(0)?.symbol(name).filter(|found| self.is_kept(*found));
        let dependencies = self.of(caller).and_then(of_object);
        dependencies.or_else(|| self.0.iter().find_map(of_object))
    }

    fn of(&self, address: usize) -> Option<&LoadedObject> {
        self.0.iter().find(|object| object.has(address))
    }

    /// Whether an object here has the symbol and can be kept for ever.
    fn is_kept(&self, symbol: *mut c_void) -> bool {
        self.of(symbol.addr()).is_some_and(|object| object.open(libc::RTLD_NODELETE).is_some())
    }
}

/// A symbol of the global scope behind this library, where the loader binds calls first. It stays loaded from now on.
pub(crate) fn global_symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a terminated text.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    let mut place = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address may be asked about, and `place` can be written.
    if found.is_null() || unsafe { libc::dladdr(found, place.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it was written, since that was no failure.
    let file = unsafe { place.assume_init() }.dli_fname;
    // SAFETY: the loader's own text of what is loaded; nothing is loaded, so no code runs.
    let handle = unsafe { libc::dlopen(file, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    let kept = (!handle.is_null()).then_some(OpenObject(handle));
    kept.map(|_| found)
}

impl LoadedObject {
    fn has(&self, address: usize) -> bool {
        self.segments.iter().any(|segment| segment.contains(&(address as u64)))
    }

    /// `None` if it has been unloaded meanwhile.
    fn open(&self, flags: c_int) -> Option<OpenObject> {
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | flags;
        // SAFETY: a terminated text; nothing is loaded, so no code runs.
        let handle = unsafe { libc::dlopen(self.name.as_ptr(), flags) };
        (!handle.is_null()).then_some(OpenObject(handle))
    }
}

/// An object that stays loaded as long as this lives.
#[derive(Debug)]
struct OpenObject(*mut c_void);

impl OpenObject {
    /// Of the object, or else of its dependencies.
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open object, and a terminated text.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

impl Drop for OpenObject {
    fn drop(&mut self) {
        // SAFETY: opened once, and closed here only.
        unsafe { libc::dlclose(self.0) };
    }
}

/// Adds an object to the list at `objects`.
///
/// # Safety
/// As `dl_iterate_phdr` calls it, with the list that it was given.
unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, objects: *mut c_void) -> c_int {
    // SAFETY: the loader's, during this call.
    let info = unsafe { &*info };
    // SAFETY: the caller's list, which nothing else uses during the call.
    let objects = unsafe { &mut *objects.cast::<Vec<LoadedObject>>() };
    if info.dlpi_name.is_null() || info.dlpi_phdr.is_null() {
        return 0;
    }
    // SAFETY: not NULL, so a terminated text.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned();
    // SAFETY: not NULL, so as many headers as it says.
    let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let loaded = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let segments = loaded.map(|header| {
        let begin = info.dlpi_addr.wrapping_add(header.p_vaddr);
        begin..begin.wrapping_add(header.p_memsz)
    });
    objects.push(LoadedObject { name, segments: segments.collect() });
    0
}
