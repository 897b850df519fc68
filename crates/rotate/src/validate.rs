//! Puts every model of a running rotation to sleep and wakes it, and compares its answers before and after.
//!
//! A model passes if its sleep was measured, its canary was right, and every answer agrees with the earlier one. It is
//! asked as its canary is; with the kinds `get` and `none`, nothing is compared. It fails if its engine was restarted,
//! even with equal answers: then the service repaired it.
//!
//! Other clients are served meanwhile and may wake a model that was just put to sleep. The result is meaningful on an
//! otherwise idle machine.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::client::{Client, ClientError};
use crate::config::{CanaryKind, Config, Model};
use poorwill_rotation_policy::StageName;

/// Of each answer.
const TOKENS: u32 = 16;

/// Stages after a sleep.
const SLEEPS: [StageName; 4] =
    [StageName::Asleep, StageName::GoingIntoHibernation, StageName::Hibernating, StageName::Cold];

/// The result for all models.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    /// In the order of the configuration.
    pub models: Vec<ModelResult>,
    /// Requests to each model, before its sleep and again after.
    pub requests: u32,
}

/// The result for one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelResult {
    /// Its name.
    pub model: String,
    /// The result.
    pub verdict: Verdict,
    /// The cause, unless it passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
    /// Answers that are equal.
    pub right: u32,
    /// Answers that differ.
    pub garbage: u32,
    /// Seconds from the command until the sleep was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_s: Option<f64>,
    /// Seconds from the command until requests were admitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_s: Option<f64>,
}

/// The result of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It slept, woke, and answered the same.
    Pass,
    /// It slept and woke, and answered something else.
    Garbage,
    /// It did not sleep, wake or answer.
    Fail,
}

impl Validation {
    /// Whether all models passed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.models.iter().all(|result| result.verdict == Verdict::Pass)
    }
}

/// Validates all models. `on_result` gets each result.
///
/// # Errors
/// If the service cannot be reached. Failures of a model are its verdict.
pub async fn validate(
    config: &Config,
    requests: u32,
    on_result: &mut (dyn FnMut(&ModelResult) + Send),
) -> Result<Validation, ClientError> {
    let client = Client::of(config);
    client.status().await?;
    let mut models = Vec::new();
    for model in &config.models {
        let result = validate_model(&client, model, requests).await;
        on_result(&result);
        models.push(result);
    }
    Ok(Validation { models, requests })
}

async fn validate_model(client: &Client, model: &Model, requests: u32) -> ModelResult {
    let mut result = ModelResult {
        model: model.name.clone(),
        verdict: Verdict::Pass,
        because: None,
        right: 0,
        garbage: 0,
        sleep_s: None,
        wake_s: None,
    };
    if let Err(error) = steps(client, model, requests, &mut result).await {
        result.verdict = Verdict::Fail;
        result.because = Some(error.to_string());
    }
    result
}

async fn steps(
    client: &Client,
    model: &Model,
    requests: u32,
    result: &mut ModelResult,
) -> Result<(), ClientError> {
    let (name, limits) = (model.name.as_str(), &model.rules.limits);
    // A swap may evict other models first, and retry.
    let swap_max = 2 * (limits.drain + limits.sleep + limits.release + limits.wake + limits.canary);
    let up_max = if model.start.is_some() { swap_max + 2 * limits.start } else { swap_max };
    let answer_max = model.rules.wait_max + limits.canary;
    client.command(name, "wake", None).await?;
    let up = client.until(name, StageName::Ready, &[StageName::Ready], up_max).await?;
    let mut before = Vec::new();
    // Pages and nothing are not compared, and cannot be asked for through the front.
    let requests = match model.canary.kind {
        Some(CanaryKind::Get | CanaryKind::None) => 0,
        _ => requests,
    };
    let mut kind = None;
    for nth in 0..requests {
        let answer = client.ask(model, kind, &question(nth), TOKENS, answer_max).await?;
        kind = Some(answer.kind);
        before.push(answer);
    }
    let began = Instant::now();
    client.command(name, "sleep", None).await?;
    let slept = client.until(name, StageName::Asleep, &SLEEPS, swap_max).await?;
    result.sleep_s = Some(seconds(began));
    let began = Instant::now();
    client.command(name, "wake", None).await?;
    let woken = client.until(name, StageName::Ready, &[StageName::Ready], up_max).await?;
    result.wake_s = Some(seconds(began));
    if model.rules.can_sleep && woken.starts != up.starts {
        let reason = slept.failure.or(woken.failure);
        let reason = reason.unwrap_or_else(|| "the service's log says why".to_owned());
        result.verdict = Verdict::Fail;
        result.because = Some(format!("its engine was started again instead of waking: {reason}"));
    }
    for (nth, expected) in (0..requests).zip(&before) {
        let answer = client.ask(model, kind, &question(nth), TOKENS, answer_max).await?;
        let Err(reason) = answer.agrees_with(expected) else {
            result.right += 1;
            continue;
        };
        result.garbage += 1;
        if result.garbage == 1 {
            result.verdict = Verdict::Garbage;
            result.because = Some(format!("to question {}, {reason}", nth + 1));
        }
    }
    Ok(())
}

fn question(nth: u32) -> String {
    format!("Question {}. The first {} numbers are 1, 2,", nth + 1, nth + 10)
}

fn seconds(began: Instant) -> f64 {
    let passed: Duration = began.elapsed();
    passed.as_secs_f64()
}
