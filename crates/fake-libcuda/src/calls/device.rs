//! The version, errors, and properties of devices.

use std::ffi::{c_char, c_int};

use poorwill_core::Driver;

use crate::abi::{CallResult, Code, Out, names};
use crate::entry::entries;
use crate::simulation::Simulation;
use crate::{state, uuid};

/// The supported CUDA version: 13.0.
const VERSION: c_int = 13000;

entries! {
    early cuDriverGetVersion(version: Out<c_int>) {
        version.set(VERSION)
    }

    free cuGetErrorName(error: c_int, name: Out<*const c_char>) {
        let known = names(error);
        name.set(known.map_or(std::ptr::null(), |(name, _)| name.as_ptr()))?;
        known.map(drop).ok_or(Code::INVALID_VALUE)
    }

    free cuGetErrorString(error: c_int, text: Out<*const c_char>) {
        let known = names(error);
        text.set(known.map_or(std::ptr::null(), |(_, text)| text.as_ptr()))?;
        known.map(drop).ok_or(Code::INVALID_VALUE)
    }

    call cuDeviceGetCount(count: Out<c_int>) {
        count.set(c_int::try_from(state::get()?.devices().len()).unwrap_or(c_int::MAX))
    }

    call cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        state::get()?.device(ordinal)?;
        device.set(ordinal)
    }

    call cuDeviceGetName(name: Out<c_char>, len: c_int, device: c_int) {
        let device = state::get()?.device(device)?;
        let mig = device.simulation.mig().iter().map(|profile| format!(" MIG {profile}")).collect::<String>();
        name.set_text(&format!("Poorwill fake GPU {}{mig}", device.ordinal), len)
    }

    call cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) {
        let simulation = &state::get()?.device(device)?.simulation;
        value.set(attribute_value(attribute, device, simulation)?)
    }

    call cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        let state = state::get()?;
        let (device, peer) = (state.device(device)?, state.device(peer)?);
        can.set(c_int::from(device.reaches(peer)))
    }

    call cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
        state::get()?.device(device)?;
        uuid.set(uuid::bytes(device.cast_unsigned()))
    }

    call cuDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: c_int) {
        state::get()?.device(device)?;
        let text = bus_id(device);
        if usize::try_from(len).is_ok_and(|len| len > text.len()) {
            id.set_text(&text, len)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    call cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        let device = state::get()?.device(device)?;
        let total = device.simulation.total_bytes(device.host.info().total_bytes);
        bytes.set(usize::try_from(total).unwrap_or(usize::MAX))
    }
}

/// Bus 1 for device 0, and so on.
fn bus_id(device: c_int) -> String {
    format!("0000:{:02X}:00.0", (device + 1) & 0xFF)
}

/// Attributes that a memory driver needs; others are refused, so that a new use is noticed.
fn attribute_value(attribute: c_int, device: c_int, simulation: &Simulation) -> CallResult<c_int> {
    Ok(match attribute {
        1 => 1024,                                     // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,                                 // MAX_BLOCK_DIM_X, Y
        4 => 64,                                       // MAX_BLOCK_DIM_Z
        5 => c_int::MAX,                               // MAX_GRID_DIM_X
        6 | 7 => 65535,                                // MAX_GRID_DIM_Y, Z
        8 => 48 << 10,                                 // MAX_SHARED_MEMORY_PER_BLOCK
        10 => 32,                                      // WARP_SIZE
        16 => 16,                                      // MULTIPROCESSOR_COUNT
        17 | 20 | 35 => 0,                             // KERNEL_EXEC_TIMEOUT, COMPUTE_MODE, TCC_DRIVER
        18 => c_int::from(simulation.is_integrated()), // INTEGRATED
        19 => 1,                                       // CAN_MAP_HOST_MEMORY
        31 => 1,                                       // CONCURRENT_KERNELS
        33 => (device + 1) & 0xFF,                     // PCI_BUS_ID
        34 | 50 => 0,                                  // PCI_DEVICE_ID, PCI_DOMAIN_ID
        40 => 2,                                       // ASYNC_ENGINE_COUNT
        41 => 1,                                       // UNIFIED_ADDRESSING
        75 => simulation.capability().major,           // COMPUTE_CAPABILITY_MAJOR
        76 => simulation.capability().minor,           // COMPUTE_CAPABILITY_MINOR
        83 => 0,                                       // MANAGED_MEMORY
        88 | 89 | 91 | 100 => 0, // pageable and host memory that the device accesses directly
        97 => simulation.shared_bytes(), // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        99 => 1,                 // HOST_REGISTER_SUPPORTED
        102 => 1,                // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        103 => 1,                // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        107 | 110 | 116 => 0,    // compression, GPUDirect RDMA with virtual memory
        111 => simulation.reserved_shared_bytes(), // RESERVED_SHARED_MEMORY_PER_BLOCK
        _ => return Err(Code::INVALID_VALUE),
    })
}
