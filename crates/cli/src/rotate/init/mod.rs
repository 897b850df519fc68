//! `poorwill rotate init`: a first configuration, from the engines that run and the GPUs. Changes no engine.

mod running;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use poorwill::ByteSize;
use poorwill::gpus::{Gpus, GpusError};
use poorwill_rotate::measure::{Devices, Gpu, GpuMemory, Meter as _};
use serde::Serialize;
use toml::{Table, Value};

use self::running::{RunningEngine, running};
use super::draft::{self, Draft, EngineDraft, ModelDraft, literal};
use super::engines::{EngineProgram, without_secrets};
use super::opening::runtime;
use poorwill_local::failure::{CommandOutput, Failure};

/// The first port to try for a listener.
const PORT_MIN: u16 = 8080;

#[derive(Debug, Serialize)]
pub(crate) struct InitReport {
    /// The written file. Without one, the configuration is the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// The engines that run here.
    models: Vec<FoundModel>,
    /// How many GPUs were found.
    gpus: usize,
    /// Its text, where no file was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    configuration: Option<String>,
}

#[derive(Debug, Serialize)]
struct FoundModel {
    /// The name that it serves.
    name: String,
    /// Its address.
    url: String,
    /// What it is, in words.
    engine: &'static str,
}

impl CommandOutput for InitReport {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        let Some(file) = &self.file else { return self.configuration.clone().unwrap_or_default() };
        let found: String = self
            .models
            .iter()
            .map(|model| format!("found {}: {} at {}\n", model.name, model.engine, model.url))
            .collect();
        let found = if found.is_empty() {
            "no engine runs; the file has two models to be filled in\n".to_owned()
        } else {
            found
        };
        let file = file.display();
        format!("{found}wrote {file}\nnext: poorwill rotate check --config {file}\n")
    }
}

/// Writes the file, or returns its text without one.
pub(super) fn run(path: Option<&Path>) -> Result<InitReport, Failure> {
    let gpus = Gpus::open();
    let engines = running(gpus.as_ref().ok())?;
    let others = if gpus.is_ok() { Vec::new() } else { other_gpus()? };
    let draft = drafted(&engines, &gpus, &others);
    let text = draft.text()?;
    if let Some(path) = path {
        draft::write_new(path, &text)?;
    }
    let found = engines.iter().zip(&draft.models).map(|(engine, model)| FoundModel {
        name: model.name.clone(),
        url: model.url.clone(),
        engine: engine.line.kind.name(),
    });
    Ok(InitReport {
        models: found.collect(),
        gpus: gpus.and_then(|gpus| gpus.count()).unwrap_or(others.len()),
        configuration: path.is_none().then_some(text),
        file: path.map(Path::to_path_buf),
    })
}

/// Those of other makers, until one is not there.
fn other_gpus() -> Result<Vec<GpuMemory>, Failure> {
    let (meter, runtime) = (Devices::default(), runtime()?);
    let memory = (0..).map_while(|position| runtime.block_on(meter.measure(&[Gpu(position)])).ok());
    Ok(memory.flatten().collect())
}

fn drafted(engines: &[RunningEngine], gpus: &Result<Gpus, GpusError>, others: &[GpuMemory]) -> Draft {
    let mut draft = Draft { notes: head(engines, gpus, others), ..Draft::default() };
    let mut taken: BTreeSet<u16> = engines.iter().map(|engine| engine.address.port()).collect();
    draft.front = free_address(&mut taken);
    draft.control = free_address(&mut taken);
    draft.models = if engines.is_empty() { template() } else { models(engines) };
    draft
}

fn head(engines: &[RunningEngine], gpus: &Result<Gpus, GpusError>, others: &[GpuMemory]) -> Vec<String> {
    let mut notes =
        vec!["A rotation: these models share the GPUs, and take turns. `poorwill rotate check --config FILE` checks \
              this file, and `poorwill rotate --config FILE` serves it."
            .to_owned()];
    let sized = |position: usize, bytes: u64| format!("GPU {position} has {}.", ByteSize(bytes));
    let of_gpu = |gpus: &Gpus, position: usize| match gpus.memory(position) {
        Ok(memory) => sized(position, memory.total_bytes),
        Err(error) => format!("GPU {position}: {error}."),
    };
    match gpus {
        Ok(gpus) => notes.extend((0..gpus.count().unwrap_or(0)).map(|position| of_gpu(gpus, position))),
        Err(_) if !others.is_empty() => {
            notes.extend(others.iter().zip(0..).map(|(memory, position)| sized(position, memory.total_bytes)));
        }
        Err(error) => notes.push(format!(
            "No GPU was found, and without one no model can wake: {error}. One that cannot be measured is declared: \
             [memory] measure = \"declared\" and gpu = \"24GiB\", with a need for each model."
        )),
    }
    if engines.is_empty() {
        notes.push(
            "No engine of this user listens here. Below are two models to be filled in; start the engines, or give \
             their commands."
                .to_owned(),
        );
    } else {
        notes.push(
            "The engines below run now. One that can sleep may go on. Stop the others first: the service starts them \
             by their commands, with the variables of the service and those named here."
                .to_owned(),
        );
    }
    notes
}

/// On the loopback address.
fn free_address(taken: &mut BTreeSet<u16>) -> Option<SocketAddr> {
    let is_free =
        |port: &u16| !taken.contains(port) && TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let port = (PORT_MIN..u16::MAX).find(is_free)?;
    taken.insert(port);
    Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port))
}

fn models(engines: &[RunningEngine]) -> Vec<ModelDraft> {
    let mut names = BTreeSet::new();
    engines.iter().map(|engine| model(engine, &mut names)).collect()
}

/// `taken` are the names of other models.
fn model(engine: &RunningEngine, taken: &mut BTreeSet<String>) -> ModelDraft {
    let mut reported = engine.models.iter().cloned();
    let served_as = reported.next().unwrap_or_else(|| format!("model-{}", engine.address.port()));
    let mut name = plain(&served_as);
    if !taken.insert(name.clone()) {
        name = format!("{name}-{}", engine.address.port());
        taken.insert(name.clone());
    }
    let kind = engine.line.kind;
    let engine_draft = match kind {
        EngineProgram::Vllm | EngineProgram::Mock => EngineDraft::Vllm { sleeps: true },
        EngineProgram::Sglang => EngineDraft::Sglang { sleeps: true },
        EngineProgram::Ollama => EngineDraft::Other {
            health: "/api/version".to_owned(),
            calls: ollama_calls(&literal(&served_as)),
        },
        EngineProgram::LlamaServer | EngineProgram::TextEmbeddings | EngineProgram::Infinity => {
            EngineDraft::Other { health: "/health".to_owned(), calls: Vec::new() }
        }
    };
    let mut model = ModelDraft::new(literal(&name), engine.url(), engine_draft);
    model.served_as = (name != served_as).then(|| literal(&served_as));
    if kind == EngineProgram::Ollama {
        let others: Vec<String> = reported.collect();
        if !others.is_empty() {
            model.notes.push(format!(
                "This Ollama serves other models, too: {}. Each needs an engine of its own here.",
                others.join(", ")
            ));
        }
    } else {
        let is_new = |alias: &String| plain(alias) == *alias && taken.insert(alias.clone());
        model.aliases = reported.filter(is_new).map(|alias| literal(&alias)).collect();
    }
    model.gpus = engine.gpus.clone();
    model.need_bytes = engine.used_bytes;
    if engine.used_bytes.is_some() {
        model.notes.push("`need` is what NVML shows for it now.".to_owned());
    } else if let Some(visible) = &engine.visible_devices {
        model
            .notes
            .push(format!("Its GPUs are those of CUDA_VISIBLE_DEVICES={visible}: compare with nvidia-smi."));
    }
    write_command(&mut model, engine);
    model
}

/// A request without a prompt loads or unloads its model.
fn ollama_calls(model: &str) -> Vec<(&'static str, Value)> {
    let keep_alive = |seconds: i64| {
        let body = Table::from_iter(
            [("model", Value::from(model)), ("keep_alive", seconds.into())]
                .map(|(key, value)| (key.to_owned(), value)),
        );
        called("POST /api/generate", [("body", Value::Table(body))])
    };
    let none = Value::Array(Vec::new());
    vec![
        ("sleep", keep_alive(0)),
        ("wake", keep_alive(-1)),
        ("asleep", called("GET /api/ps", [("at", "/models".into()), ("is", none)])),
    ]
}

fn called<const N: usize>(call: &str, more: [(&str, Value); N]) -> Value {
    let more = more.map(|(key, value)| (key.to_owned(), value));
    Value::Table([("call".to_owned(), call.into())].into_iter().chain(more).collect())
}

fn write_command(model: &mut ModelDraft, engine: &RunningEngine) {
    let kind = engine.line.kind;
    let (mut command, left_out) = without_secrets(&engine.line.words);
    if !left_out.is_empty() {
        model.command_notes.push(format!(
            "Left out, as they may be secrets: {}. The service asks engines without a key, and has keys of its own; \
             other secrets belong into the service's environment.",
            left_out.join(", ")
        ));
    }
    if let Some(option) = kind.sleep_option() {
        let lacks_option = !engine.line.has(option);
        let needs = kind.sleep_needs();
        if lacks_option {
            command.push(option.to_owned());
        }
        if lacks_option || kind == EngineProgram::Vllm && engine.is_sleeping.is_none() {
            model.command_notes.push(format!(
                "As it runs now it cannot sleep. For that it needs {needs}, as it is written below: stop it, and the \
                 service starts it so. Or say sleeps = false under [model.rules], and it is stopped and started instead."
            ));
        }
    }
    if kind == EngineProgram::Ollama {
        model.command_notes.push(format!(
            "It needs {}, or it unloads its model by itself: stop it if it runs without, and the service starts it so.",
            kind.sleep_needs()
        ));
    }
    model.command = command.iter().map(|word| literal(word)).collect();
    if let Some((name, value)) = kind.sleep_variable() {
        model.environment.push((name.to_owned(), value.to_owned()));
    }
    if let Some(visible) = &engine.visible_devices {
        model.environment.push(("CUDA_VISIBLE_DEVICES".to_owned(), literal(visible)));
    }
    model.folder = engine.folder.clone();
}

/// A path is known by its last part, and a name has neither blanks around it nor control characters.
fn plain(name: &str) -> String {
    let last = if name.starts_with('/') { name.rsplit('/').find(|part| !part.is_empty()) } else { None };
    let name = last.unwrap_or(name);
    let name: String =
        name.strip_suffix(".gguf").unwrap_or(name).chars().filter(|c| !c.is_control()).collect();
    let name = name.trim();
    if name.is_empty() { "model".to_owned() } else { name.to_owned() }
}

fn template() -> Vec<ModelDraft> {
    let mut large = ModelDraft::new(
        "large".to_owned(),
        "http://127.0.0.1:8000".to_owned(),
        EngineDraft::Vllm { sleeps: true },
    );
    large.notes.push(
        "The name in requests, and the address of its engine, which serves it under that name.".to_owned(),
    );
    large.command_notes.push(
        "With a command the service starts the engine, and again after a failure. A vLLM that may sleep needs:".to_owned(),
    );
    large.command_notes.push(
        "command = [\"vllm\", \"serve\", \"ORG/MODEL\", \"--port\", \"${PORT}\", \"--enable-sleep-mode\"]"
            .to_owned(),
    );
    large.command_notes.push("environment = { VLLM_SERVER_DEV_MODE = \"1\" }".to_owned());
    large.gpus = Some(vec![0]);
    let mut small = ModelDraft { name: "small".to_owned(), notes: Vec::new(), ..large.clone() };
    small.url = "http://127.0.0.1:8001".to_owned();
    small.command_notes = vec![
        "An engine that cannot sleep is stopped and started. It needs a command, and sleeps = false:"
            .to_owned(),
        "command = [\"llama-server\", \"-m\", \"/models/small.gguf\", \"--port\", \"${PORT}\"]".to_owned(),
        "rules = { sleeps = false }".to_owned(),
    ];
    vec![large, small]
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use poorwill_rotate::config::EngineKind;

    use super::super::engines::CommandLine;
    use super::*;

    fn engine(line: &str, port: u16, models: &[&str]) -> RunningEngine {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        RunningEngine {
            line: CommandLine::of(&words).unwrap(),
            address: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
            models: models.iter().map(|name| (*name).to_owned()).collect(),
            is_sleeping: None,
            gpus: None,
            used_bytes: None,
            visible_devices: None,
            folder: None,
        }
    }

    fn text(engines: &[RunningEngine]) -> String {
        let gpus = Err(GpusError::Absent { position: 0, count: 0 });
        drafted(engines, &gpus, &[]).text().unwrap_or_else(|failure| panic!("{failure}"))
    }

    #[test]
    fn every_kind_of_engine_makes_a_configuration() {
        let mut all = vec![
            engine("vllm serve a\"b --api-key sk-1", 9001, &["a\"b", "other", "o\ndd", " odd"]),
            engine("python -m sglang.launch_server --model-path ${two}", 9002, &["${two}"]),
            engine("llama-server -m /m/q.gguf", 9003, &["/m/q.gguf"]),
            engine("llama-server -m /n/q.gguf", 9004, &["/n/q.gguf"]),
            engine("text-embeddings-router --model-id e", 9005, &[]),
            engine("ollama serve", 9006, &["o:1", "o:2"]),
        ];
        all[0].visible_devices = Some("1,0".to_owned());
        all[0].gpus = Some(vec![1]);
        all[2].used_bytes = Some((3 << 30) + 1);
        let text = text(&all);
        for words in [
            "Left out, as they may be secrets: --api-key.",
            "--enable-sleep-mode and",
            "name = \"q\"\nserved_as = \"/m/q.gguf\"",
            "name = \"q-9004\"\nserved_as = \"/n/q.gguf\"",
            "need = \"3073MiB\"",
            "\"--enable-memory-saver\"",
            "name = \"$${two}\"",
            "serves other models, too: o:2.",
            "CUDA_VISIBLE_DEVICES = \"1,0\"",
            "OLLAMA_KEEP_ALIVE = \"-1\"",
        ] {
            assert!(text.contains(words), "`{words}` is not in:\n{text}");
        }
        assert!(!text.contains("sk-1"), "{text}");
        let config = poorwill_rotate::config::Config::parse(&text, &|_| Err(String::new())).unwrap();
        let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["a\"b", "${two}", "q", "q-9004", "model-9005", "o:1"]);
        assert_eq!(config.models[0].aliases, ["other"]);
        assert!(config.models[0].rules.can_sleep && !config.models[2].rules.can_sleep);
        let [llama, ollama] = [2, 5].map(|at| &config.models[at]);
        assert_eq!([llama, ollama].map(|model| model.engine), [EngineKind::Http; 2]);
        assert_eq!((llama.http.health.as_str(), llama.http.sleep.is_some()), ("/health", false));
        assert_eq!(ollama.http.health, "/api/version");
        let calls = ollama.http.sleep.as_ref().unwrap();
        assert_eq!(format!("{:?}, {:?}", calls.sleep, calls.wake), "POST /api/generate, POST /api/generate");
        let words = "keep_alive = 0, model = \"o:1\"";
        assert!(ollama.rules.can_sleep && text.contains(words), "{text}");
    }

    #[test]
    fn engines_keep_their_ports() {
        let config = text(&[engine("llama-server -m q", 8080, &["q"]), engine("vllm serve m", 8081, &["m"])]);
        let config = poorwill_rotate::config::Config::parse(&config, &|_| Err(String::new())).unwrap();
        let ports = [config.front.listen.port(), config.control.listen.port()];
        assert!(ports[0] > 8081 && ports[1] > ports[0], "{ports:?}");
    }
}
