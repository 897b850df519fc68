//! The thread of a preparation.

use std::sync::Arc;

use super::super::backups::Save;
use super::super::error::{PoolError, Result};
use super::super::shared::Shared;
use super::super::threads::Threads;
use super::job::{EndNotifier, Job, Preparation};
use crate::driver::Op;
use crate::tag::Tag;

impl Shared {
    pub(in crate::pool) fn start_preparation(
        self: &Arc<Self>,
        threads: &mut Threads,
        saves: Vec<Save>,
        tags: Vec<Tag>,
    ) -> Result<Preparation> {
        let granules: u64 = saves.iter().map(|save| save.granules.len() as u64).sum();
        let forgets = {
            let state = self.lock_state();
            saves.iter().map(|save| (save.tag, state.backups().forgets(save.tag))).collect()
        };
        let job = Arc::new(Job::new(granules * self.shape().granule_bytes, forgets));
        let driver = Arc::clone(self.shared_driver());
        let (shared, notifier) = (Arc::clone(self), EndNotifier::of(Arc::clone(&job)));
        let work = move || {
            let result = shared.prepare(notifier.job(), &saves, tags);
            notifier.end(result);
        };
        let started = threads.start("poorwill-prepare", Op::Save, work);
        started.map_err(|source| PoolError::PrepareFailed { source })?;
        Ok(Preparation::new(job, driver))
    }
}
