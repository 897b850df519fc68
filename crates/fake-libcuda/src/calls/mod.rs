//! The symbols, by the chapters of NVIDIA's documentation.
//!
//! Each is a few lines: what is special to it lies in the modules beside this one, and what all have in common
//! in [`crate::entry`].

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
