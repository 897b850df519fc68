//! Other GPUs' links to host memory.
//!
//! A copy that is queued in another GPU's context takes that GPU's link, and NVLink or a switch from there on. So two links
//! carry twice as much. The context is made for the first stream over a link, and released with the last. On an H200 that
//! takes 0.12 s and 0.06 s, and meanwhile 0.26 GiB of that GPU.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use poorwill_core::{ByteSize, DriverErrorKind, Op};

use super::ffi::{Api, CuDevice};
use super::gpu::handle;
use super::primary::{CudaMemory, Opening, Primary};
use crate::ledger::{Result, invalid};
use crate::process::Owner;

/// With less free, a GPU's link is left to its own processes.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// `CU_LIMIT_STACK_SIZE`, `CU_LIMIT_PRINTF_FIFO_SIZE` and `CU_LIMIT_MALLOC_HEAP_SIZE`: half of a context's memory is for
/// kernels, which none runs there.
const KERNEL_LIMITS: [(c_int, usize); 3] = [(0, 0), (1, 4096), (2, 4096)];

/// `CUDA_ERROR_OUT_OF_MEMORY` and `CUDA_ERROR_DEVICE_UNAVAILABLE`.
const REFUSALS: [i64; 2] = [2, 46];

/// GPUs whose links may carry another one's copies, by the driver's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Links {
    /// Only its own.
    #[default]
    Own,
    /// Of every GPU that may access its memory ([`Peers`](super::Peers)).
    Reachable,
    /// Of these, which must be allowed to access its memory.
    Only(Vec<u32>),
}

#[derive(Debug)]
pub(super) struct LinkGpus(Vec<LinkGpu>);

#[derive(Debug)]
struct LinkGpu {
    api: &'static Api,
    number: u32,
    device: CuDevice,
    context: Mutex<Weak<Primary>>,
}

impl LinkGpus {
    pub(super) fn of(api: &'static Api, own: u32, requested: &Links, peers: &[u32]) -> Result<Self> {
        let mut numbers = match requested {
            Links::Own => Vec::new(),
            Links::Reachable => peers.to_vec(),
            Links::Only(numbers) => numbers.iter().copied().filter(|number| *number != own).collect(),
        };
        numbers.sort_unstable();
        numbers.dedup();
        if let Some(other) = numbers.iter().find(|number| !peers.contains(number)) {
            return Err(invalid(format!(
                "cuda:{other}'s link cannot carry copies of cuda:{own}: that GPU may not access its memory; name it in \
                 `peers`, too, or leave it out of `links`"
            )));
        }
        let gpu =
            |number| Ok(LinkGpu { api, number, device: handle(api, number)?, context: Mutex::default() });
        numbers.into_iter().map(gpu).collect::<Result<_>>().map(Self)
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|gpu| gpu.number)
    }

    pub(super) fn context(&self, nth: usize, owner: Owner) -> Result<Arc<Primary>> {
        let unknown = || invalid(format!("there is no link {nth}: of other GPUs there are {}", self.0.len()));
        let gpu = self.0.get(nth).ok_or_else(unknown)?;
        let mut context = gpu.context.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(retained) = context.upgrade() {
            return Ok(retained);
        }
        let made = Arc::new(gpu.make_context(owner)?);
        *context = Arc::downgrade(&made);
        Ok(made)
    }
}

impl LinkGpu {
    fn make_context(&self, owner: Owner) -> Result<Primary> {
        let _opening = Opening::of(self.number, owner);
        // No other code's: the limits are of the whole context.
        let context = Primary::create(self.api, self.device, owner).map_err(|error| self.refused(error))?;
        let entered = context.enter(Op::StreamCreate).map_err(|error| error.kind)?;
        if let CudaMemory::Known { free_bytes, .. } = context.memory()?
            && free_bytes < FREE_BYTES_MIN
        {
            let (number, free, least) = (self.number, ByteSize(free_bytes), ByteSize(FREE_BYTES_MIN));
            let reason =
                format!("cuda:{number} has {free} free, and copies over its link begin from {least} free on");
            return Err(DriverErrorKind::Unsupported { reason });
        }
        for (limit, value) in KERNEL_LIMITS {
            // SAFETY: C2. Where the driver refuses, the context is larger.
            let _ = unsafe { (self.api.ctx_set_limit)(limit, value) };
        }
        drop(entered);
        Ok(context)
    }

    /// Another time it may have memory, or be free of a process that has it alone.
    fn refused(&self, error: DriverErrorKind) -> DriverErrorKind {
        match error {
            DriverErrorKind::Device { code, text, .. } if REFUSALS.contains(&code) => {
                let reason = format!("cuda:{} has no context for copies over its link: {text}", self.number);
                DriverErrorKind::Unsupported { reason }
            }
            other => other,
        }
    }
}
