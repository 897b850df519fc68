//! Measures the real size of a claim.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use poorwill_core::budget::Claim;
use poorwill_core::{DriverError, DriverErrorKind, Op};

use crate::open::Device;

const INTERVAL: Duration = Duration::from_millis(1);

/// Samples the device's memory in use on a thread, and records the peak growth in a claim.
///
/// Graph captures and profiling runs take memory only for moments; changes between two samples are missed.
///
/// ```
/// use std::sync::Arc;
///
/// use poorwill::budget::Watch;
/// use poorwill::{Device, Tag};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(&"host:64MiB".parse()?)?;
/// let (_, envelope) = device.envelope(None)?;
/// let claim = Arc::new(envelope.claim(Tag::cudagraph(), 8 << 20)?);
/// let watch = Watch::start(&device, claim)?;
/// // Capture graphs here.
/// let claim = watch.stop()?;
/// println!("{:?} bytes at most, {} above the claim", claim.peak_bytes(), claim.over_bytes());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Watch {
    claim: Arc<Claim>,
    sampler: Sampler,
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// A forked child has no thread.
    process: u32,
}

#[derive(Debug, Clone)]
struct Sampler {
    device: Device,
    /// Counts this process alone where its use is known.
    is_own: bool,
    before_bytes: u64,
}

impl Watch {
    /// Starts sampling. Memory in use now does not count.
    ///
    /// # Errors
    /// When memory in use is unknown, or no thread starts.
    pub fn start(device: &Device, claim: Arc<Claim>) -> Result<Self, DriverError> {
        let mut sampler = Sampler {
            device: device.clone(),
            is_own: device.process_used_bytes().is_some(),
            before_bytes: 0,
        };
        sampler.before_bytes = sampler.used_bytes()?;
        claim.measured(0);
        let (stop, stopped) = mpsc::channel::<()>();
        let (of_thread, measured) = (sampler.clone(), Arc::clone(&claim));
        let thread = thread::Builder::new().name("poorwill-watch".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                // Skip a failed sample: the last one is the caller's.
                if let Ok(bytes) = of_thread.growth_bytes() {
                    measured.measured(bytes);
                }
            }
        });
        let thread = thread.map_err(|error| {
            let reason = format!("no thread can be started that samples what is in use: {error}");
            DriverError::new(Op::MemoryInfo, DriverErrorKind::Unsupported { reason })
        })?;
        Ok(Self { claim, sampler, stop: Some(stop), thread: Some(thread), process: std::process::id() })
    }

    /// Takes the last sample and ends.
    ///
    /// # Errors
    /// When memory in use is unknown; the claim keeps the peak so far.
    pub fn stop(mut self) -> Result<Arc<Claim>, DriverError> {
        let last = self.sampler.growth_bytes();
        self.end();
        self.claim.measured(last?);
        Ok(Arc::clone(&self.claim))
    }

    fn end(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if self.process != std::process::id() {
            // A forked child has no thread to stop, and the channel's locks may stay locked.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread {
            // After a panic, the last sample still counts.
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

impl Sampler {
    fn growth_bytes(&self) -> Result<u64, DriverError> {
        Ok(self.used_bytes()?.saturating_sub(self.before_bytes))
    }

    fn used_bytes(&self) -> Result<u64, DriverError> {
        if self.is_own {
            let gone = || DriverErrorKind::Unsupported {
                reason: "NVML no longer reports what this process uses".into(),
            };
            return self.device.process_used_bytes().ok_or_else(|| DriverError::new(Op::MemoryInfo, gone()));
        }
        let memory = self.device.driver().memory_info()?;
        Ok(memory.total_bytes.saturating_sub(memory.free_bytes))
    }
}

#[cfg(test)]
mod tests {
    use poorwill_core::{AllocRequest, PoolConfig, Tag};
    use poorwill_testkit::watchdog::eventually;

    use super::*;
    use crate::arena::Arena;

    #[test]
    fn the_peak_is_seen() {
        let device = Device::open(&"host:64MiB".parse().unwrap()).unwrap();
        let (_, envelope) = device.envelope(None).unwrap();
        let limited = PoolConfig::default().limited_to(32 << 20);
        let arena = Arena::open_within(&device, &envelope, limited).unwrap();
        let before = arena.alloc(&AllocRequest::new(4 << 20, Tag::weights())).unwrap();
        let claim = Arc::new(envelope.claim(Tag::cudagraph(), 8 << 20).unwrap());
        let watch = Watch::start(&device, Arc::clone(&claim)).unwrap();
        let taken = arena.alloc(&AllocRequest::new(12 << 20, Tag::cudagraph())).unwrap();
        eventually("a sample sees it", || claim.peak_bytes() >= Some(12 << 20));
        arena.free(taken.id).unwrap();
        arena.trim().unwrap();
        let claim = watch.stop().unwrap();
        assert_eq!((claim.peak_bytes(), claim.over_bytes()), (Some(12 << 20), 4 << 20));
        arena.free(before.id).unwrap();
        arena.trim().unwrap();
        let watch = Watch::start(&device, claim).unwrap();
        assert_eq!(watch.stop().unwrap().peak_bytes(), Some(12 << 20));
    }

    #[test]
    fn what_is_taken_at_the_end_counts() {
        let device = Device::open(&"host:64MiB".parse().unwrap()).unwrap();
        let arena = Arena::open_within(
            &device,
            device.envelope(None).as_ref().map(|(_, e)| e).unwrap(),
            PoolConfig::default(),
        )
        .unwrap();
        let claim = Arc::new(arena.envelope().claim_rest(Tag::cudagraph()));
        let watch = Watch::start(&device, claim).unwrap();
        arena.alloc(&AllocRequest::new(2 << 20, Tag::cudagraph())).unwrap();
        let claim = watch.stop().unwrap();
        assert_eq!((claim.peak_bytes(), claim.over_bytes()), (Some(2 << 20), 2 << 20));
    }
}
