//! A configuration that is written for an operator: what was found, with comments, ready to be checked and changed.
//!
//! Texts are in the configuration's own words: `${…}` is a macro, and [`literal`] keeps one from being that.

mod page;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use poorwill::chain;
use poorwill_rotate::config::Config;
use toml::{Table, Value};

use self::page::{Page, quoted_key};
use poorwill_local::failure::Failure;
use poorwill_local::files;

#[derive(Debug, Default)]
pub(super) struct Draft {
    /// What the whole file is, and what to know of it.
    pub(super) notes: Vec<String>,
    pub(super) front: Option<SocketAddr>,
    pub(super) control: Option<SocketAddr>,
    /// Sources of the front's keys.
    pub(super) keys: Vec<String>,
    pub(super) models: Vec<ModelDraft>,
    pub(super) selectors: Vec<SelectorDraft>,
    pub(super) profiles: Vec<ProfileDraft>,
    /// Below the models.
    pub(super) last_notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum EngineDraft {
    Vllm {
        sleeps: bool,
    },
    Sglang {
        sleeps: bool,
    },
    /// Any other, with the path of its health check.
    Other {
        health: String,
        /// By which it sleeps and wakes; without any it is started and stopped.
        calls: Vec<(&'static str, Value)>,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModelDraft {
    /// Above the table.
    pub(super) notes: Vec<String>,
    pub(super) name: String,
    pub(super) aliases: Vec<String>,
    pub(super) served_as: Option<String>,
    pub(super) engine: EngineDraft,
    pub(super) url: String,
    /// `None` leaves the default.
    pub(super) gpus: Option<Vec<usize>>,
    pub(super) need_bytes: Option<u64>,
    pub(super) command: Vec<String>,
    /// Above the command.
    pub(super) command_notes: Vec<String>,
    pub(super) stop_command: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) folder: Option<PathBuf>,
    pub(super) card: CardDraft,
    pub(super) parameters: Table,
    pub(super) strip: Vec<String>,
    pub(super) variants: Vec<(String, Table)>,
    pub(super) rules: RuleDrafts,
    pub(super) canary: Vec<(&'static str, Value)>,
}

/// What the list of models shows besides a name.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct CardDraft {
    pub(super) display_name: Option<String>,
    pub(super) description: Option<String>,
    pub(super) is_unlisted: bool,
    pub(super) metadata: Table,
}

/// A name for several models.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SelectorDraft {
    pub(super) name: String,
    pub(super) targets: Vec<String>,
    pub(super) strategy: &'static str,
    pub(super) requests: Option<i64>,
    pub(super) card: CardDraft,
}

/// Names that an operator may choose together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ProfileDraft {
    pub(super) name: String,
    /// Each with what it stands for: no model, if that is empty.
    pub(super) names: Vec<(String, String)>,
}

impl ModelDraft {
    pub(super) fn new(name: String, url: String, engine: EngineDraft) -> Self {
        Self {
            notes: Vec::new(),
            name,
            aliases: Vec::new(),
            served_as: None,
            engine,
            url,
            gpus: None,
            need_bytes: None,
            command: Vec::new(),
            command_notes: Vec::new(),
            stop_command: Vec::new(),
            environment: Vec::new(),
            folder: None,
            card: CardDraft::default(),
            parameters: Table::new(),
            strip: Vec::new(),
            variants: Vec::new(),
            rules: RuleDrafts::default(),
            canary: Vec::new(),
        }
    }

    /// By name, alias or variant.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let variants = self.variants.iter().map(|(variant, _)| variant);
        self.aliases.iter().chain(variants).chain([&self.name]).any(|one| one == name)
    }
}

/// Rules of a model, one of each key.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RuleDrafts(Vec<(&'static str, Value)>);

impl RuleDrafts {
    /// Keeps the rule that is there already, if any.
    pub(super) fn add(&mut self, key: &'static str, value: impl Into<Value>) {
        if !self.has(key) {
            self.0.push((key, value.into()));
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(other, _)| *other == key)
    }
}

/// The model of this name, alias or variant.
pub(super) fn of_name<'m>(models: &'m mut [ModelDraft], name: &str) -> Option<&'m mut ModelDraft> {
    models.iter_mut().find(|model| model.is_called(name))
}

impl Draft {
    /// The file. It was read as a configuration, and is one.
    ///
    /// # Errors
    /// If it is none, with the reason.
    pub(super) fn text(&self) -> Result<String, Failure> {
        let text = self.written();
        // Neither keys nor variables need to be there yet.
        let read = Config::parse(&text, &|_| Ok("key".to_owned()));
        read.map(|_| text)
            .map_err(|error| Failure::new(format!("this makes no configuration: {}", chain(&error))))
    }

    fn written(&self) -> String {
        let mut page = Page::default();
        self.notes.iter().for_each(|note| page.comment(note));
        page.blank();
        page.comment(
            "Keeps which engines run, and each model's first answer, while the service is restarted.",
        );
        page.suggest("state", "/var/lib/poorwill-rotate", "");
        page.blank();
        page.header("[front]");
        page.comment("The address for clients. One that other machines can reach needs keys.");
        page.set(
            "listen",
            self.front.map_or_else(|| "127.0.0.1:8080".to_owned(), |listen| listen.to_string()),
        );
        if self.keys.is_empty() {
            page.suggest("keys", vec!["env:POORWILL_KEY"], "where the key is, never the key");
        } else {
            page.set("keys", self.keys.clone());
        }
        page.blank();
        page.header("[control]");
        page.comment("The address for operators: page, commands and metrics.");
        page.set(
            "listen",
            self.control.map_or_else(|| "127.0.0.1:8081".to_owned(), |listen| listen.to_string()),
        );
        for model in &self.models {
            page.blank();
            model.write(&mut page);
        }
        for selector in &self.selectors {
            page.blank();
            selector.write(&mut page);
        }
        for profile in &self.profiles {
            page.blank();
            page.header(&format!("[profile.{}]", quoted_key(&profile.name)));
            profile.names.iter().for_each(|(name, target)| page.set(name, target.clone()));
        }
        if !self.last_notes.is_empty() {
            page.blank();
            self.last_notes.iter().for_each(|note| page.comment(note));
        }
        page.text()
    }
}

impl ModelDraft {
    fn write(&self, page: &mut Page) {
        self.notes.iter().for_each(|note| page.comment(note));
        page.header("[[model]]");
        page.set("name", self.name.clone());
        if !self.aliases.is_empty() {
            page.set("aliases", self.aliases.clone());
        }
        if let Some(served_as) = &self.served_as {
            page.set("served_as", served_as.clone());
        }
        match &self.engine {
            EngineDraft::Vllm { .. } => page.set("engine", "vllm"),
            EngineDraft::Sglang { .. } => page.set("engine", "sglang"),
            EngineDraft::Other { .. } => page.set("engine", "http"),
        }
        page.set("url", self.url.clone());
        match &self.gpus {
            Some(gpus) => {
                page.set("gpus", gpus.iter().copied().map(position).collect::<Vec<_>>());
            }
            None => page.suggest("gpus", vec![0], "the positions that nvidia-smi shows"),
        }
        match self.need_bytes {
            Some(bytes) => page.set("need", size(bytes)),
            None => page.suggest("need", "40GiB", "memory on each GPU; measured if it is left out"),
        }
        self.write_command(page);
        self.card.write(page);
        if !self.parameters.is_empty() {
            page.set("parameters", Value::Table(self.parameters.clone()));
        }
        if !self.strip.is_empty() {
            page.set("strip", self.strip.clone());
        }
        self.write_tables(page);
    }

    fn write_command(&self, page: &mut Page) {
        self.command_notes.iter().for_each(|note| page.comment(note));
        if self.command.is_empty() {
            return;
        }
        page.set("command", self.command.clone());
        if !self.stop_command.is_empty() {
            page.set("stop_command", self.stop_command.clone());
        }
        if !self.environment.is_empty() {
            let variables = self.environment.iter().map(|(name, value)| (name.clone(), value.clone().into()));
            page.set("environment", Value::Table(variables.collect()));
        }
        if let Some(folder) = &self.folder {
            page.set("folder", literal(&folder.to_string_lossy()));
        }
    }

    fn write_tables(&self, page: &mut Page) {
        for (name, set) in &self.variants {
            page.header(&format!("[model.variants.{}]", quoted_key(name)));
            set.iter().for_each(|(key, value)| page.set(key, value.clone()));
        }
        let mut rules = self.rules.0.clone();
        match &self.engine {
            EngineDraft::Other { health, calls } => {
                page.header("[model.http]");
                page.set("health", health.clone());
                calls.iter().for_each(|(key, call)| page.set(key, call.clone()));
            }
            EngineDraft::Vllm { sleeps: true } | EngineDraft::Sglang { sleeps: true } => {}
            _ => rules.insert(0, ("sleeps", false.into())),
        }
        for (header, entries) in [("[model.rules]", &rules), ("[model.canary]", &self.canary)] {
            if !entries.is_empty() {
                page.header(header);
                entries.iter().for_each(|(key, value)| page.set(key, value.clone()));
            }
        }
    }
}

impl CardDraft {
    fn write(&self, page: &mut Page) {
        for (key, text) in [("display_name", &self.display_name), ("description", &self.description)] {
            if let Some(text) = text {
                page.set(key, text.clone());
            }
        }
        if self.is_unlisted {
            page.set("listed", false);
        }
        if !self.metadata.is_empty() {
            page.set("metadata", Value::Table(self.metadata.clone()));
        }
    }
}

impl SelectorDraft {
    fn write(&self, page: &mut Page) {
        page.header("[[selector]]");
        page.set("name", self.name.clone());
        page.set("targets", self.targets.clone());
        page.set("strategy", self.strategy);
        if let Some(requests) = self.requests {
            page.set("requests", requests);
        }
        self.card.write(page);
    }
}

/// A text in which `${…}` is no macro.
pub(super) fn literal(text: &str) -> String {
    text.replace("${", "$${")
}

/// Never replaces a file.
pub(super) fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    files::create(path, text).map_err(|error| {
        let help = match error.kind() {
            io::ErrorKind::AlreadyExists => "; it is not replaced: name another, or move it away",
            io::ErrorKind::NotFound => "; make its folder first, or name another",
            io::ErrorKind::StorageFull => "; there is no file now: make space, or name one on another disk",
            io::ErrorKind::PermissionDenied => "; name one in a folder that this user may write",
            _ => "; name another",
        };
        Failure::new(format!("cannot write {}: {error}{help}", path.display()))
    })
}

/// In whole MiB, rounded up.
fn size(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

fn position(gpu: usize) -> i64 {
    i64::try_from(gpu).unwrap_or(i64::MAX)
}
