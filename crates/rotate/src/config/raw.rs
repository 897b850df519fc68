//! The file as written: every key, and every default.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use poorwill_front::file::{RawControl, RawFront, Secret, Size, TableKeys};
use poorwill_front::settings::{Mistakes, SectionMistakes};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::calls::RawHttp;
use super::fleet::RawFleet;
use super::hibernate::{RawHibernate, WITHOUT_HIBERNATE};
use super::lend::{self, RawLend};
use super::model::{RawCanary, RawModel, RawRules};
use super::names::RawSelector;
use super::traces::RawTraces;
use super::{Config, MemorySource, Model};
use crate::measure::DeviceDriver;

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
    lend: Option<RawLend>,
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
    folder: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Measure {
    Devices,
    Processes,
    Nvml,
    Amdgpu,
    Intel,
    Unified,
    Declared,
}

/// For a key that stands in another table.
pub(super) fn tables() -> [TableKeys; 14] {
    [
        TableKeys::of::<RawRules>("[model.rules]"),
        TableKeys::of::<RawRules>("[every_model]"),
        TableKeys::of::<RawModel>("[[model]]"),
        TableKeys::of::<RawCanary>("[model.canary]"),
        TableKeys::of::<RawHttp>("[model.http]"),
        TableKeys::of::<RawFront>("[front]"),
        TableKeys::of::<RawControl>("[control]"),
        TableKeys::of::<RawMemory>("[memory]"),
        TableKeys::of::<RawHibernate>("[hibernate]"),
        TableKeys::of::<RawLend>("[lend]"),
        TableKeys::of::<RawSelector>("[[selector]]"),
        TableKeys::of::<RawFleet>("[fleet]"),
        TableKeys::of::<RawTraces>("[traces]"),
        TableKeys::of::<File>("the top of the file, above all tables"),
    ]
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
        let models = self.model.into_iter().map(|model| model.checked(every, hibernate, mistakes));
        let models: Vec<Model> = models.collect();
        let memory = self.memory.checked(&models, &mut mistakes.of("memory"));
        let config = Config {
            lend: self.lend.map(|table| table.checked(&memory, &mut mistakes.of("lend"))),
            memory,
            hibernate: self.hibernate.map(|table| table.checked(&mut mistakes.of("hibernate"))),
            fleet: self
                .fleet
                .and_then(|table| table.checked(&front, &control, secret, &mut mistakes.of("fleet"))),
            traces: self.traces.and_then(|table| table.checked(secret, &mut mistakes.of("traces"))),
            front: Arc::new(front),
            control: Arc::new(control),
            state: self.state,
            models,
            selectors: self.selector.into_iter().map(|one| one.checked(mistakes)).collect(),
            profiles: self.profile,
            secret_variables: BTreeSet::new(),
        };
        for model in &config.models {
            let mut of_model = mistakes.of(super::section(&model.name));
            lend::check_environment(model, config.lend.as_ref(), &mut of_model);
        }
        config.check_names(mistakes);
        config.check_addresses(mistakes);
        config.check_paths(mistakes);
        config
    }
}

impl RawMemory {
    fn checked(self, models: &[Model], mistakes: &mut SectionMistakes<'_>) -> MemorySource {
        use MemorySource::{Declared, Devices, Processes};
        let by = |driver| Devices(driver);
        let gpu_bytes = self.gpu.map(|size| size.0);
        let is_empty = self.folder.as_ref().is_some_and(|folder| folder.as_os_str().is_empty());
        mistakes.add_if(is_empty, "folder is empty; name one, or leave it out");
        let is_simulated = matches!(self.measure, Some(Measure::Processes));
        let reason = "folder is where simulated GPUs lend, with measure = \"processes\"; leave it out";
        mistakes.add_if(self.folder.is_some() && !is_simulated, reason);
        let measure = self.measure.unwrap_or(Measure::Devices);
        let reason = match (measure, gpu_bytes) {
            (_, Some(0)) => "gpu is 0, and nothing could run on that; make it larger",
            (Measure::Devices, None) => return by(DeviceDriver::Any),
            (Measure::Nvml, None) => return by(DeviceDriver::Nvml),
            (Measure::Amdgpu, None) => return by(DeviceDriver::Amdgpu),
            (Measure::Unified, None) => return by(DeviceDriver::Unified),
            (Measure::Devices | Measure::Nvml | Measure::Amdgpu | Measure::Unified, Some(_)) => {
                "gpu is for measure = \"declared\" and \"intel\", and for simulated GPUs with measure = \"processes\"; \
                 leave it out to measure the devices"
            }
            (Measure::Intel, total_bytes) => return by(DeviceDriver::Intel { total_bytes }),
            (Measure::Processes, None) => {
                "measure is \"processes\", but the size of each GPU is missing; say gpu = \"8GiB\""
            }
            (Measure::Processes, Some(gpu_bytes)) => return Processes { gpu_bytes, folder: self.folder },
            (Measure::Declared, None) => {
                "measure is \"declared\", but the size of each GPU is missing; say gpu = \"24GiB\""
            }
            (Measure::Declared, Some(gpu_bytes)) => {
                let without_need: Vec<&str> = models
                    .iter()
                    .filter(|model| model.rules.need_bytes.is_none())
                    .map(|model| &*model.name)
                    .collect();
                if !without_need.is_empty() {
                    let names = without_need.join("`, `");
                    mistakes.add(format!("measure is \"declared\", so `{names}` cannot do without a need"));
                }
                return Declared { gpu_bytes };
            }
        };
        mistakes.add(reason);
        by(DeviceDriver::Any)
    }
}
