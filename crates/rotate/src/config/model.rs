//! A model as written, with its rules and its canary, and the checks of each part.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use poorwill_front::file::{Size, Wait, check_url, is_priority};
use poorwill_front::settings::{Card, Mistakes, Parameters, SectionMistakes, parameters};
use poorwill_rotation_policy::{Gpu, Limits, Rules};
use serde::Deserialize;

use super::calls::{HttpApi, RawHttp, check_path};
use super::hibernate::{RawHibernate, WITHOUT_HIBERNATE};
use super::names::odd_names;
use super::{Canary, CanaryKind, CanaryTime, EngineKind, Hibernate, LOG_MAX_BYTES, Model, Start, section};

/// Of engines with Poorwill's sleep mode.
const SLICE_MAX: Duration = Duration::from_secs(2);

/// Larger than any machine has, so that a typo cannot allocate much.
const GPUS_MAX: usize = 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawModel {
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
    log_max: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCanary {
    kind: Option<CanaryKind>,
    prompt: Option<String>,
    tokens: Option<u32>,
    expect: Option<String>,
    path: Option<String>,
    when: Option<CanaryTime>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRules {
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
    slice_max: Option<Wait>,
    queue_max: Option<usize>,
    wait_max: Option<Wait>,
    running_max: Option<usize>,
    look_every: Option<Wait>,
    looks_max: Option<u32>,
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
    first_byte_max: Option<Wait>,
}

impl RawModel {
    /// Means nothing if there are mistakes.
    pub(super) fn checked(
        mut self,
        every: &RawRules,
        hibernate: Option<&RawHibernate>,
        mistakes: &mut Mistakes,
    ) -> Model {
        let here = &mut mistakes.of(section(&self.name));
        self.check_names(here);
        self.check_place(here);
        self.check_start(here);
        let engine = self.engine.unwrap_or(EngineKind::Vllm);
        let http = self.http(engine, here);
        let first_byte_max = self.rules.first_byte_max.or(every.first_byte_max).map(|wait| wait.0);
        here.add_if(
            first_byte_max.is_some_and(|wait| wait.is_zero()),
            "first_byte_max is 0, so no answer could ever be in time; make it longer, or leave it out",
        );
        let rules = self.rules(every, hibernate, http.as_ref(), here);
        let is_beside = self.tests_beside(engine, rules.slice_max.is_some(), here);
        let parameters = Parameters::checked(self.parameters, self.strip, here);
        let variants = self.variants.into_iter();
        let variants = variants.map(|(name, set)| (name, parameters::fields("variants", set, here)));
        let variants: BTreeMap<_, _> = variants.collect();
        let mut aliases = self.aliases;
        let canary = self.canary.checked(hint(&self.command), is_beside, here);
        let known: Vec<&String> = aliases.iter().chain(&self.adapters).chain([&self.name]).collect();
        let new: Vec<_> = variants.keys().filter(|name| !known.contains(name)).cloned().collect();
        aliases.extend(new);
        Model {
            served_as: self.served_as.unwrap_or_else(|| self.name.clone()),
            name: self.name,
            aliases,
            adapters: self.adapters,
            parameters,
            variants,
            card: Card::checked(self.display_name, self.description, self.metadata, self.listed, here),
            engine,
            url: self.url.trim_end_matches('/').to_owned(),
            http: http.unwrap_or_default(),
            level: self.level.unwrap_or(1),
            start: (!self.command.is_empty()).then_some(Start {
                command: self.command,
                stop_command: self.stop_command,
                environment: self.environment,
                folder: self.folder,
                log: self.log,
                log_max_bytes: self.log_max.map_or(LOG_MAX_BYTES, |size| size.0),
            }),
            canary,
            rules,
            first_byte_max,
        }
    }

    fn check_names(&self, mistakes: &mut SectionMistakes<'_>) {
        let is_blank = |name: &String| name.trim().is_empty();
        let is_blank_alias = [&self.name].into_iter().chain(&self.aliases).any(is_blank);
        for (what, is_one_blank) in
            [("aliases", is_blank_alias), ("adapters", self.adapters.iter().any(is_blank))]
        {
            mistakes.add_if(is_one_blank, format!("one of {what}, or its name, is empty"));
        }
        mistakes.add_if(self.variants.keys().any(is_blank), "one of variants has no name");
        let names = [&self.name].into_iter().chain(&self.aliases).chain(&self.adapters);
        let names = names.chain(self.variants.keys()).filter(|name| !is_blank(name));
        odd_names(names.chain(&self.served_as)).for_each(|reason| mistakes.add(reason));
        mistakes.add_if(
            self.served_as.as_ref().is_some_and(String::is_empty),
            "served_as is empty; leave it out if the engine calls it as clients do",
        );
    }

    /// Where its engine is, and what it takes there.
    fn check_place(&self, mistakes: &mut SectionMistakes<'_>) {
        mistakes.add_if(
            self.need.is_some_and(|size| size.0 == 0),
            "need is 0; leave it out if it is unknown, and it is measured",
        );
        if let Some(level) = self.level.filter(|level| !(1..=2).contains(level)) {
            mistakes.add(format!("level is {level}; 1 keeps the weights in host memory, 2 drops them"));
        }
        if let Some(gpus) = &self.gpus {
            let mut sorted = gpus.clone();
            sorted.sort_unstable();
            sorted.dedup();
            let is_large = sorted.last().is_some_and(|gpu| *gpu >= GPUS_MAX);
            mistakes.add_if(
                gpus.is_empty() || sorted.len() < gpus.len() || is_large,
                format!("gpus are {gpus:?}; name each GPU that its engine is on once, from 0 on"),
            );
        }
        if let Err(reason) = check_url(self.url.trim_end_matches('/')) {
            mistakes.add(format!("url is `{}`: {reason}", without_user(&self.url)));
        }
    }

    /// How its engine is started and stopped.
    fn check_start(&self, mistakes: &mut SectionMistakes<'_>) {
        let has_none = self.command.is_empty();
        mistakes.add_if(
            has_none && (!self.environment.is_empty() || self.folder.is_some() || self.log.is_some()),
            "environment, folder and log are for a command, and it has none",
        );
        mistakes.add_if(
            has_none && !self.stop_command.is_empty(),
            "stop_command ends what a command started, and it has none; say command as well",
        );
        let is_without_log = self.log_max.is_some() && self.log.is_none();
        mistakes.add_if(is_without_log, "log_max is for a log, and it has none; say log as well");
        let is_zero = self.log_max.is_some_and(|size| size.0 == 0);
        mistakes.add_if(is_zero, "log_max is 0, and no line would fit; leave it out or make it larger");
        for (key, words) in [("command", &self.command), ("stop_command", &self.stop_command)] {
            let is_nameless = words.first().is_some_and(String::is_empty);
            mistakes
                .add_if(is_nameless, format!("its {key} begins with an empty word; begin with a program"));
            let has_nul = words.iter().any(|word| word.contains('\0'));
            mistakes.add_if(has_nul, format!("a word of its {key} has a NUL in it; leave that out"));
        }
        for (name, value) in &self.environment {
            let is_no_name = name.is_empty() || name.contains(['=', '\0']);
            mistakes.add_if(is_no_name, format!("environment has {name:?}, which is no name of a variable"));
            let has_nul = !is_no_name && value.contains('\0');
            mistakes.add_if(has_nul, format!("the variable {name} of its environment has a NUL in it"));
        }
    }

    /// Refuses what is for engines of another kind.
    fn http(&mut self, engine: EngineKind, mistakes: &mut SectionMistakes<'_>) -> Option<HttpApi> {
        let raw = self.http.take();
        if engine != EngineKind::Http {
            let reason = "http is for engines without an adapter; say engine = \"http\", or leave it out";
            mistakes.add_if(raw.is_some(), reason);
            return Some(HttpApi::default());
        }
        mistakes.add_if(
            self.level.is_some(),
            "level is for vllm and sglang; leave it out, and say under [model.http] how it sleeps",
        );
        let http = raw.unwrap_or_default().checked(mistakes)?;
        if self.rules.sleeps == Some(true) && http.sleep.is_none() {
            mistakes.add(
                "sleeps is true, and nothing says how it sleeps; say sleep, wake and asleep under [model.http], or \
                 leave sleeps out, and it is stopped and started",
            );
            return None;
        }
        Some(http)
    }

    /// By default where its wakes compare all bytes: an engine that says that it has Poorwill's sleep mode, at level 1. Also
    /// where its requests are kept, which run then.
    fn tests_beside(&self, engine: EngineKind, keeps: bool, mistakes: &mut SectionMistakes<'_>) -> bool {
        let is_compared = engine != EngineKind::Http && self.level.unwrap_or(1) == 1;
        let when = self.canary.when;
        mistakes.add_if(
            when == Some(CanaryTime::Beside) && !is_compared,
            "the canary's when is \"beside\", and no wake of it compares its bytes; leave it out, or say level = 1 with \
             vllm or sglang",
        );
        let is_text = matches!(self.canary.kind, None | Some(CanaryKind::Completion | CanaryKind::Chat));
        let is_text = is_text && self.canary.expect.is_none();
        mistakes.add_if(
            when == Some(CanaryTime::Beside) && !is_text,
            "the canary's when is \"beside\", which is for texts that are compared with the first one; leave it, kind or \
             expect out",
        );
        is_text && is_compared && when.map_or(keeps || self.has_poorwill(), |when| when == CanaryTime::Beside)
    }

    /// Whether its engine says that it has Poorwill's sleep mode.
    fn has_poorwill(&self) -> bool {
        let is_set = |value: &String| !matches!(value.as_str(), "" | "0");
        let is_backend = |words: &[String]| words[0] == "--sleep-mode-backend" && words[1] == "poorwill";
        self.environment.get("POORWILL_SLEEP_MODE").is_some_and(is_set)
            || self.command.windows(2).any(is_backend)
            || self.command.iter().any(|word| word == "--sleep-mode-backend=poorwill")
    }

    /// How long its turns last until its requests are kept in a sleep, by its own rule and that of all models.
    fn slice_max(
        &self,
        own: Option<Wait>,
        every: Option<Wait>,
        can_sleep: bool,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Option<Duration> {
        let is_vllm = self.engine.unwrap_or(EngineKind::Vllm) == EngineKind::Vllm;
        let canary = &self.canary;
        let is_before = canary.when == Some(CanaryTime::Before) && canary.expect.is_none();
        let is_exact =
            is_before && matches!(canary.kind, None | Some(CanaryKind::Completion | CanaryKind::Chat));
        let can_keep = is_vllm && can_sleep && self.level.unwrap_or(1) == 1 && !is_exact;
        let is_set = |wait: &Wait| !wait.0.is_zero();
        mistakes.add_if(
            own.as_ref().is_some_and(is_set) && !can_keep,
            "slice_max is for a vllm that sleeps at level 1, which keeps its requests then, and runs them beside its \
             canary; leave it out, and turns end with their requests, or have the canary beside, or expect a text",
        );
        let usual = || self.has_poorwill().then_some(SLICE_MAX);
        let slice_max = own.or(every).map_or_else(usual, |wait| is_set(&wait).then_some(wait.0));
        slice_max.filter(|_| can_keep)
    }

    /// Without `http`, it is not known whether it sleeps.
    fn rules(
        &mut self,
        every: &RawRules,
        hibernate: Option<&RawHibernate>,
        http: Option<&HttpApi>,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Rules {
        let own = std::mem::take(&mut self.rules);
        let (is_to_hibernate, hibernates, slice_max) = (own.hibernate(), own.hibernates, own.slice_max);
        let gpus = self.gpus.clone().unwrap_or_else(|| vec![0]);
        let mut rules = own.over(every).rules(gpus.into_iter().map(Gpu).collect());
        rules.need_bytes = self.need.map(|size| size.0);
        rules.can_restart = !self.command.is_empty();
        let has_calls = http.is_none_or(|http| http.sleep.is_some());
        rules.can_sleep &= self.engine != Some(EngineKind::Http) || has_calls;
        rules.slice_max = self.slice_max(slice_max, every.slice_max, rules.can_sleep, mistakes);
        if is_to_hibernate {
            mistakes.add_if(hibernate.is_none(), WITHOUT_HIBERNATE);
            check_hibernation(&rules, hibernates, mistakes);
        } else {
            mistakes.add_if(
                !rules.can_sleep && !rules.can_restart,
                "it neither sleeps nor has a command to be started with, so it could never leave; say command, or how \
                 it sleeps",
            );
        }
        rules.can_hibernate &= hibernate.is_some() && rules.can_restart && rules.can_sleep;
        if let Some(all) = hibernate.filter(|_| rules.can_hibernate) {
            rules.hibernate_after = rules.hibernate_after.or(all.after.map(|wait| wait.0));
            rules.residue_max_bytes = all.residue_max.map(|size| size.0);
            let wait_max = all.wait_max.map_or(Hibernate::default().wait_max, |wait| wait.0);
            let sleep_max = rules.limits.sleep;
            mistakes.add_if(
                !sleep_max.is_zero() && wait_max >= sleep_max,
                format!(
                    "its sleep_max, {sleep_max:?}, is no more than wait_max of [hibernate], so it could not hibernate \
                     in time; make one longer, or the other shorter"
                ),
            );
        }
        check_rules(&rules, mistakes);
        rules
    }
}

/// Of a model that is to hibernate.
fn check_hibernation(rules: &Rules, hibernates: Option<bool>, mistakes: &mut SectionMistakes<'_>) {
    if hibernates == Some(false) {
        mistakes.add("hibernates is false, and hibernate_after says when it does; leave one of them out");
        return;
    }
    mistakes.add_if(
        !rules.can_restart,
        "it is to hibernate, and has no command: only processes that the service started are known to it; say \
         command, or leave out hibernates and hibernate_after",
    );
    mistakes.add_if(
        !rules.can_sleep,
        "it is to hibernate, and does not sleep; leave out hibernates and hibernate_after",
    );
}

fn check_rules(rules: &Rules, mistakes: &mut SectionMistakes<'_>) {
    mistakes.add_if(
        rules.running_max == 0 || rules.queue_max == 0,
        "running_max and queue_max are 1 or more, or no request could be admitted",
    );
    mistakes.add_if(
        rules.together.as_ref().is_some_and(|set| set.trim().is_empty()),
        "together is empty; give the set a name, or leave it out",
    );
    let priority = rules.priority;
    mistakes.add_if(!is_priority(priority), format!("priority is {priority}; say one from -3600 to 3600"));
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
        let reason = format!("{what} is 0, so it could never be done in time; make it longer");
        mistakes.add_if(wait.is_zero(), reason);
    }
    mistakes.add_if(
        rules.look_every.is_zero(),
        "look_every is 0, so its engine would do nothing else; make it longer",
    );
    let (min, max) = (rules.pause_min, rules.pause_max);
    mistakes.add_if(min > max, format!("pause_min, {min:?}, is more than pause_max, {max:?}"));
}

impl RawCanary {
    fn checked(
        self,
        hint: Option<CanaryKind>,
        is_beside: bool,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Canary {
        mistakes.add_if(
            self.tokens == Some(0) || self.prompt.as_deref() == Some(""),
            "a canary has a prompt, and one token at least",
        );
        mistakes.add_if(
            self.expect.as_deref().is_some_and(|expected| expected.trim().is_empty()),
            "the canary's expect is empty, which every answer contains; leave it out to compare with the first answer",
        );
        let is_text =
            !matches!(self.kind, Some(CanaryKind::Embedding | CanaryKind::Rerank | CanaryKind::None));
        mistakes.add_if(
            !is_text && self.expect.is_some(),
            "the canary's expect is for texts, and answers of this kind are none; leave it out, or say another kind",
        );
        match (self.kind, self.path.as_deref()) {
            (Some(CanaryKind::Get), None) => {
                mistakes.add("a canary of the kind get has a path; say path = \"/health\"");
            }
            (Some(CanaryKind::Get), Some(path)) => {
                mistakes.right(check_path(path).map_err(|reason| format!("the canary's path {reason}")));
            }
            (_, Some(_)) => mistakes.add("the canary's path is for kind = \"get\"; leave it out"),
            (_, None) => {}
        }
        Canary {
            hint,
            is_beside,
            kind: self.kind,
            prompt: self.prompt.unwrap_or_else(|| "1, 2, 3, 4, 5, 6,".to_owned()),
            tokens: self.tokens.unwrap_or(16),
            expect: self.expect,
            path: self.path,
        }
    }
}

impl RawRules {
    /// Whether a model with them is to hibernate.
    pub(super) fn hibernate(&self) -> bool {
        self.hibernates == Some(true) || self.hibernate_after.is_some()
    }

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
            slice_max: self.slice_max.or(every.slice_max),
            queue_max: self.queue_max.or(every.queue_max),
            wait_max: self.wait_max.or(every.wait_max),
            running_max: self.running_max.or(every.running_max),
            look_every: self.look_every.or(every.look_every),
            looks_max: self.looks_max.or(every.looks_max),
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
            first_byte_max: self.first_byte_max.or(every.first_byte_max),
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
            looks_max: self.looks_max.unwrap_or(usual.looks_max),
            slack_bytes: self.slack.map_or(usual.slack_bytes, |size| size.0),
            pause_min: wait(self.pause_min, usual.pause_min),
            pause_max: wait(self.pause_max, usual.pause_max),
            limits,
            ..usual
        }
    }
}

/// What an engine is for, where its command says it: one for embeddings may complete texts, too, and badly.
fn hint(command: &[String]) -> Option<CanaryKind> {
    command.iter().find_map(|word| match word.as_str() {
        "--embedding" | "--embeddings" | "--is-embedding" => Some(CanaryKind::Embedding),
        "--rerank" | "--reranking" => Some(CanaryKind::Rerank),
        _ => None,
    })
}

/// A URL's user may have a password.
fn without_user(url: &str) -> String {
    url.rsplit_once('@').map_or_else(|| url.to_owned(), |(_, host)| format!("…@{host}"))
}
