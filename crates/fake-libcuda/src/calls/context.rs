//! Primary contexts, and the stack of contexts of each thread.

use std::ffi::{c_int, c_uint};

use crate::abi::{Code, Out};
use crate::context;
use crate::current::{current, current_even_if_failed};
use crate::entry::entries;
use crate::handle::Handle;

/// `CU_CTX_*` flags that exist.
const FLAGS: c_uint = 0x1FF;

/// Priorities of streams: smaller numbers are higher.
pub(super) const PRIORITY_LOWEST: c_int = 0;
pub(super) const PRIORITY_HIGHEST: c_int = -5;

entries! {
    call cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) {
        context.check()?;
        context.set(context::retain(device)?)
    }

    call cuDevicePrimaryCtxRelease_v2(device: c_int) {
        context::release(device)
    }

    call cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        let is_active = context::is_active(device)?;
        flags.set(0)?;
        active.set(c_int::from(is_active))
    }

    call cuCtxCreate_v2(context: Out<Handle>, flags: c_uint, device: c_int) {
        context.check()?;
        if flags & !FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        context.set(context::create(device)?)
    }

    call cuCtxDestroy_v2(context: Handle) {
        context::destroy(context)
    }

    stack cuCtxPushCurrent_v2(context: Handle) {
        context::push(context)
    }

    stack cuCtxPopCurrent_v2(context: Out<Handle>) {
        let popped = context::pop()?;
        if context.is_null() { Ok(()) } else { context.set(popped) }
    }

    stack cuCtxGetCurrent(context: Out<Handle>) {
        context.set(context::top().unwrap_or(0))
    }

    stack cuCtxSetCurrent(context: Handle) {
        context::set(context)
    }

    call cuCtxGetDevice(device: Out<c_int>) {
        let ordinal = current_even_if_failed()?.device.ordinal;
        device.set(c_int::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?)
    }

    call cuCtxGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        current()?;
        for (out, priority) in [(lowest, PRIORITY_LOWEST), (highest, PRIORITY_HIGHEST)] {
            if !out.is_null() {
                out.set(priority)?;
            }
        }
        Ok(())
    }

    call cuCtxSetLimit(limit: c_int, value: usize) {
        // Stack, heap and output of kernels: here they take no memory.
        let _ = (current()?, value);
        if (0..=2).contains(&limit) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    look cuCtxSynchronize() {
        let current = current()?;
        current.state.tables().captures.check_device_runs(current.device.ordinal)?;
        current.wait_for_device()
    }
}
