//! A meter that knows what is lent: beside the free memory of each GPU, what processes give up at once.
//!
//! Promises: what is free and what is reclaimable are never more than a GPU has. With a broker that does not answer
//! nothing is reclaimable, and the log says so once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::spawn_blocking;

use super::{Cleared, GpuMemory, Held, Measured, Meter, Remark, Totals};
use crate::lending::{LendError, Lenders, Lent, MemoryNames};
use poorwill_rotation_policy::Gpu;

/// How another meter counts lent memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LentAs {
    /// As in use, as a driver does.
    Used,
    /// Not at all, as one that measures processes: it seems to be free.
    Free,
}

/// Another meter, and what is lent.
pub struct WithLent {
    inner: Arc<dyn Meter>,
    counts: LentAs,
    lenders: Arc<dyn Lenders>,
    names: MemoryNames,
    said: Arc<Said>,
}

/// What the log has said already.
#[derive(Debug, Default)]
struct Said {
    is_silent: AtomicBool,
    is_nameless: AtomicBool,
}

impl WithLent {
    /// What these lend, on the memory of these names.
    #[must_use]
    pub fn new(inner: Arc<dyn Meter>, counts: LentAs, lenders: Arc<dyn Lenders>, names: MemoryNames) -> Self {
        Self { inner, counts, lenders, names, said: Arc::default() }
    }

    /// What is lent, and the names of these GPUs' memory.
    async fn lent(&self, gpus: &[Gpu]) -> (Lent, Vec<Option<String>>) {
        let (lenders, names, said) =
            (Arc::clone(&self.lenders), Arc::clone(&self.names), Arc::clone(&self.said));
        let gpus = gpus.to_vec();
        let asked = spawn_blocking(move || {
            let named = gpus.iter().map(|gpu| said.named(*gpu, names(*gpu))).collect();
            (said.answered(lenders.lent()).unwrap_or_default(), named)
        });
        asked.await.unwrap_or_default()
    }

    fn counted(&self, memory: GpuMemory, lent_bytes: u64) -> GpuMemory {
        let GpuMemory { free_bytes, total_bytes, .. } = memory;
        match self.counts {
            LentAs::Used => {
                let reclaimable_bytes = lent_bytes.min(total_bytes.saturating_sub(free_bytes));
                GpuMemory { reclaimable_bytes, ..memory }
            }
            LentAs::Free => {
                let reclaimable_bytes = lent_bytes.min(free_bytes);
                GpuMemory { free_bytes: free_bytes - reclaimable_bytes, reclaimable_bytes, total_bytes }
            }
        }
    }
}

impl Said {
    fn answered<T>(&self, answer: Result<T, LendError>) -> Option<T> {
        match answer {
            Ok(answer) => {
                self.is_silent.store(false, Ordering::Relaxed);
                Some(answer)
            }
            Err(error) => {
                if !self.is_silent.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "what is lent is not known, and counts as in use until a broker answers");
                }
                None
            }
        }
    }

    fn named(&self, gpu: Gpu, name: Option<String>) -> Option<String> {
        if name.is_none() && !self.is_nameless.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                gpu = gpu.0,
                "the memory of this GPU has no name that lenders know, so nothing counts as lent there: only GPUs \
                 that NVML shows have one, and simulated ones with a folder"
            );
        }
        name
    }
}

impl fmt::Debug for WithLent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { inner, counts, lenders, .. } = self;
        let mut shown = f.debug_struct("WithLent");
        shown.field("inner", inner).field("counts", counts).field("lenders", lenders).finish_non_exhaustive()
    }
}

impl Meter for WithLent {
    /// What is freed in between counts as neither: too little is free rather than too much.
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        Box::pin(async move {
            let memory = self.inner.measure(gpus).await?;
            let (lent, names) = self.lent(gpus).await;
            let bytes = names.iter().map(|name| name.as_deref().map_or(0, |name| lent.bytes(name, |_| true)));
            Ok(memory.into_iter().zip(bytes).map(|(memory, bytes)| self.counted(memory, bytes)).collect())
        })
    }

    fn is_measured(&self) -> bool {
        self.inner.is_measured()
    }

    fn remark(&self, gpu: Gpu) -> Remark<'_> {
        self.inner.remark(gpu)
    }

    fn held<'a>(&'a self, gpus: &'a [Gpu], pids: Vec<u32>) -> Held<'a> {
        self.inner.held(gpus, pids)
    }

    fn counts_lent(&self) -> bool {
        true
    }

    fn clear<'a>(&'a self, gpus: &'a [Gpu], need: Option<Vec<u64>>, spared: Vec<u32>) -> Cleared<'a> {
        Box::pin(async move {
            // Without figures nothing is free.
            let memory = self.measure(gpus).await.unwrap_or_default();
            let free = |nth: usize| memory.get(nth).map_or(0, |one: &GpuMemory| one.free_bytes);
            let (lent, names) = self.lent(gpus).await;
            for (nth, (gpu, name)) in gpus.iter().zip(names).enumerate() {
                let Some(name) = name else { continue };
                let own = lent.bytes(&name, |pid| spared.contains(&pid));
                let of_others = lent.bytes(&name, |pid| !spared.contains(&pid));
                let lacking = match &need {
                    Some(need) => {
                        need.get(nth).map_or(0, |need| need.saturating_sub(free(nth).saturating_add(own)))
                    }
                    None => u64::MAX,
                };
                if lacking > 0 && of_others > 0 {
                    self.free(*gpu, name, lacking, spared.clone()).await;
                }
            }
        })
    }

    fn lent_totals(&self) -> Totals<'_> {
        let (lenders, said) = (Arc::clone(&self.lenders), Arc::clone(&self.said));
        Box::pin(async move {
            let asked = spawn_blocking(move || said.answered(lenders.lent()));
            asked.await.ok().flatten().map(|lent| lent.totals)
        })
    }
}

impl WithLent {
    async fn free(&self, gpu: Gpu, name: String, bytes: u64, spared: Vec<u32>) {
        let (lenders, said) = (Arc::clone(&self.lenders), Arc::clone(&self.said));
        let asked = spawn_blocking(move || said.answered(lenders.free(&name, bytes, &spared)));
        if let Some(freed_bytes) = asked.await.ok().flatten() {
            tracing::debug!(gpu = gpu.0, freed_bytes, "lent memory was given up");
        }
    }
}
