//! A service as its two listeners see it.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use poorwill_front::affinity::Affinity;
use poorwill_front::backend::{
    Admission, Backend, Listed, ModelNumber, NameKind, NotOwned, Refusal, Refused, Route,
};
use poorwill_front::requests::Requests;
use poorwill_front::settings::{Card, Control, Front};
use poorwill_rotation_policy::{self as policy, ModelId, StageName};
use tokio::sync::broadcast;

use crate::config::{Config, ConfigError};
use crate::control::{ControlApi, Later};
use crate::fleet::{Membership, Owned};
use crate::service::{self, Destination, ModelCommand, Service, ServiceEvent, Snapshot};
use crate::supervise::EngineLog;

#[derive(Debug)]
pub(crate) struct ServiceHandle {
    service: Service,
    requests: Arc<Requests>,
    path: Option<PathBuf>,
    /// What a node of a fleet may serve; `None` for one of no fleet, which serves everything.
    owned: Option<Owned>,
}

impl ServiceHandle {
    /// `path` is where its configuration is read again.
    pub(crate) fn new(
        service: Service,
        requests: Arc<Requests>,
        path: Option<PathBuf>,
        owned: Option<Owned>,
    ) -> Self {
        Self { service, requests, path, owned }
    }

    /// Names of the chosen profile stand for others, also where a model has the same name.
    fn with_profile(&self, mut all: Vec<Listed>) -> Vec<Listed> {
        let (config, profile) = (self.service.config(), self.service.profile());
        let Some(names) = profile.and_then(|profile| config.profiles.get(&profile)) else { return all };
        let targets: Vec<Option<Listed>> =
            names.values().map(|target| all.iter().find(|one| one.name == *target).cloned()).collect();
        all.retain(|one| !names.contains_key(&one.name));
        for (name, target) in names.keys().zip(targets) {
            let Some(mut target) = target else { continue };
            target.kind = NameKind::Alias { model: target.name };
            target.card.is_hidden = false;
            all.push(Listed { name: name.clone(), ..target });
        }
        all
    }
}

fn to(destination: Destination) -> Route {
    let Destination { id, model, served_as, parameters, in_flight } = destination;
    let (name, url, in_flight) = (model.name.clone(), model.url.clone(), Some(Arc::new(in_flight)));
    let first_byte_max = model.first_byte_max;
    let (model, affinity) = (ModelNumber(id.0), Affinity::default());
    Route { model, name, url, served_as, parameters, in_flight, first_byte_max, affinity }
}

fn refused(by: service::Refused) -> Refused {
    let refusal = match by.refusal {
        policy::Refusal::QueueFull => Refusal::QueueFull,
        policy::Refusal::WaitedTooLong => Refusal::WaitedTooLong,
        policy::Refusal::Quarantined { .. } => Refusal::Quarantined,
        policy::Refusal::NoMemory { .. } => Refusal::NoMemory,
        policy::Refusal::TooLarge { need_bytes, total_bytes, .. } => {
            Refusal::TooLarge { need_bytes, total_bytes }
        }
        policy::Refusal::ShuttingDown => Refusal::ShuttingDown,
    };
    Refused { refusal, retry_after: by.retry_after }
}

impl Backend for ServiceHandle {
    fn route(&self, name: &str, _affinity: Affinity) -> Option<Route> {
        self.service.route(name).map(to)
    }

    fn route_of_model(&self, name: &str, _affinity: Affinity) -> Option<Route> {
        self.service.route_of_model(name).map(to)
    }

    fn listed(&self) -> Vec<Listed> {
        let listed = |name: &String, kind: NameKind, stage: StageName, card: &Card| Listed {
            name: name.clone(),
            kind,
            is_ready: stage == StageName::Ready,
            stage: stage.as_str(),
            card: card.clone(),
        };
        let mut all = Vec::new();
        for (model, stage) in self.service.stages() {
            let of = || model.name.clone();
            all.push(listed(&model.name, NameKind::Model, stage, &model.card));
            let alias = |name| listed(name, NameKind::Alias { model: of() }, stage, &model.card);
            all.extend(model.aliases.iter().map(alias));
            let adapter = |name| listed(name, NameKind::Adapter { model: of() }, stage, &model.card);
            all.extend(model.adapters.iter().map(adapter));
        }
        for selector in &self.service.config().selectors {
            // It may be gone after a reload.
            let Some(stage) = self.service.stage_of(&selector.name) else { continue };
            let kind = NameKind::Selector { targets: selector.targets.clone() };
            all.push(listed(&selector.name, kind, stage, &selector.card));
        }
        self.with_profile(all)
    }

    fn admit(
        &self,
        model: ModelNumber,
        priority: i32,
    ) -> Pin<Box<dyn Future<Output = Result<Admission, Refused>> + Send + '_>> {
        let id = ModelId(model.0);
        let of_machine = move |by: Refused| match by.refusal {
            Refusal::Quarantined if self.service.was_not_started(id) => {
                Refused { refusal: Refusal::NotStarted, ..by }
            }
            _ => by,
        };
        Box::pin(
            async move { self.service.admit_by(id, priority).await.map_err(|by| of_machine(refused(by))) },
        )
    }

    fn suspect(&self, model: ModelNumber) {
        self.service.suspect(ModelId(model.0));
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn front(&self) -> Arc<Front> {
        Arc::clone(&self.service.config().front)
    }

    fn load(&self, route: &Route) -> Option<u64> {
        // Without a fleet there is no router.
        self.owned.as_ref()?;
        u64::try_from(route.in_flight.as_ref()?.count()).ok()
    }

    fn check(&self, route: &Route) -> Result<(), NotOwned> {
        self.owned.as_ref().map_or(Ok(()), |owned| owned.check(&route.name))
    }

    fn withdrawn(&self, route: &Route) -> Pin<Box<dyn Future<Output = NotOwned> + Send>> {
        match &self.owned {
            Some(owned) => Box::pin(owned.withdrawn(&route.name)),
            None => Box::pin(std::future::pending()),
        }
    }
}

impl ControlApi for ServiceHandle {
    fn snapshot(&self) -> Later<'_, Snapshot> {
        Box::pin(self.service.snapshot())
    }

    fn events(&self) -> broadcast::Receiver<Arc<ServiceEvent>> {
        self.service.events()
    }

    fn command<'a>(&'a self, name: &'a str, command: ModelCommand) -> Later<'a, bool> {
        Box::pin(async move { self.service.command(name, command) })
    }

    fn log(&self, name: &str) -> Option<Arc<EngineLog>> {
        self.service.log(name)
    }

    fn reload(&self) -> Later<'_, Result<(), String>> {
        Box::pin(async {
            let Some(path) = self.path.clone() else {
                return Err("there is no file to read it from again".to_owned());
            };
            let read = move || {
                Config::read(&path).map_err(|error| match error {
                    ConfigError::Read { .. } => error.to_string(),
                    _ => format!("{}: {error}", path.display()),
                })
            };
            let config = tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())??;
            self.service.reload(config).await.map_err(|error| error.to_string())
        })
    }

    fn set_profile(&self, profile: Option<&str>) -> Result<(), String> {
        self.service.set_profile(profile).map_err(|error| error.to_string())
    }

    fn requests(&self) -> Arc<Requests> {
        Arc::clone(&self.requests)
    }

    fn control(&self) -> Arc<Control> {
        Arc::clone(&self.service.config().control)
    }

    fn fleet(&self) -> Option<Membership> {
        self.owned.as_ref().map(Owned::membership)
    }
}
