//! The threads of a pool's preparations.

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::super::backups::Save;
use super::super::error::{PoolError, Result};
use super::super::shared::Shared;
use super::job::{EndNotifier, Job, Preparation};
use crate::driver::{DriverError, DriverErrorKind, Op};
use crate::tag::Tag;

#[derive(Debug, Default)]
pub(in crate::pool) struct Preparers(Vec<JoinHandle<()>>);

impl Preparers {
    pub(in crate::pool) fn start(
        &mut self,
        shared: &Arc<Shared>,
        saves: Vec<Save>,
        tags: Vec<Tag>,
    ) -> Result<Preparation> {
        self.0.retain(|thread| !thread.is_finished());
        let granules: u64 = saves.iter().map(|save| save.granules.len() as u64).sum();
        let forgets = {
            let state = shared.lock_state();
            saves.iter().map(|save| (save.tag, state.backups().forgets(save.tag))).collect()
        };
        let job = Arc::new(Job::new(granules * shared.shape().granule_bytes, forgets));
        let driver = Arc::clone(shared.shared_driver());
        let (shared, notifier) = (Arc::clone(shared), EndNotifier::of(Arc::clone(&job)));
        let work = move || {
            let result = shared.prepare(notifier.job(), &saves, tags);
            notifier.end(result);
        };
        let thread = thread::Builder::new().name("poorwill-prepare".into()).spawn(work);
        self.0.push(thread.map_err(|error| PoolError::PrepareFailed { source: no_thread(&error) })?);
        Ok(Preparation::new(job, driver))
    }

    pub(in crate::pool) fn join(&mut self) {
        for thread in self.0.drain(..) {
            // [`Preparation::wait`] reports a panic.
            let _ = thread.join();
        }
    }

    /// Drops threads that do not exist in this process.
    pub(in crate::pool) fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }
}

fn no_thread(error: &std::io::Error) -> DriverError {
    let kind = DriverErrorKind::Device {
        code: error.raw_os_error().unwrap_or(0).into(),
        name: "no thread".into(),
        text: error.to_string(),
    };
    DriverError::new(Op::Save, kind)
}
