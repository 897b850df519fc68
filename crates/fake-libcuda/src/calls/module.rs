//! Modules and the launch of kernels.

use std::ffi::c_uint;

use crate::abi::{Code, Image, Name, Out, Params, Unused};
use crate::current::current;
use crate::entry::entries;
use crate::handle::{Handle, HandleKind, new_handle};
use crate::kernels::{self, Launch};
use crate::module::{Function, Module, entries as entries_of};

/// Maximum threads per block.
const THREADS_MAX: u64 = 1024;

entries! {
    call cuModuleLoadData(module: Out<Handle>, image: Image) {
        module.check()?;
        let current = current()?;
        let entries = entries_of(&image.text()?)?;
        let mut tables = current.state.tables();
        let handle = new_handle(HandleKind::Module);
        tables.modules.insert(handle, Module { context: current.context, entries });
        module.set(handle)
    }

    call cuModuleUnload(module: Handle) {
        let mut tables = current()?.state.tables();
        tables.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
        tables.functions.retain(|_, function| function.module != module);
        Ok(())
    }

    call cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Name) {
        function.check()?;
        let mut tables = current()?.state.tables();
        let found = tables.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let name = name.text()?;
        if !found.entries.contains(&name) {
            return Err(Code::NOT_FOUND);
        }
        let made = Function { context: found.context, module, name };
        let handle = new_handle(HandleKind::Function);
        tables.functions.insert(handle, made);
        function.set(handle)
    }

    #[allow(clippy::too_many_arguments)]
    call cuLaunchKernel(
        function: Handle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        handle: Handle,
        params: Params,
        extra: Unused,
    ) {
        let current = current()?;
        let stream = current.stream(handle)?;
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let launch = Launch { grid, block, shared_bytes };
        let threads: u64 = launch.block.iter().map(|n| u64::from(*n)).fold(1, u64::saturating_mul);
        let empty = launch.grid.contains(&0) || launch.block.contains(&0);
        if empty || threads > THREADS_MAX || shared_bytes > 48 << 10 {
            return Err(Code::INVALID_VALUE);
        }
        if !extra.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        let prepare = {
            let tables = current.state.tables();
            let of_this = tables.functions.get(&function).filter(|found| found.context == current.context);
            let name = &of_this.ok_or(Code::INVALID_HANDLE)?.name;
            kernels::by_name(name).ok_or_else(|| {
                eprintln!("fake libcuda: no function of the host stands in for the kernel `{name}`");
                Code::INVALID_IMAGE
            })?
        };
        let prepared = prepare(&params, &launch)?;
        if current.captures(handle)? {
            return Ok(());
        }
        let queued = current.device.host.launch(stream.id, &prepared.ranges, prepared.work);
        // Memory that is not mapped with access faults; on a GPU, a little later.
        stream.track(current.device, queued).map_err(|code| match code {
            Code::INVALID_VALUE => Code::ILLEGAL_ADDRESS,
            other => other,
        })
    }
}
