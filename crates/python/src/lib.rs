//! The native half of the Python package `poorwill`: the module `poorwill._native`.
//!
//! Each module here owns the bindings of one part of the library and puts them in place with `register`;
//! `python/poorwill/__init__.py` says which of them are the package's own. Bindings hold no policy: they turn
//! Python's values into the library's types, and the library's errors into Python's, with the library's words.
//!
//! Memory leaves the library for C in `block/dlpack.rs` and `torch/`, and nowhere else is there anything unsafe; the
//! rules are in `docs/unsafe.md`.

#![allow(unsafe_code)]

mod arena;
mod block;
mod budget;
mod device;
mod errors;
mod offload;
mod process;
mod shared_memory;
mod sizes;
mod torch;

use pyo3::prelude::*;

/// The native half of poorwill; use the package `poorwill`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    shared_memory::register(module)?;
    sizes::register(module)?;
    device::register(module)?;
    torch::register(module)?;
    budget::register(module)?;
    arena::register(module)?;
    block::register(module)?;
    offload::register(module)
}
