//! Controls a service that runs: status, commands, and the validation of all models.

use std::io::{self, Write};
use std::path::Path;

use poorwill_rotate::client::Client;
use poorwill_rotate::validate::{self, Validation, Verdict};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::RotateCommand;
use super::log;
use super::opening::{read, runtime};
use super::show::{status_text, validation_text, verdict_text};
use poorwill_local::failure::{CommandOutput, Failure};

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Reply {
    Status(Value),
    Command(CommandReply),
    Reloaded(Value),
    Profile(Value),
    AllSleep(Value),
    Log(LogReply),
}

/// The last lines of an engine's output.
#[derive(Debug, Serialize)]
pub(crate) struct LogReply {
    model: String,
    lines: Vec<String>,
}

/// State of the model after an accepted command, which may still be running.
#[derive(Debug, Serialize)]
pub(crate) struct CommandReply {
    model: String,
    command: &'static str,
    /// Deprecated key of `command`, for one release.
    order: &'static str,
    stage: String,
    last_failure: Option<String>,
}

impl CommandOutput for Reply {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        match self {
            Self::Status(value) => status_text(value),
            Self::Reloaded(_) => "the configuration was read again\n".to_owned(),
            Self::Profile(value) => match value["profile"].as_str() {
                Some(name) => format!("profile {name} is chosen\n"),
                None => "no profile is chosen\n".to_owned(),
            },
            Self::AllSleep(value) => {
                let count = value["models"].as_array().map_or(0, Vec::len);
                format!("sleep accepted for all {count} models\n")
            }
            Self::Log(LogReply { lines, .. }) => {
                lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
            }
            Self::Command(CommandReply { model, command, stage, last_failure, .. }) => {
                let failure = last_failure.as_ref().map(|failure| format!("; last failure: {failure}"));
                format!("{model}: {command} accepted; it is {stage}{}\n", failure.unwrap_or_default())
            }
        }
    }
}

pub(super) fn run(path: &Path, command: RotateCommand) -> Result<Reply, Failure> {
    let config = read(path)?;
    runtime()?.block_on(async {
        let client = Client::of(&config);
        let (model, command, body) = match command {
            RotateCommand::Status => return Ok(Reply::Status(client.status().await?)),
            RotateCommand::Reload => return Ok(Reply::Reloaded(client.reload().await?)),
            RotateCommand::Profile { profile, .. } => {
                return Ok(Reply::Profile(client.set_profile(profile.as_deref()).await?));
            }
            RotateCommand::Wake { model } => (model, "wake", None),
            RotateCommand::Sleep { model: Some(model), .. } => (model, "sleep", None),
            RotateCommand::Sleep { model: None, .. } => {
                return Ok(Reply::AllSleep(client.sleep_all().await?));
            }
            RotateCommand::Log { model, lines, .. } => {
                let lines = log::last(&client, &model, lines).await?;
                return Ok(Reply::Log(LogReply { model, lines }));
            }
            RotateCommand::Hibernate { model } => (model, "hibernate", None),
            RotateCommand::Restart { model } => (model, "restart", None),
            RotateCommand::Pin { model, off: false } => (model, "pin", Some(json!({ "pinned": true }))),
            RotateCommand::Pin { model, off: true } => (model, "pin --off", Some(json!({ "pinned": false }))),
            // Done elsewhere.
            RotateCommand::Init
            | RotateCommand::Import { .. }
            | RotateCommand::Check
            | RotateCommand::Schema
            | RotateCommand::Validate { .. } => {
                return Err(Failure::new("this is no command to a rotation that runs"));
            }
        };
        client.command(&model, command.split(' ').next().unwrap_or(command), body).await?;
        command_reply(&client.status().await?, model, command).map(Reply::Command)
    })
}

fn command_reply(status: &Value, model: String, command: &'static str) -> Result<CommandReply, Failure> {
    let is_named = |now: &&Value| {
        let others = [&now["aliases"], &now["adapters"]].into_iter().filter_map(Value::as_array).flatten();
        others.chain([&now["name"]]).any(|name| *name == model)
    };
    let Some(now) = status["models"].as_array().into_iter().flatten().find(is_named) else {
        return Err(Failure::new(format!("`{model}`: {command} accepted; then the model was removed")));
    };
    let text = |key: &str| now[key].as_str().map(str::to_owned);
    let stage = text("stage").unwrap_or_else(|| "in an unknown stage".to_owned());
    Ok(CommandReply { model, command, order: command, stage, last_failure: text("last_failure") })
}

#[derive(Debug, Serialize)]
pub(crate) struct ValidateOutcome {
    #[serde(flatten)]
    validation: Validation,
    #[serde(skip)]
    failed: Option<String>,
}

impl CommandOutput for ValidateOutcome {
    const MISMATCH: &'static str = "not valid";

    fn mismatch(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    fn text(&self) -> String {
        validation_text(&self.validation)
    }
}

pub(super) fn validate(path: &Path, requests: u32, json: bool) -> Result<ValidateOutcome, Failure> {
    let config = read(path)?;
    let mut observer = |walked: &validate::ModelResult| {
        if !json {
            let verdict = verdict_text(walked.verdict);
            // Without standard error there is no place for it.
            let _ = writeln!(io::stderr(), "{}: {verdict}", walked.model);
        }
    };
    let validation = runtime()?.block_on(validate::validate(&config, requests, &mut observer))?;
    let failed: Vec<&str> = validation
        .models
        .iter()
        .filter(|walked| walked.verdict != Verdict::Pass)
        .map(|walked| walked.model.as_str())
        .collect();
    let failed = (!failed.is_empty()).then(|| failed.join(", "));
    Ok(ValidateOutcome { validation, failed })
}
