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
#[serde(transparent)]
pub(crate) struct Answered {
    value: Value,
    #[serde(skip)]
    is_status: bool,
}

impl Outcome for Answered {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        if self.is_status { status_text(&self.value) } else { "done\n".to_owned() }
    }
}

/// Status, or an order.
pub(super) fn ask(path: &Path, ask: RotateAsk) -> Result<Answered, Failure> {
    let config = read(path)?;
    runtime()?.block_on(async {
        let client = Client::of(&config)?;
        let is_status = matches!(ask, RotateAsk::Status);
        let value = match ask {
            RotateAsk::Status => client.status().await?,
            RotateAsk::Wake { model } => client.order(&model, "wake", None).await?,
            RotateAsk::Sleep { model } => client.order(&model, "sleep", None).await?,
            RotateAsk::Restart { model } => client.order(&model, "restart", None).await?,
            RotateAsk::Pin { model, off } => {
                client.order(&model, "pin", Some(json!({ "pinned": !off }))).await?
            }
            RotateAsk::Reload => client.reload().await?,
            // Done by `validate`.
            RotateAsk::Validate { .. } => Value::Null,
        };
        Ok(Answered { value, is_status })
    })
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
