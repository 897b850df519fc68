//! Launches of the callers' kernels.

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{Op, Pending, StreamId};

use super::device::CudaDevice;
use super::kernel::{Function, Grid, KernelArg, Module};
use crate::ledger::{Result, invalid, of};

impl Module {
    /// Compiles PTX for the GPU.
    ///
    /// # Errors
    /// `InvalidArgument` for text with a zero byte; `Device` with what the driver reports.
    pub fn load(device: &CudaDevice, ptx: &str) -> DriverResult<Self> {
        Self::load_in(device.context(), ptx)
    }
}

impl CudaDevice {
    /// Queues a kernel, on a grid or on `(blocks, threads)`.
    ///
    /// # Errors
    /// `UnknownHandle`; `InvalidArgument` for a function of another GPU; what the driver reports for the
    /// launch, or at `wait`.
    ///
    /// # Safety
    /// `args` must be the parameters of the kernel, in number, order and type. The kernel must touch only memory
    /// that stays mapped until it has finished, and that nothing else relies on meanwhile.
    pub unsafe fn launch(
        &self,
        stream: StreamId,
        function: &Function,
        grid: impl Into<Grid>,
        args: &[KernelArg],
    ) -> DriverResult<Pending<()>> {
        let op = Op::LaunchKernel;
        let _entered = self.enter(op)?;
        let grid = grid.into();
        let launch = || -> Result<Pending<()>> {
            if !function.is_in(self.context()) {
                return Err(invalid("the function was loaded on another GPU".into()));
            }
            let stream = self.queues().running_stream(stream)?;
            let flight = self.queues().submit(&stream, function.clone(), |function| {
                // SAFETY: what this function's caller promises.
                unsafe { function.queue(&stream, grid, args) }
            })?;
            Ok(flight.pending(op, |_function| Ok(())))
        };
        launch().map_err(of(op))
    }
}
