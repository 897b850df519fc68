//! The module `poorwill._native`: the native half of the Python package.
//!
//! `python/poorwill/__init__.py` chooses what is public. Bindings hold no policy: they convert values and
//! errors, and keep the library's messages. Docs of public Python names equal those of `_native.pyi`, which a
//! test checks.
//!
//! Only `block/dlpack.rs` and `torch/` have unsafe code, for C callers; see `docs/unsafe.md`.

#![allow(unsafe_code)]

mod arena;
mod block;
mod budget;
mod current;
mod decision;
mod device;
mod errors;
mod exceptions;
mod hibernate;
mod interrupt;
mod lending;
mod offload;
mod process;
mod registry;
mod report;
mod request;
mod running;
mod shared_memory;
mod sizes;
mod torch;
mod torch_calls;

use pyo3::prelude::*;

/// Native half of poorwill; use the package `poorwill`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    shared_memory::register(module)?;
    sizes::register(module)?;
    device::register(module)?;
    torch::register(module)?;
    budget::register(module)?;
    lending::register(module)?;
    decision::register(module)?;
    report::register(module)?;
    arena::register(module)?;
    current::register(module)?;
    torch_calls::register(module)?;
    block::register(module)?;
    hibernate::register(module)?;
    offload::register(module)
}
