//! The symbols, by subject. No panic crosses into C.

use std::ffi::{c_char, c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{self, CallResult, Code, Handle, Memory, MemoryV2, Out, ProcessInfo, Text};
use crate::{processes, state};

/// The first version with CUDA 13.0, which is the fake libcuda's.
const DRIVER_VERSION: &str = "580.65.06";
/// The instance numbers of processes on an undivided card.
const NO_INSTANCE: c_uint = c_uint::MAX;

fn enter(body: impl FnOnce() -> CallResult) -> c_uint {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

/// Defines symbols: `NAME(ARGUMENTS) { BODY }`; the body returns an [`CallResult`].
macro_rules! entries {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)+) => {
        $(
            #[allow(non_snake_case)] // NVML's name.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> c_uint {
                enter(|| $body)
            }
        )+
    };
}

entries! {
    nvmlInit_v2() {
        state::open()
    }

    nvmlInitWithFlags(_flags: c_uint) {
        state::open()
    }

    nvmlShutdown() {
        state::close()
    }

    nvmlSystemGetDriverVersion(version: Out<u8>, len: c_uint) {
        state::get()?;
        version.set_text(DRIVER_VERSION, len)
    }
}

#[allow(non_snake_case)] // NVML's name.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    abi::text(code).as_ptr()
}

// Finding devices.
entries! {
    nvmlDeviceGetCount_v2(count: Out<c_uint>) {
        count.set(numbered(state::get()?.cards().count()))
    }

    nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Handle>) {
        device.set(nth(state::get()?.cards(), index).ok_or(Code::INVALID_ARGUMENT)?)
    }

    nvmlDeviceGetHandleByUUID(uuid: Text, device: Out<Handle>) {
        let state = state::get()?;
        device.set(state.by_uuid(&uuid.get()?).ok_or(Code::NOT_FOUND)?)
    }

    nvmlDeviceGetHandleByPciBusId_v2(id: Text, device: Out<Handle>) {
        let state = state::get()?;
        let bus = bus(&id.get()?).ok_or(Code::INVALID_ARGUMENT)?;
        let index = bus.checked_sub(1).ok_or(Code::NOT_FOUND)?;
        device.set(nth(state.cards(), index).ok_or(Code::NOT_FOUND)?)
    }
}

// Properties of a device.
entries! {
    nvmlDeviceGetUUID(device: Handle, uuid: Out<u8>, len: c_uint) {
        uuid.set_text(&state::get()?.device(device)?.uuid, len)
    }

    nvmlDeviceGetName(device: Handle, name: Out<u8>, len: c_uint) {
        let state = state::get()?;
        name.set_text(&state.name(device)?, len)
    }

    nvmlDeviceGetCudaComputeCapability(device: Handle, major: Out<c_int>, minor: Out<c_int>) {
        let capability = state::get()?.device(device)?.capability;
        major.set(capability.major)?;
        minor.set(capability.minor)
    }

    nvmlDeviceGetMemoryInfo(device: Handle, memory: Out<Memory>) {
        memory.set(memory_of(device)?)
    }

    nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: Out<MemoryV2>) {
        state::get()?.device(device)?;
        let version = memory.get()?.version;
        if version != MemoryV2::VERSION {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let Memory { total_bytes, free_bytes, used_bytes } = memory_of(device)?;
        memory.set(MemoryV2 { version, total_bytes, reserved_bytes: 0, free_bytes, used_bytes })
    }

    nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: Out<c_uint>, list: Out<ProcessInfo>) {
        let state = state::get()?;
        let device = state.device(device)?;
        let set = device.processes.iter();
        let set = set.map(|process| (process.pid.unwrap_or_else(std::process::id), process.used_bytes));
        let processes = set.chain(processes::on(device.uuid_text())).map(|(pid, used_bytes)| ProcessInfo {
            pid,
            used_bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        });
        let processes: Vec<ProcessInfo> = processes.collect();
        let space = count.get()?;
        count.set(numbered(processes.len()))?;
        match usize::try_from(space) {
            _ if processes.is_empty() => Ok(()),
            Ok(space) if space >= processes.len() => list.set_list(&processes),
            _ => Err(Code::INSUFFICIENT_SIZE),
        }
    }

    nvmlDeviceGetCurrPcieLinkGeneration(device: Handle, generation: Out<c_uint>) {
        generation.set(state::get()?.device(device)?.link.generation.ok_or(Code::NOT_SUPPORTED)?)
    }

    nvmlDeviceGetMaxPcieLinkGeneration(device: Handle, generation: Out<c_uint>) {
        generation.set(state::get()?.device(device)?.link.generation_max.ok_or(Code::NOT_SUPPORTED)?)
    }

    nvmlDeviceGetCurrPcieLinkWidth(device: Handle, width: Out<c_uint>) {
        width.set(state::get()?.device(device)?.link.width.ok_or(Code::NOT_SUPPORTED)?)
    }

    nvmlDeviceGetMaxPcieLinkWidth(device: Handle, width: Out<c_uint>) {
        width.set(state::get()?.device(device)?.link.width_max.ok_or(Code::NOT_SUPPORTED)?)
    }
}

// Cards and their instances.
entries! {
    nvmlDeviceGetMigMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) {
        let mode = c_uint::from(state::get()?.is_divided(device)?);
        current.set(mode)?;
        pending.set(mode)
    }

    nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: Out<c_uint>) {
        let state = state::get()?;
        count.set(numbered(state.instances(device)?.count()))
    }

    nvmlDeviceGetMigDeviceHandleByIndex(device: Handle, index: c_uint, instance: Out<Handle>) {
        let state = state::get()?;
        instance.set(nth(state.instances(device)?, index).ok_or(Code::NOT_FOUND)?)
    }

    nvmlDeviceIsMigDeviceHandle(device: Handle, is_instance: Out<c_uint>) {
        is_instance.set(c_uint::from(state::get()?.device(device)?.is_instance()))
    }

    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance: Handle, device: Out<Handle>) {
        let state = state::get()?;
        let found = state.device(instance)?;
        if !found.is_instance() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let parent = found.parent.as_ref().and_then(|uuid| state.by_uuid(uuid));
        device.set(parent.ok_or(Code::NOT_FOUND)?)
    }
}

/// As set, with what processes hold now.
fn memory_of(device: Handle) -> CallResult<Memory> {
    let state = state::get()?;
    let device = state.device(device)?;
    let held = processes::on(device.uuid_text()).into_iter().map(|(_, bytes)| bytes).sum();
    device.memory(held)
}

fn nth(mut handles: impl Iterator<Item = Handle>, index: c_uint) -> Option<Handle> {
    handles.nth(usize::try_from(index).ok()?)
}

fn numbered(count: usize) -> c_uint {
    c_uint::try_from(count).unwrap_or(c_uint::MAX)
}

/// The bus of `DOMAIN:BUS:DEVICE.FUNCTION`, all hexadecimal. Other domains and devices give 0, which no card
/// has.
fn bus(id: &str) -> Option<c_uint> {
    let (domain, rest) = id.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let number = |digits| c_uint::from_str_radix(digits, 16).ok();
    let (bus, others) = (number(bus)?, [number(domain)?, number(device)?, number(function)?]);
    Some(if others == [0; 3] { bus } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_does_not_cross_the_border() {
        assert_eq!(enter(|| panic!("on purpose")), 999);
        assert_eq!(enter(|| Err(Code::NOT_FOUND)), 6);
        assert_eq!(enter(|| Ok(())), 0);
    }

    #[test]
    fn bus_ids_are_read_with_short_and_long_domains() {
        for (id, expected) in [
            ("0000:01:00.0", Some(1)),
            ("00000000:0A:00.0", Some(10)),
            ("0001:01:00.0", Some(0)),
            ("0000:01:02.0", Some(0)),
            ("01:00.0", None),
            ("0000:x:00.0", None),
            ("", None),
        ] {
            assert_eq!(bus(id), expected, "{id}");
        }
    }
}
