//! `poorwill rotate check`: what a configuration would serve, and what this machine lacks for it. Starts nothing.

mod ports;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use poorwill::ByteSize;
use poorwill_rotate::config::{Config, Hibernate, MemorySource, Model, Start};
use poorwill_rotate::hibernation;
use poorwill_rotate::measure::{Devices, Gpu, Meter as _};
use serde::Serialize;

use super::opening::{read, runtime};
use poorwill_local::failure::{CommandOutput, Failure};

/// What would be served, and what stands against it.
#[derive(Debug, Serialize)]
pub(crate) struct CheckReport {
    /// Where clients are served.
    front: ListenerPlan,
    /// Where operators are served.
    control: ListenerPlan,
    /// As configured.
    models: Vec<ModelPlan>,
    /// Names that stand for one of several models.
    selectors: Vec<SelectorPlan>,
    /// The service would start, but may not do all that is configured.
    warnings: Vec<String>,
    /// The service would not start, or a model could not be served.
    errors: Vec<String>,
    #[serde(skip)]
    mismatch: Option<String>,
}

#[derive(Debug, Serialize)]
struct ListenerPlan {
    /// Address and port.
    listen: SocketAddr,
    /// How many keys are configured.
    keys: usize,
}

#[derive(Debug, Serialize)]
struct ModelPlan {
    /// Its name.
    name: String,
    /// Its other names.
    aliases: Vec<String>,
    /// The names of its adapters.
    adapters: Vec<String>,
    /// The kind of its engine.
    engine: String,
    /// The address of its engine.
    url: String,
    /// Positions of its GPUs.
    gpus: Vec<usize>,
    /// What it needs on each GPU; `None` where that is measured.
    need_bytes: Option<u64>,
    /// Without its arguments, which may be secrets.
    program: Option<String>,
}

#[derive(Debug, Serialize)]
struct SelectorPlan {
    /// Its name.
    name: String,
    /// The models that it may choose.
    targets: Vec<String>,
}

impl CommandOutput for CheckReport {
    const MISMATCH: &'static str = "this configuration cannot be served here";

    fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    fn text(&self) -> String {
        let keys = |count: usize| match count {
            0 => "no keys".to_owned(),
            1 => "1 key".to_owned(),
            many => format!("{many} keys"),
        };
        let mut text = format!(
            "clients:   http://{} ({})\noperators: http://{} ({})\n",
            self.front.listen,
            keys(self.front.keys),
            self.control.listen,
            keys(self.control.keys)
        );
        for model in &self.models {
            let others = model.aliases.iter().chain(&model.adapters);
            let aliases: String = others.map(|name| format!(", {name}")).collect();
            let gpus: Vec<String> = model.gpus.iter().map(ToString::to_string).collect();
            let need = model.need_bytes.map_or_else(|| "measured".to_owned(), |n| ByteSize(n).to_string());
            let program = model.program.as_ref().map(|program| format!(", started by {program}"));
            text += &format!(
                "model {}{aliases}: {} at {}, GPU {}, need {need}{}\n",
                model.name,
                model.engine,
                model.url,
                gpus.join(" and "),
                program.unwrap_or_else(|| ", not started by the service".to_owned()),
            );
        }
        for selector in &self.selectors {
            text += &format!("selector {}: one of {}\n", selector.name, selector.targets.join(", "));
        }
        for (kind, all) in [("warning", &self.warnings), ("error", &self.errors)] {
            all.iter().for_each(|one| text += &format!("{kind}: {one}\n"));
        }
        if self.warnings.is_empty() && self.errors.is_empty() {
            text += "nothing is missing\n";
        }
        text
    }
}

/// What was found.
#[derive(Debug, Default)]
struct Findings {
    warnings: Vec<String>,
    errors: Vec<String>,
}

/// Keys are resolved, and listeners bound for a moment.
pub(super) fn run(path: &Path) -> Result<CheckReport, Failure> {
    let config = read(path)?;
    let mut found = Findings::default();
    found.listener("front", config.front.listen);
    found.listener("control", config.control.listen);
    if let Some(state) = &config.state {
        let existing = state.ancestors().find(|folder| folder.as_os_str().is_empty() || folder.exists());
        let folder = existing.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        found.writable(&format!("the state folder {}", state.display()), folder);
    }
    for model in &config.models {
        if let Some(start) = &model.start {
            found.start(&model.name, start);
        }
    }
    found.warnings.extend(ports::warnings(&config)?);
    if let Some(hibernate) = &config.hibernate {
        found.hibernation(&config, hibernate)?;
    }
    if matches!(config.memory, MemorySource::Declared { .. }) {
        found.warnings.push(
            "memory: nothing is measured; each awake model is believed to take its need, and nothing else to be there"
                .to_owned(),
        );
    }
    match config.memory {
        MemorySource::Devices(driver) => found.devices(&config, &Devices::by(driver))?,
        MemorySource::Declared { gpu_bytes } | MemorySource::Processes { gpu_bytes, .. } => {
            gpus_of(&config).iter().for_each(|(gpu, models)| found.needs(*gpu, gpu_bytes, models));
        }
    }
    Ok(report(&config, found))
}

fn report(config: &Config, found: Findings) -> CheckReport {
    let count = found.errors.len();
    let mismatch = found.errors.first().map(|first| match count {
        1 => first.clone(),
        _ => format!("{first}, and {} more", count - 1),
    });
    let front = ListenerPlan { listen: config.front.listen, keys: config.front.keys.len() };
    let control = ListenerPlan { listen: config.control.listen, keys: config.control.keys.len() };
    let models = config.models.iter().map(plan).collect();
    let selectors = config.selectors.iter();
    let selectors =
        selectors.map(|one| SelectorPlan { name: one.name.clone(), targets: one.targets.clone() });
    CheckReport {
        front,
        control,
        models,
        selectors: selectors.collect(),
        warnings: found.warnings,
        errors: found.errors,
        mismatch,
    }
}

fn plan(model: &Model) -> ModelPlan {
    ModelPlan {
        name: model.name.clone(),
        aliases: model.aliases.clone(),
        engine: model.engine.as_str().to_owned(),
        adapters: model.adapters.clone(),
        url: model.url.clone(),
        gpus: model.rules.gpus.iter().map(|gpu| gpu.0).collect(),
        need_bytes: model.rules.need_bytes,
        program: model.start.as_ref().and_then(|start| start.command.first().cloned()),
    }
}

impl Findings {
    fn listener(&mut self, name: &str, listen: SocketAddr) {
        match TcpListener::bind(listen) {
            Ok(_) => {}
            // It may be the service that this configuration is for.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                self.warnings
                    .push(format!("{name}: {listen} is taken; a new service could not listen there"));
            }
            Err(error) => self.errors.push(format!("{name}: cannot listen on {listen}: {error}")),
        }
    }

    fn writable(&mut self, what: &str, folder: &Path) {
        if let Err(error) = tempfile::tempfile_in(folder) {
            self.errors.push(format!("{what} cannot be written: {}: {error}", folder.display()));
        }
    }

    fn start(&mut self, model: &str, start: &Start) {
        let folder = start.folder.as_deref().filter(|folder| !folder.is_dir());
        if let Some(folder) = folder {
            self.errors.push(format!("model `{model}`: its folder {} is not there", folder.display()));
        }
        let missing = |program: &String| {
            let reason = match program.contains('/') {
                true => "is no program that can be started",
                false => "is in no folder of PATH; name it with its folder, or extend PATH in environment",
            };
            (!is_program(program, start)).then(|| format!("model `{model}`: {program} {reason}"))
        };
        self.errors.extend(start.command.first().and_then(missing));
        // Signals follow it.
        self.warnings.extend(start.stop_command.first().and_then(missing));
        let Some(log) = &start.log else { return };
        let what = format!("model `{model}`: the log {}", log.display());
        if log.exists() {
            if let Err(error) = OpenOptions::new().append(true).open(log) {
                self.errors.push(format!("{what} cannot be written: {error}"));
            }
        } else {
            let folder = log.parent().filter(|folder| !folder.as_os_str().is_empty());
            self.writable(&what, folder.unwrap_or(Path::new(".")));
        }
    }

    /// Engines sleep on where they cannot hibernate.
    fn hibernation(&mut self, config: &Config, hibernate: &Hibernate) -> Result<(), Failure> {
        for model in &config.models {
            if model.start.is_none() {
                let model = &model.name;
                self.warnings.push(format!(
                    "model `{model}` cannot hibernate: it has no command, and only processes that the service started are \
                     known to it"
                ));
            }
        }
        let mut warn =
            |reason| self.warnings.push(format!("hibernate: no engine can hibernate here: {reason}"));
        // The service's may be another user's, and what it names stays as it is.
        let journal = tempfile::tempdir()
            .map_err(|error| Failure::new(format!("cannot make a temporary folder: {error}")))?;
        if let Err(reason) = runtime()?.block_on(hibernation::check(hibernate, Some(journal.path()))) {
            warn(reason);
        }
        let journal = config.state.as_deref().map(hibernation::journal_in).unwrap_or_default();
        let Ok(folder) = fs::symlink_metadata(&journal) else { return Ok(()) };
        let mode = folder.permissions().mode() & 0o777;
        if !folder.is_dir() {
            warn(format!("{} is no folder: remove it", journal.display()));
        } else if mode & 0o022 != 0 {
            warn(format!("others may write into {}: it has mode {mode:o}", journal.display()));
        }
        Ok(())
    }

    fn devices(&mut self, config: &Config, meter: &Devices) -> Result<(), Failure> {
        let runtime = runtime()?;
        for (gpu, models) in gpus_of(config) {
            match runtime.block_on(meter.measure(&[gpu])) {
                Ok(memory) => {
                    memory.iter().for_each(|memory| self.needs(gpu, memory.total_bytes, &models));
                    self.warnings.extend(runtime.block_on(meter.remark(gpu)));
                }
                Err(error) => {
                    let names: Vec<String> = models.iter().map(|model| format!("`{}`", model.name)).collect();
                    let kind = if names.len() == 1 { "model" } else { "models" };
                    self.errors.push(format!("{kind} {} cannot wake: {error}", names.join(", ")));
                }
            }
        }
        Ok(())
    }

    fn needs(&mut self, gpu: Gpu, gpu_bytes: u64, models: &[&Model]) {
        for model in models {
            if let Some(need) = model.rules.need_bytes.filter(|need| *need > gpu_bytes) {
                let (name, need, total) = (&model.name, ByteSize(need), ByteSize(gpu_bytes));
                self.errors.push(format!("model `{name}` needs {need} on GPU {}, which has {total}", gpu.0));
            }
        }
    }
}

fn gpus_of(config: &Config) -> BTreeMap<Gpu, Vec<&Model>> {
    let mut gpus: BTreeMap<Gpu, Vec<&Model>> = BTreeMap::new();
    for model in &config.models {
        model.rules.gpus.iter().for_each(|gpu| gpus.entry(*gpu).or_default().push(model));
    }
    gpus
}

/// Looks where the service would: in the engine's own PATH, or from its folder.
fn is_program(program: &str, start: &Start) -> bool {
    let is_executable = |path: PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    let folder = start.folder.clone().unwrap_or_default();
    if program.contains('/') {
        return is_executable(folder.join(program));
    }
    let own = start.environment.get("PATH").map(OsString::from);
    let path = own.or_else(|| env::var_os("PATH")).unwrap_or_default();
    env::split_paths(&path).any(|entry| is_executable(folder.join(entry).join(program)))
}
