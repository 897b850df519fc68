//! Engines by their command lines: their kind, names, port and GPUs, and which options may hold secrets.

use std::path::Path;

/// A word this near to the beginning may be the program, behind one of [`RUNNERS`].
const PROGRAM_WITHIN: usize = 8;

/// Programs that run the one that is behind them. Python has its version in its name.
const RUNNERS: [&str; 12] = [
    "python", "uv", "uvx", "pipx", "poetry", "conda", "env", "nice", "nohup", "numactl", "taskset", "setsid",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineProgram {
    Vllm,
    Sglang,
    LlamaServer,
    TextEmbeddings,
    Infinity,
    Ollama,
    /// Poorwill's own, for trials.
    Mock,
}

/// How an engine was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CommandLine {
    pub(super) kind: EngineProgram,
    pub(super) words: Vec<String>,
    /// Where its options begin.
    options_at: usize,
}

impl EngineProgram {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaServer => "llama-server",
            Self::TextEmbeddings => "text-embeddings-router",
            Self::Infinity => "Infinity",
            Self::Ollama => "Ollama",
            Self::Mock => "a mock engine",
        }
    }

    /// The option without which it cannot sleep; `None` for engines that never can.
    pub(super) fn sleep_option(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("--enable-sleep-mode"),
            Self::Sglang => Some("--enable-memory-saver"),
            _ => None,
        }
    }

    /// The variable that it needs for that, and its value.
    pub(super) fn sleep_variable(self) -> Option<(&'static str, &'static str)> {
        let assignment = match self {
            Self::Vllm => "VLLM_SERVER_DEV_MODE=1",
            // Else it unloads its model by itself.
            Self::Ollama => "OLLAMA_KEEP_ALIVE=-1",
            _ => return None,
        };
        assignment.split_once('=')
    }

    /// What it needs so that it can sleep, in words.
    pub(super) fn sleep_needs(self) -> String {
        let variable =
            self.sleep_variable().map(|(name, value)| format!("{name}={value} in its environment"));
        let needs = self.sleep_option().map(str::to_owned).into_iter().chain(variable);
        needs.collect::<Vec<_>>().join(" and ")
    }

    fn usual_port(self) -> u16 {
        match self {
            Self::Vllm | Self::Mock => 8000,
            Self::Sglang => 30000,
            Self::LlamaServer => 8080,
            Self::TextEmbeddings => 3000,
            Self::Infinity => 7997,
            Self::Ollama => 11434,
        }
    }

    fn model_options(self) -> &'static [&'static str] {
        match self {
            Self::Vllm => &["--model"],
            Self::Sglang => &["--model-path", "--model"],
            Self::LlamaServer => &["-hf", "--hf-repo", "-m", "--model"],
            Self::TextEmbeddings | Self::Infinity => &["--model-id"],
            Self::Ollama => &[],
            Self::Mock => &["--model"],
        }
    }
}

impl CommandLine {
    /// `None` for the command line of anything else.
    pub(super) fn of(words: &[String]) -> Option<Self> {
        let is_called = |at: usize, name: &str| {
            words.get(at).is_some_and(|word| Path::new(word).file_name().is_some_and(|file| file == name))
        };
        let is = |at: usize, text: &str| words.get(at).is_some_and(|word| word == text);
        let kind = |at: usize| {
            let verb = at + 1;
            let with_verb = [
                ("vllm", "serve", EngineProgram::Vllm),
                ("sglang", "serve", EngineProgram::Sglang),
                ("ollama", "serve", EngineProgram::Ollama),
                ("infinity_emb", "v2", EngineProgram::Infinity),
                ("poorwill", "mock-engine", EngineProgram::Mock),
            ];
            let modules = [
                ("vllm.entrypoints.openai.api_server", EngineProgram::Vllm),
                ("vllm.entrypoints.cli.main", EngineProgram::Vllm),
                ("sglang.launch_server", EngineProgram::Sglang),
            ];
            let programs = [
                ("llama-server", EngineProgram::LlamaServer),
                ("text-embeddings-router", EngineProgram::TextEmbeddings),
            ];
            let by_verb = with_verb.iter().find(|(name, word, _)| is_called(at, name) && is(verb, word));
            let by_module = modules.iter().find(|(name, _)| is(at, "-m") && is(verb, name));
            let by_program = programs.iter().find(|(name, _)| is_called(at, name));
            by_verb
                .map(|(_, _, kind)| (*kind, at + 2))
                .or_else(|| by_module.map(|(_, kind)| (*kind, at + 2)))
                .or_else(|| by_program.map(|(_, kind)| (*kind, at + 1)))
        };
        let runner = Path::new(words.first()?).file_name()?.to_str()?;
        let runner = if runner.starts_with("python") { "python" } else { runner };
        let within = if RUNNERS.contains(&runner) { PROGRAM_WITHIN } else { 1 };
        let (kind, options_at) = (0..words.len().min(within)).find_map(kind)?;
        Some(Self { kind, words: words.to_vec(), options_at })
    }

    fn options(&self) -> &[String] {
        &self.words[self.options_at..]
    }

    /// The values behind an option, up to the next one.
    fn values(&self, name: &str) -> Vec<String> {
        let options = self.options();
        for (at, word) in options.iter().enumerate() {
            if let Some(value) = word.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
                return vec![value.to_owned()];
            }
            if word == name {
                return options[at + 1..].iter().take_while(|word| !word.starts_with('-')).cloned().collect();
            }
        }
        Vec::new()
    }

    fn value(&self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| self.values(name).into_iter().next())
    }

    pub(super) fn has(&self, option: &str) -> bool {
        self.options().iter().any(|word| word == option)
    }

    pub(super) fn port(&self) -> u16 {
        let listen = self.value(&["--listen"]);
        let listen =
            listen.as_deref().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.to_owned());
        let port = self.value(&["--port", "-p"]).or(listen);
        port.and_then(|port| port.parse().ok()).unwrap_or(self.kind.usual_port())
    }

    /// The names by which it is asked, as far as its command says them.
    pub(super) fn names(&self) -> Vec<String> {
        let served = match self.kind {
            EngineProgram::LlamaServer => self.value(&["--alias", "-a"]).into_iter().collect(),
            _ => self.values("--served-model-name"),
        };
        if !served.is_empty() {
            return served;
        }
        let positional =
            self.options().first().filter(|word| self.kind == EngineProgram::Vllm && !word.starts_with('-'));
        positional.cloned().or_else(|| self.value(self.kind.model_options())).into_iter().collect()
    }

    /// How many GPUs it is on.
    pub(super) fn gpus(&self) -> usize {
        let size =
            |names: &[&str]| self.value(names).and_then(|size| size.parse::<usize>().ok()).unwrap_or(1);
        let tensor = size(&["--tensor-parallel-size", "-tp", "--tp-size", "--tp"]);
        let pipeline = size(&["--pipeline-parallel-size", "-pp", "--pp-size", "--pp"]);
        tensor.max(1).saturating_mul(pipeline.max(1))
    }
}

/// The command without options that may hold secrets, and the names of those.
pub(super) fn without_secrets(words: &[String]) -> (Vec<String>, Vec<String>) {
    let (mut kept, mut left_out) = (Vec::new(), Vec::new());
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let (name, value) =
            word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
        let is_option = name.starts_with('-');
        let is_secret_value = |value: &str| value.starts_with("sk-") || has_password(value);
        let next_is_secret = words.peek().is_some_and(|next| is_secret_value(next));
        // A variable's name is none. But an engine with a key of its own would refuse the service.
        let is_variable =
            value.or(words.peek().map(|next| next.as_str())).is_some_and(|it| it.starts_with("${env."));
        let is_secret_name = is_secret_name(name) && (!is_variable || name.contains("api"));
        if is_option && (is_secret_name || value.is_some_and(is_secret_value)) {
            left_out.push(name.to_owned());
            while value.is_none() && words.next_if(|next| !next.starts_with('-')).is_some() {}
        } else if is_option && value.is_none() && next_is_secret {
            left_out.push(name.to_owned());
            words.next();
        } else {
            kept.push(word.clone());
        }
    }
    (kept, left_out)
}

/// A file of secrets is none.
pub(super) fn is_secret_name(option: &str) -> bool {
    let parts: Vec<String> = option.split(['-', '_']).map(str::to_ascii_lowercase).collect();
    let is_file = parts.last().is_some_and(|last| matches!(last.as_str(), "file" | "path" | "dir"));
    let is_secret = |part: &String| matches!(part.as_str(), "key" | "keys" | "token" | "secret" | "password");
    !is_file && parts.iter().any(is_secret)
}

/// Whether it is a URL with a password.
fn has_password(text: &str) -> bool {
    let rest = text.split_once("://").map(|(_, rest)| rest);
    let authority = rest.map(|rest| rest.split('/').next().unwrap_or(rest));
    authority.is_some_and(|authority| authority.split_once('@').is_some_and(|(user, _)| user.contains(':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn engine(line: &str) -> Option<CommandLine> {
        CommandLine::of(&words(line))
    }

    #[test]
    fn command_lines_of_engines_are_understood() {
        for (line, kind, names, port, gpus) in [
            (
                "/usr/bin/python3 /opt/bin/vllm serve Org/One-7B --enable-sleep-mode",
                EngineProgram::Vllm,
                "Org/One-7B",
                8000,
                1,
            ),
            (
                "vllm serve m --served-model-name a b --port=9000 -tp 2 -pp 2",
                EngineProgram::Vllm,
                "a b",
                9000,
                4,
            ),
            ("python -m vllm.entrypoints.openai.api_server --model m", EngineProgram::Vllm, "m", 8000, 1),
            (
                "python -m sglang.launch_server --model-path /m/two --tp 2 --port 31000",
                EngineProgram::Sglang,
                "/m/two",
                31000,
                2,
            ),
            (
                "/opt/llama-server -m /m/q.gguf --port 9001 --alias q",
                EngineProgram::LlamaServer,
                "q",
                9001,
                1,
            ),
            ("llama-server -hf org/q:Q4", EngineProgram::LlamaServer, "org/q:Q4", 8080, 1),
            ("text-embeddings-router --model-id org/e", EngineProgram::TextEmbeddings, "org/e", 3000, 1),
            ("python /bin/infinity_emb v2 --model-id org/e", EngineProgram::Infinity, "org/e", 7997, 1),
            ("ollama serve", EngineProgram::Ollama, "", 11434, 1),
            ("uv run --no-sync vllm serve m", EngineProgram::Vllm, "m", 8000, 1),
            ("env A=b nice -n 5 /opt/vllm serve m", EngineProgram::Vllm, "m", 8000, 1),
            ("poorwill mock-engine --listen 127.0.0.1:900 --model x", EngineProgram::Mock, "x", 900, 1),
        ] {
            let found = engine(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((found.kind, found.names().join(" ").as_str()), (kind, names), "{line}");
            assert_eq!((found.port(), found.gpus()), (port, gpus), "{line}");
        }
        for other in [
            "",
            "vllm",
            "vim vllm serve.md",
            "grep -r vllm serve",
            "VLLM::EngineCore",
            "vllm bench serve",
            "ollama runner",
        ] {
            assert_eq!(engine(other), None, "{other}");
        }
    }

    #[test]
    fn secrets_are_left_out_and_named() {
        for (line, kept, left_out) in [
            ("vllm serve m --api-key sk-1 two --port 1", "vllm serve m --port 1", "--api-key"),
            (
                "vllm serve m --api-key=s --max-num-batched-tokens 9",
                "vllm serve m --max-num-batched-tokens 9",
                "--api-key",
            ),
            ("x --hf_token t -v", "x -v", "--hf_token"),
            (
                "x --tokenizer t --api-key-file /k --ssl-keyfile /k",
                "x --tokenizer t --api-key-file /k --ssl-keyfile /k",
                "",
            ),
            ("x --otlp http://u:p@h/ --url http://h/@", "x --url http://h/@", "--otlp"),
            ("x --auth sk-123 -q", "x -q", "--auth"),
            ("x --hf-token ${env.T} --api-key ${env.K}", "x --hf-token ${env.T}", "--api-key"),
        ] {
            let (words, names) = without_secrets(&words(line));
            assert_eq!((words.join(" ").as_str(), names.join(" ").as_str()), (kept, left_out), "{line}");
        }
    }
}
