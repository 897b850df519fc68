//! What a claim really takes: the device's memory in use, looked at many times while something happens.
//!
//! A graph capture or a profiling run takes memory for moments that nobody sees afterwards. A [`Watch`] samples what
//! is in use on a thread of its own, beginning with what was in use before, and holds the peak against the claim.
//! What comes and goes between two samples is missed.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use poorwill_core::budget::Claim;
use poorwill_core::{DriverError, DriverErrorKind, Op};

use crate::open::Device;

/// How long between two looks.
const INTERVAL: Duration = Duration::from_millis(1);

/// Samples until it is stopped or dropped.
#[derive(Debug)]
pub struct Watch {
    claim: Arc<Claim>,
    sampler: Sampler,
    /// Its end ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// The process that the thread is in; a forked child has none.
    process: u32,
}

/// Who counts, from where.
#[derive(Debug, Clone)]
struct Sampler {
    device: Device,
    /// Only this process counts, where somebody tells; otherwise everyone on the device.
    is_own: bool,
    before_bytes: u64,
}

impl Watch {
    /// Begins; what is in use now is not the claim's.
    ///
    /// # Errors
    /// When the device does not tell what is in use; when the process can start no thread.
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
                // A look that fails is one look less: the last one, which counts, is the caller's.
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

    /// Takes a last look, and ends.
    ///
    /// # Errors
    /// When the device does not tell what is in use; the peak until then stands in the claim.
    pub fn stop(mut self) -> Result<Arc<Claim>, DriverError> {
        let last = self.sampler.growth_bytes();
        self.end();
        self.claim.measured(last?);
        Ok(Arc::clone(&self.claim))
    }

    fn end(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if self.process != std::process::id() {
            // Nobody is there to be told or waited for, and the channel's locks may be held for ever.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread {
            // The thread calls nothing that panics; if it did, the last look still counts.
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
        // With less in use than before there is nothing to count.
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
