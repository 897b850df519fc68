//! The symbols, by the chapters of NVIDIA's documentation.
//!
//! Their work is in the modules beside this one; the common part is [`crate::entry`].

mod checkpoint;
mod context;
mod copy;
mod device;
mod event;
mod memory;
mod module;
mod stream;

pub(crate) const SYMBOLS: &[&[&str]] = &[
    checkpoint::SYMBOLS,
    context::SYMBOLS,
    copy::SYMBOLS,
    device::SYMBOLS,
    event::SYMBOLS,
    memory::SYMBOLS,
    module::SYMBOLS,
    stream::SYMBOLS,
];
