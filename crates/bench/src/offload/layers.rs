//! Layers in host memory, with digests.

use std::sync::Arc;

use poorwill::driver::Result as DriverResult;
use poorwill::offload::{Buffer, BufferPin, Switches};
use poorwill::{Device, Digest, Driver, DriverError, HostBuffer, Op};

use super::plan::OffloadError;
use crate::figures::timed;
use crate::pattern::{self, Key};
use crate::process::touch;

/// Source of the layers' host memory.
#[derive(Debug, Clone)]
pub enum Source {
    /// Buffers of the arena's device, page-locked where machine and switches allow it.
    Buffers(Device, Switches),
    /// `host_alloc` of the arena's driver, for drivers without a [`Device`].
    Driver,
}

impl Source {
    pub(super) fn switches(&self) -> Switches {
        match self {
            Self::Buffers(_, switches) => *switches,
            Self::Driver => Switches::default(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Layers {
    /// By layer.
    pub(super) memory: Vec<Arc<HostBuffer>>,
    /// By layer and granule.
    pub(super) digests: Vec<Vec<Digest>>,
    /// Until every page was resident.
    pub(super) allocate_s: f64,
    /// Growth of the driver's host memory.
    pub(super) used_bytes: u64,
    /// Why a layer is not page-locked.
    pub(super) pageable_because: Option<String>,
    /// Keeps `memory` alive.
    _buffers: Vec<Buffer>,
}

impl Layers {
    /// The driver has no cached host memory before.
    pub(super) fn make(
        driver: &dyn Driver,
        source: &Source,
        layers: u32,
        layer_bytes: u64,
    ) -> Result<Self, OffloadError> {
        let held_bytes = driver.host_memory().held_bytes;
        let (mut allocated, mut allocate_s, mut pageable_because) = (Vec::new(), 0.0, None);
        for layer in 1..=layers {
            let refused = |source| OffloadError::Layer { layer, layers, layer_bytes, source };
            let (seconds, (memory, because)) =
                timed(|| LayerMemory::make(driver, source, layer_bytes)).map_err(refused)?;
            allocate_s += seconds;
            allocated.push(memory);
            pageable_because = pageable_because.or(because);
        }
        let used_bytes = driver.host_memory().held_bytes.saturating_sub(held_bytes);
        let granule_bytes = usize::try_from(driver.info().granule_bytes).unwrap_or(usize::MAX);
        let (mut memory, mut buffers, mut digests) = (Vec::new(), Vec::new(), Vec::new());
        for (layer, mut allocated) in (0..).zip(allocated) {
            let bytes = allocated.bytes_mut()?;
            pattern::write(Key::of([layer]), 0, bytes);
            digests.push(bytes.chunks(granule_bytes).map(Digest::of).collect());
            let (shared, buffer) = allocated.shared()?;
            memory.push(shared);
            buffers.extend(buffer);
        }
        Ok(Self { memory, digests, allocate_s, used_bytes, pageable_because, _buffers: buffers })
    }
}

/// Host memory of one layer before it is shared.
enum LayerMemory {
    Buffer(Buffer),
    Plain(HostBuffer),
}

impl LayerMemory {
    /// Also returns why the memory is not page-locked.
    fn make(driver: &dyn Driver, source: &Source, bytes: u64) -> DriverResult<(Self, Option<String>)> {
        let (mut memory, because) = match source {
            Source::Buffers(device, switches) => {
                let buffer = Buffer::new(device, bytes, BufferPin::Auto, *switches)?;
                let because = buffer.pageable_because().map(str::to_owned);
                (Self::Buffer(buffer), because)
            }
            Source::Driver => {
                let before_bytes = driver.host_memory().pinned_bytes;
                let buffer = driver.host_alloc(bytes)?;
                let is_pinned = driver.host_memory().pinned_bytes > before_bytes;
                (Self::Plain(buffer), (!is_pinned).then(|| "the driver made it so".to_owned()))
            }
        };
        if because.is_some() {
            touch(memory.bytes_mut()?);
        }
        Ok((memory, because))
    }

    fn bytes_mut(&mut self) -> DriverResult<&mut [u8]> {
        match self {
            Self::Buffer(buffer) => buffer.as_mut_slice().ok_or_else(in_use),
            Self::Plain(buffer) => Ok(buffer),
        }
    }

    fn shared(self) -> DriverResult<(Arc<HostBuffer>, Option<Buffer>)> {
        match self {
            Self::Buffer(buffer) => Ok((buffer.memory().ok_or_else(in_use)?, Some(buffer))),
            Self::Plain(buffer) => Ok((Arc::new(buffer), None)),
        }
    }
}

/// A driver that shares new memory is broken.
fn in_use() -> DriverError {
    DriverError::invalid(Op::HostAlloc, "host memory that was just allocated is in use elsewhere")
}
