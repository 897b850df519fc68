//! Backing up before a sleep, in the background.
//!
//! A thread copies new or changed granules of live chunks on a low-priority stream. For volatile tags, and
//! where digests are slow, the sleep copies anyway: only backup buffers are prepared. Blocks stay usable; the
//! chunk being copied stays mapped. A call that needs a tag exclusively waits for the copies in flight, and
//! ends the preparation. The sleep finds later writes by comparing digests.
//!
//! A storage that measures needs the chunk held, too. Host memory is awaited with nothing held, since a sleep
//! would wait as well. So a chunk that needs a new buffer is held once to measure it, and once more to copy it.

mod chunk;
mod job;
mod plan;
mod report;
mod store;
mod thread;
mod visit;

pub use self::job::Preparation;
pub use self::report::{PrepareEnd, PrepareProgress, PrepareReport};
