//! Walks every model of a rotation that runs through a sleep and a wake, and asks it the same before and behind.
//!
//! A model passes when it slept by what was measured, woke by its canary, and answered every question as it had before.
//! One whose engine had to be started again did not, though all of its answers were right: the service has mended it.
//! Questions are asked one after the other and without chance. Whoever else asks meanwhile is served as ever, and may
//! wake what was just put to sleep: a walk says something of a machine that has nothing else to do.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::client::{Client, ClientError};
use crate::config::{Config, Model};

/// How many words each answer has.
const TOKENS: u32 = 16;

/// What is known of every model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    /// By model, in the order of the configuration.
    pub models: Vec<Walked>,
    /// How many questions each was asked, before its sleep and behind.
    pub requests: u32,
}

/// What came of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Walked {
    /// Which.
    pub model: String,
    /// How it went.
    pub verdict: Verdict,
    /// What was wrong, if something was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
    /// How many answers were as before.
    pub right: u32,
    /// How many were others.
    pub garbage: u32,
    /// From the order to sleep until it was measured to have slept, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_s: Option<f64>,
    /// From the order to wake until its requests were let through, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_s: Option<f64>,
}

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It slept, woke, and said the same.
    Pass,
    /// It slept and woke, and said something else.
    Garbage,
    /// It did not sleep, wake or answer.
    Fail,
}

impl Validation {
    /// Whether every model passed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.models.iter().all(|walked| walked.verdict == Verdict::Pass)
    }
}

/// Walks all models of the rotation that runs by this configuration; `tell` is told of each when it is done.
///
/// # Errors
/// When nobody answers at all. What goes wrong with a model is its verdict.
pub async fn validate(
    config: &Config,
    requests: u32,
    tell: &mut (dyn FnMut(&Walked) + Send),
) -> Result<Validation, ClientError> {
    let client = Client::of(config);
    client.status().await?;
    let mut models = Vec::new();
    for model in &config.models {
        let walked = walk(&client, model, requests).await;
        tell(&walked);
        models.push(walked);
    }
    Ok(Validation { models, requests })
}

async fn walk(client: &Client, model: &Model, requests: u32) -> Walked {
    let mut walked = Walked {
        model: model.name.clone(),
        verdict: Verdict::Pass,
        because: None,
        right: 0,
        garbage: 0,
        sleep_s: None,
        wake_s: None,
    };
    if let Err(error) = steps(client, model, requests, &mut walked).await {
        walked.verdict = Verdict::Fail;
        walked.because = Some(error.to_string());
    }
    walked
}

async fn steps(
    client: &Client,
    model: &Model,
    requests: u32,
    walked: &mut Walked,
) -> Result<(), ClientError> {
    let (name, limits) = (model.name.as_str(), &model.rules.limits);
    // A swap may have to send others away first, and try again.
    let swap_max = 2 * (limits.drain + limits.sleep + limits.release + limits.wake + limits.canary);
    let up_max = if model.start.is_some() { swap_max + 2 * limits.start } else { swap_max };
    let answer_max = model.rules.wait_max + limits.canary;
    client.order(name, "wake", None).await?;
    let up = client.until(name, "ready", &["ready"], up_max).await?;
    let mut before = Vec::new();
    for nth in 0..requests {
        before.push(client.complete(name, &question(nth), TOKENS, answer_max).await?);
    }
    let began = Instant::now();
    client.order(name, "sleep", None).await?;
    let slept = client.until(name, "asleep", &["asleep", "cold"], swap_max).await?;
    walked.sleep_s = Some(seconds(began));
    let began = Instant::now();
    client.order(name, "wake", None).await?;
    let woken = client.until(name, "ready", &["ready"], up_max).await?;
    walked.wake_s = Some(seconds(began));
    if model.rules.can_sleep && woken.starts != up.starts {
        let reason = slept.failure.or(woken.failure);
        let reason = reason.unwrap_or_else(|| "the service's log says why".to_owned());
        walked.verdict = Verdict::Fail;
        walked.because = Some(format!("its engine was started again instead of waking: {reason}"));
    }
    for (nth, expected) in (0..requests).zip(&before) {
        let answer = client.complete(name, &question(nth), TOKENS, answer_max).await?;
        if answer == *expected {
            walked.right += 1;
            continue;
        }
        walked.garbage += 1;
        if walked.garbage == 1 {
            walked.verdict = Verdict::Garbage;
            walked.because =
                Some(format!("to question {} it said {answer:?}, and {expected:?} before", nth + 1));
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
