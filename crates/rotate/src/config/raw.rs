//! The file as written: every key, and every default.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use poorwill_front::file::{
    ConfigError, RawControl, RawFront, Secret, Size, Wait, check_url, invalid, is_priority,
};
use poorwill_front::settings::{Card, Parameters, parameters};
use poorwill_rotation_policy::{Gpu, Limits, Rules};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::calls::{HttpApi, RawHttp, check_path};
use super::fleet::RawFleet;
use super::names::{RawSelector, odd_name};
use super::traces::RawTraces;
use super::{Canary, CanaryKind, Config, EngineKind, Hibernate, MemorySource, Model, Start, section};

/// Larger than any machine has, so that a typo cannot allocate much.
const GPUS_MAX: usize = 1024;
const WITHOUT_HIBERNATE: &str =
    "hibernates and hibernate_after need the table [hibernate], which is missing; add it, or leave them out";

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

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHibernate {
    after: Option<Wait>,
    residue_max: Option<Size>,
    host_max: Option<Size>,
    wait_max: Option<Wait>,
    #[serde(default)]
    helper: Vec<String>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Measure {
    Devices,
    Processes,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawModel {
    name: String,
    #[serde(default)]
    aliases: Vec<String>,
    #[serde(default)]
    adapters: Vec<String>,
    served_as: Option<String>,
    #[serde(default)]
    parameters: toml::Table,
    #[serde(default)]
    strip: Vec<String>,
    #[serde(default)]
    variants: BTreeMap<String, toml::Table>,
    display_name: Option<String>,
    description: Option<String>,
    #[serde(default)]
    metadata: toml::Table,
    listed: Option<bool>,
    engine: Option<EngineKind>,
    url: String,
    http: Option<RawHttp>,
    level: Option<u8>,
    #[serde(default)]
    command: Vec<String>,
    #[serde(default)]
    stop_command: Vec<String>,
    #[serde(default)]
    environment: BTreeMap<String, String>,
    folder: Option<PathBuf>,
    log: Option<PathBuf>,
    gpus: Option<Vec<usize>>,
    need: Option<Size>,
    #[serde(default)]
    rules: RawRules,
    #[serde(default)]
    canary: RawCanary,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCanary {
    kind: Option<CanaryKind>,
    prompt: Option<String>,
    tokens: Option<u32>,
    expect: Option<String>,
    path: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRules {
    sleeps: Option<bool>,
    hibernates: Option<bool>,
    hibernate_after: Option<Wait>,
    pinned: Option<bool>,
    preload: Option<bool>,
    together: Option<String>,
    keep_weight: Option<u32>,
    priority: Option<i32>,
    idle_max: Option<Wait>,
    residence_min: Option<Wait>,
    turn_per_swap: Option<u32>,
    grace: Option<Wait>,
    turn_max: Option<Wait>,
    queue_max: Option<usize>,
    wait_max: Option<Wait>,
    running_max: Option<usize>,
    look_every: Option<Wait>,
    slack: Option<Size>,
    pause_min: Option<Wait>,
    pause_max: Option<Wait>,
    drain_max: Option<Wait>,
    sleep_max: Option<Wait>,
    release_max: Option<Wait>,
    wake_max: Option<Wait>,
    canary_max: Option<Wait>,
    start_max: Option<Wait>,
    stop_max: Option<Wait>,
}

impl File {
    pub(super) fn checked(self, secret: Secret<'_>) -> Result<Config, ConfigError> {
        let front = self.front.checked(secret)?;
        let control = self.control.checked(&front, secret)?;
        let memory = self.memory.checked()?;
        if self.state.as_ref().is_some_and(|folder| folder.as_os_str().is_empty()) {
            return Err(invalid("state", "it is empty; name a folder, or leave it out to keep no state"));
        }
        let every = &self.every_model;
        if self.hibernate.is_none() && (every.hibernates == Some(true) || every.hibernate_after.is_some()) {
            return Err(invalid("every_model", WITHOUT_HIBERNATE));
        }
        let hibernate = self.hibernate.as_ref();
        let models = self.model.into_iter().map(|model| model.checked(every, hibernate));
        let models = models.collect::<Result<_, _>>()?;
        let hibernate = self.hibernate.map(RawHibernate::checked).transpose()?;
        let selectors = self.selector.into_iter().map(RawSelector::checked).collect::<Result<_, _>>()?;
        let traces = self.traces.map(|traces| traces.checked(secret)).transpose()?;
        let fleet = self.fleet.map(|fleet| fleet.checked(&front, &control)).transpose()?;
        let (front, control) = (Arc::new(front), Arc::new(control));
        Ok(Config {
            front,
            control,
            memory,
            hibernate,
            fleet,
            traces,
            state: self.state,
            models,
            selectors,
            profiles: self.profile,
        })
    }
}

impl RawMemory {
    fn checked(self) -> Result<MemorySource, ConfigError> {
        let invalid = |reason: &str| Err(invalid("memory", reason));
        match (self.measure.unwrap_or(Measure::Devices), self.gpu.map(|size| size.0)) {
            (Measure::Devices, None) => Ok(MemorySource::Devices),
            (Measure::Devices, Some(_)) => invalid(
                "gpu is for measure = \"processes\", with simulated GPUs; leave it out to measure the devices",
            ),
            (Measure::Processes, None) => {
                invalid("measure is \"processes\", but the size of each GPU is missing; say gpu = \"8GiB\"")
            }
            (Measure::Processes, Some(0)) => {
                invalid("gpu is 0, and nothing could run on that; make it larger")
            }
            (Measure::Processes, Some(gpu_bytes)) => Ok(MemorySource::Processes { gpu_bytes }),
        }
    }
}

impl RawHibernate {
    fn checked(self) -> Result<Hibernate, ConfigError> {
        let invalid = |reason: &str| Err(invalid("hibernate", reason));
        for (what, size) in [("residue_max", self.residue_max), ("host_max", self.host_max)] {
            if size.is_some_and(|size| size.0 == 0) {
                return invalid(&format!("{what} is 0; leave it out or make it larger"));
            }
        }
        if self.wait_max.is_some_and(|wait| wait.0.is_zero()) {
            return invalid("wait_max is 0, so no engine could hibernate; leave it out or make it longer");
        }
        if self.helper.first().is_some_and(String::is_empty)
            || self.helper.iter().any(|word| word.contains('\0'))
        {
            return invalid("helper begins with an empty word, or has a NUL in it; begin with a program");
        }
        let usual = Hibernate::default();
        Ok(Hibernate {
            helper: self.helper,
            wait_max: self.wait_max.map_or(usual.wait_max, |wait| wait.0),
            host_max_bytes: self.host_max.map(|size| size.0),
        })
    }
}

impl RawModel {
    fn checked(self, every: &RawRules, hibernate: Option<&RawHibernate>) -> Result<Model, ConfigError> {
        let here = section(&self.name);
        let invalid = |reason: &str| Err(invalid(&here, reason));
        let wants_to = self.rules.hibernates == Some(true) || self.rules.hibernate_after.is_some();
        if wants_to && hibernate.is_none() {
            return invalid(WITHOUT_HIBERNATE);
        }
        if self.rules.hibernates == Some(false) && self.rules.hibernate_after.is_some() {
            return invalid(
                "hibernates is false, and hibernate_after says when it does; leave one of them out",
            );
        }
        if wants_to && self.command.is_empty() {
            return invalid(
                "it is to hibernate, and has no command: only processes that the service started are known to it; say \
                 command, or leave out hibernates and hibernate_after",
            );
        }
        for (what, names) in [("aliases", &self.aliases), ("adapters", &self.adapters)] {
            if [&self.name].into_iter().chain(names).any(|name| name.trim().is_empty()) {
                return invalid(&format!("one of {what}, or its name, is empty"));
            }
        }
        if self.variants.keys().any(|name| name.trim().is_empty()) {
            return invalid("one of variants has no name");
        }
        let names = [&self.name].into_iter().chain(&self.aliases).chain(&self.adapters);
        if let Some(reason) = odd_name(names.chain(self.variants.keys()).chain(&self.served_as)) {
            return invalid(&reason);
        }
        if self.served_as.as_ref().is_some_and(String::is_empty) {
            return invalid("served_as is empty; leave it out if the engine calls it as clients do");
        }
        if self.need.is_some_and(|size| size.0 == 0) {
            return invalid("need is 0; leave it out if it is unknown, and it is measured");
        }
        let level = self.level.unwrap_or(1);
        if !(1..=2).contains(&level) {
            return invalid(&format!("level is {level}; 1 keeps the weights in host memory, 2 drops them"));
        }
        let gpus = self.gpus.unwrap_or_else(|| vec![0]);
        let mut sorted = gpus.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if gpus.is_empty() || sorted.len() < gpus.len() || sorted.last().is_some_and(|gpu| *gpu >= GPUS_MAX) {
            return invalid(&format!(
                "gpus are {gpus:?}; name each GPU that its engine is on once, from 0 on"
            ));
        }
        let url = self.url.trim_end_matches('/').to_owned();
        if let Err(reason) = check_url(&url) {
            return invalid(&format!("url is `{}`: {reason}", without_user(&self.url)));
        }
        if self.command.is_empty()
            && (!self.environment.is_empty() || self.folder.is_some() || self.log.is_some())
        {
            return invalid("environment, folder and log are for a command, and it has none");
        }
        if self.command.is_empty() && !self.stop_command.is_empty() {
            return invalid("stop_command ends what a command started, and it has none; say command as well");
        }
        for (key, words) in [("command", &self.command), ("stop_command", &self.stop_command)] {
            if words.first().is_some_and(String::is_empty) {
                return invalid(&format!("its {key} begins with an empty word; begin with a program"));
            }
            if words.iter().any(|word| word.contains('\0')) {
                return invalid(&format!("a word of its {key} has a NUL in it; leave that out"));
            }
        }
        let is_no_name = |name: &&String| name.is_empty() || name.contains(['=', '\0']);
        if let Some(name) = self.environment.keys().find(is_no_name) {
            return invalid(&format!("environment has {name:?}, which is no name of a variable"));
        }
        if let Some((name, _)) = self.environment.iter().find(|(_, value)| value.contains('\0')) {
            return invalid(&format!("the variable {name} of its environment has a NUL in it"));
        }
        let canary = match self.canary.checked() {
            Ok(canary) => canary,
            Err(reason) => return invalid(&reason),
        };
        let engine = self.engine.unwrap_or(EngineKind::Vllm);
        let http = match http_of(engine, self.http, self.level, self.rules.sleeps) {
            Ok(http) => http,
            Err(reason) => return invalid(&reason),
        };
        let parameters = Parameters::checked(self.parameters, self.strip)
            .map_err(|reason| super::invalid(&here, &reason))?;
        let variants = self.variants.into_iter().map(|(name, set)| {
            let set = parameters::fields("variants", set).map_err(|reason| super::invalid(&here, &reason))?;
            Ok((name, set))
        });
        let variants = variants.collect::<Result<BTreeMap<_, _>, ConfigError>>()?;
        let mut aliases = self.aliases;
        let known: Vec<&String> = aliases.iter().chain(&self.adapters).chain([&self.name]).collect();
        let new: Vec<_> = variants.keys().filter(|name| !known.contains(name)).cloned().collect();
        aliases.extend(new);
        let card = Card::checked(self.display_name, self.description, self.metadata, self.listed);
        let card = card.map_err(|reason| super::invalid(&here, &reason))?;
        let mut rules = self.rules.over(every).rules(gpus.into_iter().map(Gpu).collect());
        rules.need_bytes = self.need.map(|size| size.0);
        rules.can_restart = !self.command.is_empty();
        rules.can_sleep &= engine != EngineKind::Http || http.sleep.is_some();
        if wants_to && !rules.can_sleep {
            return invalid(
                "it is to hibernate, and does not sleep; leave out hibernates and hibernate_after",
            );
        }
        rules.can_hibernate &= hibernate.is_some() && rules.can_restart && rules.can_sleep;
        let hibernate = hibernate.filter(|_| rules.can_hibernate);
        rules.hibernate_after = rules.hibernate_after.or(hibernate.and_then(|all| Some(all.after?.0)));
        let wait_max = hibernate.map(|all| all.wait_max.map_or(Hibernate::default().wait_max, |wait| wait.0));
        if wait_max.is_some_and(|wait| wait >= rules.limits.sleep) {
            return invalid(&format!(
                "its sleep_max, {:?}, is no more than wait_max of [hibernate], so it could not hibernate in time; make one \
                 longer, or the other shorter",
                rules.limits.sleep
            ));
        }
        rules.residue_max_bytes = hibernate.and_then(|all| Some(all.residue_max?.0));
        if !rules.can_sleep && !rules.can_restart {
            return invalid(
                "it neither sleeps nor has a command to be started with, so it could never leave; say command, or how \
                 it sleeps",
            );
        }
        if rules.running_max == 0 || rules.queue_max == 0 {
            return invalid("running_max and queue_max are 1 or more, or no request could be admitted");
        }
        if rules.together.as_ref().is_some_and(|set| set.trim().is_empty()) {
            return invalid("together is empty; give the set a name, or leave it out");
        }
        if !is_priority(rules.priority) {
            return invalid(&format!("priority is {}; say one from -3600 to 3600", rules.priority));
        }
        let limits = &rules.limits;
        for (what, wait) in [
            ("wait_max", rules.wait_max),
            ("pause_min", rules.pause_min),
            ("sleep_max", limits.sleep),
            ("release_max", limits.release),
            ("wake_max", limits.wake),
            ("canary_max", limits.canary),
            ("start_max", limits.start),
            ("stop_max", limits.stop),
        ] {
            if wait.is_zero() {
                return invalid(&format!("{what} is 0, so it could never be done in time; make it longer"));
            }
        }
        if rules.look_every.is_zero() {
            return invalid("look_every is 0, so its engine would do nothing else; make it longer");
        }
        if rules.pause_min > rules.pause_max {
            return invalid(&format!(
                "pause_min, {:?}, is more than pause_max, {:?}",
                rules.pause_min, rules.pause_max
            ));
        }
        let start = (!self.command.is_empty()).then_some(Start {
            command: self.command,
            stop_command: self.stop_command,
            environment: self.environment,
            folder: self.folder,
            log: self.log,
        });
        Ok(Model {
            served_as: self.served_as.unwrap_or_else(|| self.name.clone()),
            name: self.name,
            aliases,
            adapters: self.adapters,
            parameters,
            variants,
            card,
            engine,
            url,
            http,
            level,
            start,
            canary,
            rules,
        })
    }
}

impl RawCanary {
    fn checked(self) -> Result<Canary, String> {
        let invalid = |reason: &str| Err(reason.to_owned());
        if self.tokens == Some(0) || self.prompt.as_deref() == Some("") {
            return invalid("a canary has a prompt, and one token at least");
        }
        if self.expect.as_deref().is_some_and(|expected| expected.trim().is_empty()) {
            return invalid(
                "the canary's expect is empty, which every answer contains; leave it out to compare with the first answer",
            );
        }
        if let (Some(CanaryKind::Embedding | CanaryKind::Rerank | CanaryKind::None), Some(_)) =
            (self.kind, &self.expect)
        {
            return invalid(
                "the canary's expect is for texts, and answers of this kind are none; leave it out, or say another kind",
            );
        }
        match (self.kind, self.path.as_deref()) {
            (Some(CanaryKind::Get), None) => {
                return invalid("a canary of the kind get has a path; say path = \"/health\"");
            }
            (Some(CanaryKind::Get), Some(path)) => {
                check_path(path).map_err(|reason| format!("the canary's path {reason}"))?;
            }
            (_, Some(_)) => return invalid("the canary's path is for kind = \"get\"; leave it out"),
            (_, None) => {}
        }
        Ok(Canary {
            kind: self.kind,
            prompt: self.prompt.unwrap_or_else(|| "1, 2, 3, 4, 5, 6,".to_owned()),
            tokens: self.tokens.unwrap_or(16),
            expect: self.expect,
            path: self.path,
        })
    }
}

/// Refuses what is for engines of another kind.
fn http_of(
    engine: EngineKind,
    raw: Option<RawHttp>,
    level: Option<u8>,
    sleeps: Option<bool>,
) -> Result<HttpApi, String> {
    if engine != EngineKind::Http {
        return match raw {
            None => Ok(HttpApi::default()),
            Some(_) => {
                Err("http is for engines without an adapter; say engine = \"http\", or leave it out"
                    .to_owned())
            }
        };
    }
    if level.is_some() {
        return Err(
            "level is for vllm and sglang; leave it out, and say under [model.http] how it sleeps".to_owned()
        );
    }
    let http = raw.unwrap_or_default().checked()?;
    if sleeps == Some(true) && http.sleep.is_none() {
        return Err(
            "sleeps is true, and nothing says how it sleeps; say sleep, wake and asleep under [model.http], or leave \
             sleeps out, and it is stopped and started"
                .to_owned(),
        );
    }
    Ok(http)
}

impl RawRules {
    /// Fills unset rules from `every`.
    fn over(self, every: &Self) -> Self {
        Self {
            sleeps: self.sleeps.or(every.sleeps),
            hibernates: self.hibernates.or(every.hibernates),
            hibernate_after: self.hibernate_after.or(every.hibernate_after),
            pinned: self.pinned.or(every.pinned),
            preload: self.preload.or(every.preload),
            together: self.together.or_else(|| every.together.clone()),
            keep_weight: self.keep_weight.or(every.keep_weight),
            priority: self.priority.or(every.priority),
            idle_max: self.idle_max.or(every.idle_max),
            residence_min: self.residence_min.or(every.residence_min),
            turn_per_swap: self.turn_per_swap.or(every.turn_per_swap),
            grace: self.grace.or(every.grace),
            turn_max: self.turn_max.or(every.turn_max),
            queue_max: self.queue_max.or(every.queue_max),
            wait_max: self.wait_max.or(every.wait_max),
            running_max: self.running_max.or(every.running_max),
            look_every: self.look_every.or(every.look_every),
            slack: self.slack.or(every.slack),
            pause_min: self.pause_min.or(every.pause_min),
            pause_max: self.pause_max.or(every.pause_max),
            drain_max: self.drain_max.or(every.drain_max),
            sleep_max: self.sleep_max.or(every.sleep_max),
            release_max: self.release_max.or(every.release_max),
            wake_max: self.wake_max.or(every.wake_max),
            canary_max: self.canary_max.or(every.canary_max),
            start_max: self.start_max.or(every.start_max),
            stop_max: self.stop_max.or(every.stop_max),
        }
    }

    fn rules(&self, gpus: Vec<Gpu>) -> Rules {
        let usual = Rules::on(gpus);
        let wait = |set: Option<Wait>, usual| set.map_or(usual, |wait| wait.0);
        let limits = Limits {
            drain: wait(self.drain_max, usual.limits.drain),
            sleep: wait(self.sleep_max, usual.limits.sleep),
            release: wait(self.release_max, usual.limits.release),
            // Both wait for released memory: this model's, and that of evicted models.
            find_memory: wait(self.release_max, usual.limits.find_memory),
            wake: wait(self.wake_max, usual.limits.wake),
            canary: wait(self.canary_max, usual.limits.canary),
            start: wait(self.start_max, usual.limits.start),
            stop: wait(self.stop_max, usual.limits.stop),
            ..usual.limits
        };
        Rules {
            can_sleep: self.sleeps.unwrap_or(usual.can_sleep),
            can_hibernate: self.hibernates.unwrap_or(true),
            hibernate_after: self.hibernate_after.map(|wait| wait.0),
            is_pinned: self.pinned.unwrap_or(usual.is_pinned),
            together: self.together.clone(),
            keep_weight: self.keep_weight.unwrap_or(usual.keep_weight),
            priority: self.priority.unwrap_or(usual.priority),
            preload: self.preload.or(self.pinned).unwrap_or(usual.preload),
            idle_max: self.idle_max.map(|wait| wait.0),
            residence_min: wait(self.residence_min, usual.residence_min),
            turn_per_swap: self.turn_per_swap.unwrap_or(usual.turn_per_swap),
            grace: wait(self.grace, usual.grace),
            turn_max: wait(self.turn_max, usual.turn_max),
            queue_max: self.queue_max.unwrap_or(usual.queue_max),
            wait_max: wait(self.wait_max, usual.wait_max),
            running_max: self.running_max.unwrap_or(usual.running_max),
            look_every: wait(self.look_every, usual.look_every),
            slack_bytes: self.slack.map_or(usual.slack_bytes, |size| size.0),
            pause_min: wait(self.pause_min, usual.pause_min),
            pause_max: wait(self.pause_max, usual.pause_max),
            limits,
            ..usual
        }
    }
}

/// A URL's user may have a password.
fn without_user(url: &str) -> String {
    url.rsplit_once('@').map_or_else(|| url.to_owned(), |(_, host)| format!("…@{host}"))
}
