//! What the handlers of operators' requests share.

use std::sync::Arc;

use poorwill_front::operators::Access;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::api::ControlApi;
use super::events::Hub;
use super::metrics::Metrics;
use crate::service;

/// Most event streams at a time.
pub(super) const FOLLOWERS_MAX: usize = 64;

/// Shared by all request handlers.
#[derive(Clone)]
pub(super) struct HandlerState {
    pub(super) api: Arc<dyn ControlApi>,
    pub(super) hub: Arc<Hub>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) followers: Arc<Semaphore>,
    pub(super) access: Access,
    pub(super) shutdown: CancellationToken,
}

impl HandlerState {
    /// The service's status, with what the front counted.
    pub(super) async fn snapshot(&self) -> service::Snapshot {
        let (mut now, requests) = (self.api.snapshot().await, self.api.requests());
        for model in &mut now.models {
            model.recent = requests.recent(&model.name);
        }
        now
    }
}
