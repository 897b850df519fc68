//! Puts every model of a running rotation to sleep and wakes it, and compares its answers before and after.
//!
//! A model passes if its sleeps were measured, its canary was right, and every answer agrees with the earlier one. It is
//! asked as its canary was; with the kinds `get` and `none`, nothing is compared. It fails if its engine was restarted,
//! even with equal answers: then the service repaired it. A leak fails as well: more memory stays in use with each sleep,
//! and more than its slack in the end. It takes two cycles to be seen.
//!
//! Other clients are served meanwhile and may wake a model that was just put to sleep. The result is meaningful on an
//! otherwise idle machine.

use std::time::{Duration, Instant};

use poorwill::ByteSize;
use serde::{Deserialize as _, Serialize};
use serde_json::Value;

use crate::client::{Client, ClientError, StageGoal, Waited};
use crate::config::{CanaryKind, Config, Model};
use crate::engine::Answer;
use poorwill_rotation_policy::Gpu;

/// Of each answer.
const TOKENS: u32 = 16;

/// How much is tried.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    /// Requests to each model, before its first sleep and again after each.
    pub requests: u32,
    /// Sleeps and wakes of each model.
    pub cycles: u32,
}

/// The result for all models.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    /// In the order of the configuration.
    pub models: Vec<ModelResult>,
    /// Requests to each model, before its first sleep and again after each.
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
    /// Seconds from the command until the sleep was measured, of the last cycle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_s: Option<f64>,
    /// Seconds from the command until requests were admitted, of the last cycle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_s: Option<f64>,
    /// Each sleep and wake.
    pub cycles: Vec<Cycle>,
}

/// A sleep and a wake.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cycle {
    /// Seconds from the command until the sleep was measured.
    pub sleep_s: f64,
    /// Seconds from the command until requests were admitted.
    pub wake_s: f64,
    /// What was in use on each of its GPUs while it slept; `None` where it cannot be measured.
    pub asleep_bytes: Option<Vec<u64>>,
}

/// The result of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It slept, woke, and answered the same.
    Pass,
    /// It slept and woke, and answered something else.
    Garbage,
    /// It did not sleep, wake or answer, or it leaks.
    Fail,
}

/// Gets each step of a model as it begins or ends, in words.
pub type OnStep<'a> = &'a mut (dyn FnMut(&str, &str) + Send);

impl Validation {
    /// Whether all models passed.
    #[must_use]
    pub fn is_passed(&self) -> bool {
        self.models.iter().all(|result| result.verdict == Verdict::Pass)
    }
}

/// Validates all models. `on_step` gets the steps and the verdict of each.
///
/// # Errors
/// If the service cannot be reached. Failures of a model are its verdict.
pub async fn validate(config: &Config, trial: Trial, on_step: OnStep<'_>) -> Result<Validation, ClientError> {
    let client = Client::of(config);
    client.status().await?;
    let mut models = Vec::new();
    for model in &config.models {
        let mut walk = Walk { client: &client, model, trial, on_step, result: ModelResult::of(model) };
        if let Err(error) = walk.steps().await {
            walk.fail(error.to_string());
        }
        let result = walk.result;
        on_step(&result.model, result.verdict.as_str());
        models.push(result);
    }
    Ok(Validation { models, requests: trial.requests })
}

impl Verdict {
    /// As in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Garbage => "garbage",
            Self::Fail => "fail",
        }
    }
}

impl ModelResult {
    fn of(model: &Model) -> Self {
        Self {
            model: model.name.clone(),
            verdict: Verdict::Pass,
            because: None,
            right: 0,
            garbage: 0,
            sleep_s: None,
            wake_s: None,
            cycles: Vec::new(),
        }
    }
}

/// One model on its way through the cycles.
struct Walk<'a, 's> {
    client: &'a Client,
    model: &'a Model,
    trial: Trial,
    on_step: &'s mut (dyn FnMut(&str, &str) + Send),
    result: ModelResult,
}

impl Walk<'_, '_> {
    fn fail(&mut self, reason: String) {
        (self.result.verdict, self.result.because) = (Verdict::Fail, Some(reason));
    }

    async fn steps(&mut self) -> Result<(), ClientError> {
        let up_max = self.up_max();
        self.say("waking");
        let (up, wake_s) = self.move_to("wake", StageGoal::READY, up_max).await?;
        self.say(&format!("ready after {wake_s:.1} s"));
        // Pages and nothing are not compared, and cannot be asked for through the front.
        let requests = match self.model.canary.kind {
            Some(CanaryKind::Get | CanaryKind::None) => 0,
            _ => self.trial.requests,
        };
        let mut kind = CanaryKind::deserialize(&up.now["canary_kind"]).ok();
        let mut before = Vec::new();
        for nth in 0..requests {
            let answer = self.ask(kind, nth).await?;
            kind = Some(answer.kind);
            before.push(answer);
        }
        if requests > 0 {
            self.say(&format!("answered {requests} prompts"));
        }
        let starts = up.now["starts"].clone();
        for nth in 1..=self.trial.cycles {
            self.cycle(nth, &starts).await?;
            self.compare(kind, &before).await?;
            if self.result.verdict != Verdict::Pass {
                return Ok(());
            }
        }
        if let Some(leak) = leak(&self.result.cycles, self.model.rules.slack_bytes) {
            self.fail(leak);
        }
        Ok(())
    }

    /// A sleep and a wake. A restart meanwhile is a failure of engines that can sleep.
    async fn cycle(&mut self, nth: u32, starts: &Value) -> Result<(), ClientError> {
        let all = self.trial.cycles;
        let (slept, sleep_s) = self.move_to("sleep", StageGoal::ASLEEP, self.swap_max()).await?;
        let asleep_bytes = self.used_bytes().await?;
        self.say(&format!("cycle {nth} of {all}: asleep after {sleep_s:.1} s, {}", in_use(&asleep_bytes)));
        let (woken, wake_s) = self.move_to("wake", StageGoal::READY, self.up_max()).await?;
        self.say(&format!("cycle {nth} of {all}: ready after {wake_s:.1} s"));
        (self.result.sleep_s, self.result.wake_s) = (Some(sleep_s), Some(wake_s));
        self.result.cycles.push(Cycle { sleep_s, wake_s, asleep_bytes });
        if self.model.rules.can_sleep && woken.now["starts"] != *starts {
            let reason = slept.failure.or(woken.failure);
            let reason = reason.unwrap_or_else(|| "the service's log says why".to_owned());
            self.fail(format!("its engine was started again instead of waking: {reason}"));
        }
        Ok(())
    }

    async fn compare(&mut self, kind: Option<CanaryKind>, before: &[Answer]) -> Result<(), ClientError> {
        for (nth, expected) in (0..).zip(before) {
            let answer = self.ask(kind, nth).await?;
            let Err(reason) = answer.agrees_with(expected) else {
                self.result.right += 1;
                continue;
            };
            self.result.garbage += 1;
            if self.result.garbage == 1 {
                self.result.verdict = Verdict::Garbage;
                self.result.because = Some(format!("to question {}, {reason}", nth + 1));
            }
        }
        Ok(())
    }

    async fn move_to(
        &self,
        command: &str,
        goal: StageGoal,
        most: Duration,
    ) -> Result<(Waited, f64), ClientError> {
        let began = Instant::now();
        self.client.command(&self.model.name, command, None).await?;
        let waited = self.client.until(&self.model.name, goal, most).await?;
        Ok((waited, began.elapsed().as_secs_f64()))
    }

    async fn ask(&self, kind: Option<CanaryKind>, nth: u32) -> Result<Answer, ClientError> {
        let answer_max = self.model.rules.wait_max + self.model.rules.limits.canary;
        self.client.ask(self.model, kind, &question(nth), TOKENS, answer_max).await
    }

    /// On each of its GPUs, by all that runs there.
    async fn used_bytes(&self) -> Result<Option<Vec<u64>>, ClientError> {
        let status = self.client.status().await?;
        let gpus = status["gpus"].as_array().map(Vec::as_slice).unwrap_or_default();
        let used = |gpu: &Gpu| {
            let now = gpus.iter().find(|now| now["gpu"].as_u64() == u64::try_from(gpu.0).ok())?;
            let lent_bytes = now["reclaimable_bytes"].as_u64().unwrap_or_default();
            now["total_bytes"].as_u64()?.checked_sub(now["free_bytes"].as_u64()?)?.checked_sub(lent_bytes)
        };
        Ok(self.model.rules.gpus.iter().map(used).collect())
    }

    /// A swap may evict other models first, and retry.
    fn swap_max(&self) -> Duration {
        let limits = &self.model.rules.limits;
        2 * (limits.drain + limits.sleep + limits.release + limits.wake + limits.canary)
    }

    fn up_max(&self) -> Duration {
        let start = if self.model.start.is_some() { self.model.rules.limits.start } else { Duration::ZERO };
        self.swap_max() + 2 * start
    }

    fn say(&mut self, what: &str) {
        (self.on_step)(&self.model.name, what);
    }
}

/// Memory that grew with every sleep, and by more than `slack_bytes` in all. Other programs on the GPU come and go.
fn leak(cycles: &[Cycle], slack_bytes: u64) -> Option<String> {
    let asleep: Option<Vec<&Vec<u64>>> = cycles.iter().map(|cycle| cycle.asleep_bytes.as_ref()).collect();
    let asleep = asleep.filter(|asleep| asleep.len() > 1)?;
    let (first, last) = (asleep.first()?, asleep.last()?);
    (0..first.len()).find_map(|gpu| {
        let grows = asleep.windows(2).all(|pair| pair[0].get(gpu) < pair[1].get(gpu));
        let grown = last.get(gpu)?.checked_sub(*first.get(gpu)?)?;
        (grows && grown > slack_bytes).then(|| {
            format!(
                "it leaks: with each of {} sleeps more stayed in use, {} more in all, from {} to {}; its slack is {}",
                cycles.len(),
                ByteSize(grown),
                ByteSize(first[gpu]),
                ByteSize(last[gpu]),
                ByteSize(slack_bytes),
            )
        })
    })
}

fn in_use(bytes: &Option<Vec<u64>>) -> String {
    match bytes {
        Some(bytes) => {
            let sizes: Vec<String> = bytes.iter().map(|bytes| ByteSize(*bytes).to_string()).collect();
            format!("{} in use", sizes.join(" + "))
        }
        None => "memory not measured".to_owned(),
    }
}

fn question(nth: u32) -> String {
    format!("Question {}. The first {} numbers are 1, 2,", nth + 1, nth + 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_grows_with_every_sleep_is_a_leak() {
        let cycles = |used: &[&[u64]]| -> Vec<Cycle> {
            let cycle = |bytes: &&[u64]| {
                let asleep_bytes = (!bytes.is_empty()).then(|| bytes.to_vec());
                Cycle { sleep_s: 1.0, wake_s: 1.0, asleep_bytes }
            };
            used.iter().map(cycle).collect()
        };
        for (used, leaks) in [
            (&[&[100][..], &[140], &[180]][..], true),
            (&[&[100, 100], &[100, 140], &[100, 180]], true),
            (&[&[100], &[160]], true),
            // Within its slack, not each time, or not known.
            (&[&[100], &[120], &[140]], false),
            (&[&[100], &[400], &[300]], false),
            (&[&[100], &[200], &[200]], false),
            (&[&[100]], false),
            (&[&[100], &[], &[180]], false),
            (&[], false),
        ] {
            assert_eq!(leak(&cycles(used), 50).is_some(), leaks, "{used:?}");
        }
        assert!(
            leak(&cycles(&[&[100], &[160]]), 50).unwrap().contains("60 B more in all, from 100 B to 160 B")
        );
    }
}
