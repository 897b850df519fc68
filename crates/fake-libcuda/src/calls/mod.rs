//! The symbols, by the chapters of NVIDIA's documentation.
//!
//! Each is a few lines: its own work is in the modules beside this one, and the common part in [`crate::entry`].

mod context;
mod copy;
mod device;
mod event;
mod memory;
mod module;
mod stream;
mod testing;

/// The symbols of each file.
pub(crate) const SYMBOLS: &[&[&str]] = &[
    context::SYMBOLS,
    copy::SYMBOLS,
    device::SYMBOLS,
    event::SYMBOLS,
    memory::SYMBOLS,
    module::SYMBOLS,
    stream::SYMBOLS,
];
