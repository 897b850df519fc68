//! Controls a service that runs: status, commands, and the validation of all models.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use poorwill_rotate::client::{Client, StageGoal, Waited};
use poorwill_rotate::validate::{self, Trial, Validation, Verdict};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::{RotateCommand, Wait};
use super::log;
use super::opening::{read, read_control, runtime};
use super::show::{status_text, validation_text};
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
    /// Its name.
    model: String,
    /// The oldest first.
    lines: Vec<String>,
}

/// State of the model after an accepted command, which may still be running.
#[derive(Debug, Serialize)]
pub(crate) struct CommandReply {
    /// Its name.
    model: String,
    /// As it was given, such as `wake` or `pin --off`.
    command: &'static str,
    /// Its stage now.
    stage: String,
    /// Its last failure since it was ready.
    last_failure: Option<String>,
    /// Whether it was waited for.
    #[serde(skip)]
    is_done: bool,
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
            Self::Command(CommandReply { model, command, stage, last_failure, is_done, .. }) => {
                let failure = last_failure.as_ref().map(|failure| format!("; last failure: {failure}"));
                let how = if *is_done { "done" } else { "accepted" };
                format!("{model}: {command} {how}; it is {stage}{}\n", failure.unwrap_or_default())
            }
        }
    }
}

pub(super) fn run(path: &Path, command: RotateCommand) -> Result<Reply, Failure> {
    let control = read_control(path)?;
    runtime()?.block_on(async {
        let client = Client::of_control(&control);
        let (order, model) = match command {
            RotateCommand::Status => return Ok(Reply::Status(client.status().await?)),
            RotateCommand::Reload => return Ok(Reply::Reloaded(client.reload().await?)),
            RotateCommand::Profile { profile, .. } => {
                return Ok(Reply::Profile(client.set_profile(profile.as_deref()).await?));
            }
            RotateCommand::Wake { model, wait } => (Order::new("wake", wait), model),
            RotateCommand::Sleep { model: Some(model), wait, .. } => (Order::new("sleep", wait), model),
            RotateCommand::Sleep { model: None, .. } => {
                return Ok(Reply::AllSleep(client.sleep_all().await?));
            }
            RotateCommand::Log { model, lines, .. } => {
                let lines = log::last(&client, &model, lines).await?;
                return Ok(Reply::Log(LogReply { model, lines }));
            }
            RotateCommand::Hibernate { model, wait } => (Order::new("hibernate", wait), model),
            RotateCommand::Restart { model, wait } => (Order::new("restart", wait), model),
            RotateCommand::Pin { model, off } => (Order::pin(!off), model),
            // Done elsewhere.
            RotateCommand::Init
            | RotateCommand::Import { .. }
            | RotateCommand::Check
            | RotateCommand::Schema
            | RotateCommand::Validate { .. } => {
                return Err(Failure::new("this is no command to a rotation that runs"));
            }
        };
        order.give(&client, model).await.map(Reply::Command)
    })
}

/// A command to a model, as given, and as sent.
struct Order {
    shown: &'static str,
    action: &'static str,
    body: Option<Value>,
    /// The longest time to wait for what it leads to.
    wait_max: Option<Duration>,
}

impl Order {
    fn new(action: &'static str, wait: Wait) -> Self {
        Self { shown: action, action, body: None, wait_max: wait.most() }
    }

    fn pin(is_pinned: bool) -> Self {
        let shown = if is_pinned { "pin" } else { "pin --off" };
        Self { shown, action: "pin", body: Some(json!({ "pinned": is_pinned })), wait_max: None }
    }

    async fn give(self, client: &Client, model: String) -> Result<CommandReply, Failure> {
        // A restart is over where the starts have grown.
        let before = match self.wait_max {
            Some(_) => client.model(&model).await?.unwrap_or(Value::Null),
            None => Value::Null,
        };
        let goal = match self.action {
            "wake" => Some(StageGoal::READY),
            "sleep" => Some(StageGoal::ASLEEP),
            "hibernate" => Some(StageGoal::HIBERNATING),
            _ => StageGoal::restarted(&before),
        };
        client.command(&model, self.action, self.body.clone()).await?;
        let command = self.shown;
        if let Some(most) = self.wait_max {
            let Some(goal) = goal else {
                let stage = before["stage"].as_str().unwrap_or("in an unknown stage");
                return Err(Failure::new(format!("`{model}`: it is {stage}; {command} it again after that")));
            };
            let waited = client.until(&model, goal, most).await?;
            if let Some(reason) = failed(self.action, &before, &waited) {
                return Err(Failure::new(format!("`{model}`: {command} failed, and it is cold: {reason}")));
            }
            return Ok(CommandReply::of(&waited.now, model, command, true));
        }
        let Some(now) = client.model(&model).await? else {
            return Err(Failure::new(format!("`{model}`: {command} accepted; then the model was removed")));
        };
        Ok(CommandReply::of(&now, model, command, false))
    }
}

/// An engine whose sleep failed is stopped, and so leaves as well.
fn failed(action: &str, before: &Value, waited: &Waited) -> Option<String> {
    let was_up = ["ready", "draining"].iter().any(|stage| before["stage"] == *stage);
    let is_new = waited.now["last_failure"] != before["last_failure"];
    let failure = waited.now["last_failure"].as_str().filter(|_| action == "sleep" && was_up && is_new)?;
    (waited.now["stage"] == "cold").then(|| failure.to_owned())
}

impl CommandReply {
    fn of(now: &Value, model: String, command: &'static str, is_done: bool) -> Self {
        let text = |key: &str| now[key].as_str().map(str::to_owned);
        let stage = text("stage").unwrap_or_else(|| "in an unknown stage".to_owned());
        Self { model, command, stage, last_failure: text("last_failure"), is_done }
    }
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

pub(super) fn validate(path: &Path, trial: Trial, json: bool) -> Result<ValidateOutcome, Failure> {
    let config = read(path)?;
    let mut observer = |model: &str, what: &str| {
        if !json {
            // Without standard error there is no place for it.
            let _ = writeln!(io::stderr(), "{model}: {what}");
        }
    };
    let validation = runtime()?.block_on(validate::validate(&config, trial, &mut observer))?;
    let failed: Vec<&str> = validation
        .models
        .iter()
        .filter(|walked| walked.verdict != Verdict::Pass)
        .map(|walked| walked.model.as_str())
        .collect();
    let failed = (!failed.is_empty()).then(|| failed.join(", "));
    Ok(ValidateOutcome { validation, failed })
}
