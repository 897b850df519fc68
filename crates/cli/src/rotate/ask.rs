//! Asking a rotation that runs: its status, orders, and a walk through all of its models.

use std::io::{self, Write};
use std::path::Path;

use poorwill_rotate::client::Client;
use poorwill_rotate::validate::{self, Validation, Verdict};
use serde::Serialize;
use serde_json::{Value, json};

use super::{read, runtime};
use crate::args::RotateAsk;
use crate::failure::{Failure, Outcome};
use crate::show::rotate::{status_text, validation_text, word_of};

/// What the service answered.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Answered {
    Status(Value),
    Told(Told),
    Reloaded(Value),
}

/// What became of an order so far. What follows takes its time, or is nothing where it is as it was to be.
#[derive(Debug, Serialize)]
pub(crate) struct Told {
    model: String,
    order: &'static str,
    stage: String,
    last_failure: Option<String>,
}

impl Outcome for Answered {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        match self {
            Self::Status(value) => status_text(value),
            Self::Reloaded(_) => "the configuration was read again\n".to_owned(),
            Self::Told(Told { model, order, stage, last_failure }) => {
                let failure = last_failure.as_ref().map(|failure| format!("; last failure: {failure}"));
                format!("{model} was told: {order}; it is {stage}{}\n", failure.unwrap_or_default())
            }
        }
    }
}

/// Status, or an order.
pub(super) fn ask(path: &Path, ask: RotateAsk) -> Result<Answered, Failure> {
    let config = read(path)?;
    runtime()?.block_on(async {
        let client = Client::of(&config);
        let (model, order, body) = match ask {
            RotateAsk::Status => return Ok(Answered::Status(client.status().await?)),
            RotateAsk::Reload => return Ok(Answered::Reloaded(client.reload().await?)),
            RotateAsk::Wake { model } => (model, "wake", None),
            RotateAsk::Sleep { model } => (model, "sleep", None),
            RotateAsk::Restart { model } => (model, "restart", None),
            RotateAsk::Pin { model, off: false } => (model, "pin", Some(json!({ "pinned": true }))),
            RotateAsk::Pin { model, off: true } => (model, "pin --off", Some(json!({ "pinned": false }))),
            // Done by `validate`.
            RotateAsk::Validate { .. } => return Err(Failure::new("a walk is no question".to_owned())),
        };
        client.order(&model, order.split(' ').next().unwrap_or(order), body).await?;
        told(&client.status().await?, model, order).map(Answered::Told)
    })
}

/// What a status says of a model that was told something.
fn told(status: &Value, model: String, order: &'static str) -> Result<Told, Failure> {
    let is_it = |now: &&Value| {
        let aliases = now["aliases"].as_array().into_iter().flatten();
        aliases.chain([&now["name"]]).any(|name| *name == model)
    };
    let Some(now) = status["models"].as_array().into_iter().flatten().find(is_it) else {
        return Err(Failure::new(format!("`{model}` was told: {order}; and then it was not there any more")));
    };
    let text = |key: &str| now[key].as_str().map(str::to_owned);
    let stage = text("stage").unwrap_or_else(|| "nowhere that is known".to_owned());
    Ok(Told { model, order, stage, last_failure: text("last_failure") })
}

/// A walk, and what it came to in a sentence.
#[derive(Debug, Serialize)]
pub(crate) struct Walk {
    #[serde(flatten)]
    validation: Validation,
    #[serde(skip)]
    wrong: Option<String>,
}

impl Outcome for Walk {
    const WRONG: &'static str = "not valid";

    fn mismatch(&self) -> Option<&str> {
        self.wrong.as_deref()
    }

    fn text(&self) -> String {
        validation_text(&self.validation)
    }
}

/// Walks every model.
pub(super) fn validate(path: &Path, requests: u32, json: bool) -> Result<Walk, Failure> {
    let config = read(path)?;
    let mut tell = |walked: &validate::Walked| {
        if !json {
            let word = word_of(walked.verdict);
            // Standard error is the last place to complain to.
            let _ = writeln!(io::stderr(), "{}: {word}", walked.model);
        }
    };
    let validation = runtime()?.block_on(validate::validate(&config, requests, &mut tell))?;
    let wrong: Vec<&str> = validation
        .models
        .iter()
        .filter(|walked| walked.verdict != Verdict::Pass)
        .map(|walked| walked.model.as_str())
        .collect();
    let wrong = (!wrong.is_empty()).then(|| wrong.join(", "));
    Ok(Walk { validation, wrong })
}
