//! Host memory that copies own while they run.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Host memory: pageable, page-locked, or whatever its driver copies from best.
///
/// A driver drops it in any of its calls. So dropping it must not call the driver or the pool.
///
/// ```
/// use poorwill::{HostBuffer, HostMemory};
///
/// #[derive(Debug)]
/// struct Page(Box<[u8; 4096]>);
///
/// impl HostMemory for Page {
///     fn as_slice(&self) -> &[u8] {
///         &*self.0
///     }
///     fn as_mut_slice(&mut self) -> &mut [u8] {
///         &mut *self.0
///     }
/// }
/// assert_eq!(HostBuffer::new(Page(Box::new([0; 4096]))).len(), 4096);
/// ```
pub trait HostMemory: Send + Sync + fmt::Debug {
    /// The bytes.
    fn as_slice(&self) -> &[u8];
    /// The bytes, for writing.
    fn as_mut_slice(&mut self) -> &mut [u8];
}

impl HostMemory for Vec<u8> {
    fn as_slice(&self) -> &[u8] {
        self
    }
    fn as_mut_slice(&mut self) -> &mut [u8] {
        self
    }
}

/// An owned buffer of host memory, freed when dropped.
///
/// ```
/// use poorwill::HostBuffer;
///
/// let mut buffer = HostBuffer::from(vec![0; 3]);
/// buffer[1] = 7;
/// assert_eq!(*buffer, [0, 7, 0]);
/// ```
pub struct HostBuffer(Box<dyn HostMemory>);

impl HostBuffer {
    /// A buffer over `memory`.
    #[must_use]
    pub fn new(memory: impl HostMemory + 'static) -> Self {
        Self(Box::new(memory))
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl Deref for HostBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

impl From<Vec<u8>> for HostBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(bytes)
    }
}
