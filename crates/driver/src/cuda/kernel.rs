//! Kernels: PTX modules and their launches.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverErrorKind, Op};

use super::context::Context;
use super::ffi::Raw;
use super::stream::Stream;
use crate::ledger::{Result, of};

/// Code on one GPU; unloaded with its last [`Function`].
#[derive(Debug, Clone)]
pub struct Module(Arc<Loaded>);

/// An entry of a module.
#[derive(Debug, Clone)]
pub struct Function {
    module: Arc<Loaded>,
    raw: Raw,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelArg {
    /// `.u32`
    U32(u32),
    /// `.u64`, addresses among them
    U64(u64),
}

/// The grid of a launch. Converts from `(blocks, threads)`, without dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, in one dimension.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl From<(u32, u32)> for Grid {
    fn from((blocks, threads): (u32, u32)) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }
}

#[derive(Debug)]
struct Loaded {
    context: Arc<Context>,
    raw: Raw,
}

impl Module {
    pub(super) fn load_in(context: &Arc<Context>, ptx: &str) -> DriverResult<Self> {
        let _entered = context.enter(Op::LoadModule)?;
        let load = || -> Result<Self> {
            let text = c_string(ptx)?;
            // SAFETY: C2, the text ends in a zero and outlives the call.
            let raw =
                context.api().get(|raw| unsafe { (context.api().module_load_data)(raw, text.as_ptr()) })?;
            Ok(Self(Arc::new(Loaded { context: Arc::clone(context), raw })))
        };
        load().map_err(of(Op::LoadModule))
    }

    /// The entry of this name.
    ///
    /// # Errors
    /// `Device` if there is none.
    pub fn function(&self, name: &str) -> DriverResult<Function> {
        let context = &self.0.context;
        let _entered = context.enter(Op::LoadModule)?;
        let find = || -> Result<Function> {
            let name = c_string(name)?;
            // SAFETY: C2 and C3.
            let raw = context
                .api()
                .get(|raw| unsafe { (context.api().module_get_function)(raw, self.0.raw, name.as_ptr()) })?;
            Ok(Function { module: Arc::clone(&self.0), raw })
        };
        find().map_err(of(Op::LoadModule))
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter(Op::LoadModule) else { return };
        // SAFETY: C3, unloaded once; work in flight holds a `Function`.
        let _ = unsafe { (self.context.api().module_unload)(self.raw) };
    }
}

impl Function {
    pub(super) fn is_in(&self, context: &Context) -> bool {
        self.module.context.raw() == context.raw()
    }

    /// The caller has entered the context, and keeps the function until the kernel has finished.
    ///
    /// # Safety
    /// `args` are the parameters of the kernel, which touches only memory that stays mapped until it has
    /// finished.
    pub(super) unsafe fn queue(&self, stream: &Stream, grid: Grid, args: &[KernelArg]) -> Result<()> {
        let api = self.module.context.api();
        let mut values: Vec<u64> = args.iter().map(|arg| arg.value()).collect();
        let mut pointers: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let Grid { blocks, threads, shared_bytes } = grid;
        // SAFETY: C3; the driver reads the parameters before the call returns, and the caller vouches for them.
        api.check(unsafe {
            (api.launch_kernel)(
                self.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl KernelArg {
    /// The bytes that the kernel reads, only the first four for a `.u32`.
    fn value(self) -> u64 {
        match self {
            Self::U32(value) => {
                let mut bytes = [0; 8];
                bytes[..4].copy_from_slice(&value.to_ne_bytes());
                u64::from_ne_bytes(bytes)
            }
            Self::U64(value) => value,
        }
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| DriverErrorKind::InvalidArgument {
        reason: format!("a text with a zero in it: {error}"),
    })
}
