//! The file as written: every key, and every default.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill_front::file::{RawControl, RawFront, Secret, Size};
use poorwill_front::settings::{Mistakes, SectionMistakes};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::fleet::RawFleet;
use super::hibernate::{RawHibernate, WITHOUT_HIBERNATE};
use super::model::{RawModel, RawRules};
use super::names::RawSelector;
use super::traces::RawTraces;
use super::{Config, MemorySource};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// Replaced in all texts before.
    #[serde(default, rename = "macros")]
    _macros: IgnoredAny,
    state: Option<PathBuf>,
    #[serde(default)]
    memory: RawMemory,
    hibernate: Option<RawHibernate>,
    fleet: Option<RawFleet>,
    #[serde(default)]
    front: RawFront,
    #[serde(default)]
    control: RawControl,
    traces: Option<RawTraces>,
    /// For models that do not set their own.
    #[serde(default)]
    every_model: RawRules,
    #[serde(default)]
    model: Vec<RawModel>,
    #[serde(default)]
    selector: Vec<RawSelector>,
    #[serde(default)]
    profile: BTreeMap<String, BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMemory {
    measure: Option<Measure>,
    gpu: Option<Size>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Measure {
    Devices,
    Processes,
}

impl File {
    /// Means nothing if there are mistakes.
    pub(super) fn checked(self, secret: Secret<'_>, mistakes: &mut Mistakes) -> Config {
        let front = self.front.checked(secret, &mut mistakes.of("front"));
        let control = self.control.checked(&front, secret, &mut mistakes.of("control"));
        let is_empty = self.state.as_ref().is_some_and(|folder| folder.as_os_str().is_empty());
        let reason = "it is empty; name a folder, or leave it out to keep no state";
        mistakes.of("state").add_if(is_empty, reason);
        let (every, hibernate) = (&self.every_model, self.hibernate.as_ref());
        let is_missing = hibernate.is_none() && every.hibernate();
        mistakes.of("every_model").add_if(is_missing, WITHOUT_HIBERNATE);
        let models = self.model.into_iter().map(|model| model.checked(every, hibernate, mistakes)).collect();
        let config = Config {
            memory: self.memory.checked(&mut mistakes.of("memory")),
            hibernate: self.hibernate.map(|table| table.checked(&mut mistakes.of("hibernate"))),
            fleet: self.fleet.and_then(|table| table.checked(&front, &control, &mut mistakes.of("fleet"))),
            traces: self.traces.and_then(|table| table.checked(secret, &mut mistakes.of("traces"))),
            front: Arc::new(front),
            control: Arc::new(control),
            state: self.state,
            models,
            selectors: self.selector.into_iter().map(|one| one.checked(mistakes)).collect(),
            profiles: self.profile,
        };
        config.check_names(mistakes);
        config.check_addresses(mistakes);
        config.check_paths(mistakes);
        config
    }
}

impl RawMemory {
    fn checked(self, mistakes: &mut SectionMistakes<'_>) -> MemorySource {
        let gpu_bytes = self.gpu.map(|size| size.0);
        let reason = match (self.measure.unwrap_or(Measure::Devices), gpu_bytes) {
            (Measure::Devices, None) => return MemorySource::Devices,
            (Measure::Devices, Some(_)) => {
                "gpu is for measure = \"processes\", with simulated GPUs; leave it out to measure the devices"
            }
            (Measure::Processes, None) => {
                "measure is \"processes\", but the size of each GPU is missing; say gpu = \"8GiB\""
            }
            (Measure::Processes, Some(0)) => "gpu is 0, and nothing could run on that; make it larger",
            (Measure::Processes, Some(gpu_bytes)) => return MemorySource::Processes { gpu_bytes },
        };
        mistakes.add(reason);
        MemorySource::Devices
    }
}
