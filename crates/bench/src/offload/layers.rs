//! Layers in host memory: made, written, and known by their digests.

use std::sync::Arc;

use poorwill::driver::Result as DriverResult;
use poorwill::offload::{Buffer, BufferPin, Switches};
use poorwill::{Device, Digest, Driver, DriverError, HostBuffer, Op};

use super::plan::Error;
use crate::figures::timed;
use crate::pattern::{self, Key};
use crate::process::touch;

/// Where layers get their host memory from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Buffers of this device, which is the arena's, page-locked where the machine and the switches have it so.
    Buffers(Device, Switches),
    /// `host_alloc` of the arena's driver: for drivers that no [`Device`] stands for.
    Driver,
}

impl Source {
    /// What is turned off.
    pub(super) fn switches(&self) -> Switches {
        match self {
            Self::Buffers(_, switches) => *switches,
            Self::Driver => Switches::default(),
        }
    }
}

/// The layers.
#[derive(Debug)]
pub(super) struct Layers {
    /// The bytes of each.
    pub(super) memory: Vec<Arc<HostBuffer>>,
    /// The digests of each, by granule.
    pub(super) digests: Vec<Vec<Digest>>,
    /// How long making them took, until every page was there.
    pub(super) made_s: f64,
    /// By how much the driver's host memory grew with them.
    pub(super) used_bytes: u64,
    /// Why one of them is not page-locked, if one is not.
    pub(super) pageable_because: Option<String>,
    /// What the memory belongs to.
    _buffers: Vec<Buffer>,
}

impl Layers {
    /// Makes and writes them. No host memory is kept before.
    pub(super) fn make(
        driver: &dyn Driver,
        source: &Source,
        layers: u32,
        layer_bytes: u64,
    ) -> Result<Self, Error> {
        let held_bytes = driver.host_memory().held_bytes;
        let (mut made, mut made_s, mut pageable_because) = (Vec::new(), 0.0, None);
        for layer in 1..=layers {
            let refused = |source| Error::Layer { layer, layers, layer_bytes, source };
            let (seconds, (memory, because)) =
                timed(|| Memory::make(driver, source, layer_bytes)).map_err(refused)?;
            made_s += seconds;
            made.push(memory);
            pageable_because = pageable_because.or(because);
        }
        let used_bytes = driver.host_memory().held_bytes.saturating_sub(held_bytes);
        let granule_bytes = usize::try_from(driver.info().granule_bytes).unwrap_or(usize::MAX);
        let (mut memory, mut buffers, mut digests) = (Vec::new(), Vec::new(), Vec::new());
        for (layer, mut made) in (0..).zip(made) {
            let bytes = made.bytes_mut()?;
            pattern::write(Key::of([layer]), 0, bytes);
            digests.push(bytes.chunks(granule_bytes).map(Digest::of).collect());
            let (shared, buffer) = made.shared()?;
            memory.push(shared);
            buffers.extend(buffer);
        }
        Ok(Self { memory, digests, made_s, used_bytes, pageable_because, _buffers: buffers })
    }
}

/// That of one layer, which nobody else has yet.
enum Memory {
    Buffer(Buffer),
    Plain(HostBuffer),
}

impl Memory {
    /// Makes it, until every page is there; and why it is not page-locked, if it is not.
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

/// Nobody else has seen it, so a driver that says so is wrong.
fn in_use() -> DriverError {
    DriverError::invalid(Op::HostAlloc, "host memory that was just made is in use by somebody else")
}
