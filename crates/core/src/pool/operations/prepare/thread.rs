//! The thread of a preparation.

use std::sync::Arc;

use super::job::{EndNotifier, Job, Preparation};
use crate::driver::Op;
use crate::pool::parts::backups::Save;
use crate::pool::shared::Shared;
use crate::pool::tools::error::{PoolError, Result};
use crate::pool::tools::threads::Threads;
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
