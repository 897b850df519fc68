//! What operators ask of a service.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use poorwill_front::requests::Requests;
use poorwill_front::settings::Control;
use tokio::sync::broadcast;

use crate::fleet::Membership;
use crate::service;
use crate::supervise::EngineLog;

/// The future of a [`ControlApi`] call.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What this listener needs from the service.
pub trait ControlApi: Send + Sync + 'static {
    /// The current status.
    fn snapshot(&self) -> Later<'_, service::Snapshot>;

    /// Events from now on.
    fn events(&self) -> broadcast::Receiver<Arc<service::ServiceEvent>>;

    /// False if no model has this name or alias.
    fn command<'a>(&'a self, name: &'a str, command: service::ModelCommand) -> Later<'a, bool>;

    /// A supervised engine's output; `None` if no model has this name or alias, or the service does not start its engine.
    fn log(&self, name: &str) -> Option<Arc<EngineLog>>;

    /// Reloads the configuration, or returns the mistake.
    fn reload(&self) -> Later<'_, Result<(), String>>;

    /// Chooses a profile or none, or returns the mistake.
    fn set_profile(&self, profile: Option<&str>) -> Result<(), String>;

    /// The front's requests.
    fn requests(&self) -> Arc<Requests>;

    /// The current address and keys.
    fn control(&self) -> Arc<Control>;

    /// How it is in its fleet; `None` for a node of no fleet.
    fn fleet(&self) -> Option<Membership>;
}
