//! SGLang, started with `--enable-memory-saver`; at level 1 also with `--enable-weights-cpu-backup`.
//!
//! SGLang releases its memory (`/release_memory_occupation`) and resumes it (`/resume_memory_occupation`), but no
//! endpoint reports which came last. Trying is no option: releasing twice, resuming without a release, or generating
//! while released ends the scheduler. In some versions `/health` generates. This process cannot remember it alone,
//! since it and the engine may restart without each other.
//!
//! So the engine stores it in its *weight version*, free text in `/model_info` that SGLang does not interpret:
//!
//! | weight version | the engine |
//! |---|---|
//! | anything else | is awake: it serves, or was restarted |
//! | `poorwill:moving:` and the original text | began to sleep or wake, and did not report completion |
//! | `poorwill:asleep:` and the original text | sleeps |
//!
//! The text lives as long as the engine's process. It is set before a move and after the engine reported completion,
//! and read back each time. Sleeping or waking twice sends nothing. Which memory an engine has that is found moving is
//! unknown here. Behind a call that failed the policy measures it, and the engine gets the mark of what was found. Otherwise
//! the policy starts the engine again. A release during a request also ends the scheduler. A sleep therefore waits for
//! `/flush_cache`, which fails while the engine works.
//!
//! Limits: an engine that another program put to sleep passes for awake. The weight version needs SGLang 0.5.1. Each
//! tokenizer process has its own, so only one is supported (`--tokenizer-worker-num 1`, the default).
//!
//! Level 2 drops the weights. A wake reads them again (`/update_weights_from_disk`) from the model path that the engine
//! reports.

use std::time::Duration;

use serde_json::{Value, json};

use super::answer::Answer;
use super::canary::Prompt;
use super::contract::{Engine, EngineError, EngineFuture, OnText};
use super::http::{Failure, Http, Reply};
use crate::config::CanaryKind;
use poorwill_rotation_policy::EngineState;

const MOVING: &str = "poorwill:moving:";
const ASLEEP: &str = "poorwill:asleep:";
/// The status of `/flush_cache` while requests run.
const BUSY: u16 = 400;
/// Between two flushes.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Sglang {
    http: Http,
    level: u8,
    prompt: Prompt,
}

/// The state in a weight version, with the original text.
#[derive(Debug, PartialEq, Eq)]
enum Mark {
    Awake(String),
    Moving(String),
    Asleep(String),
}

#[derive(Debug)]
struct Info {
    mark: Mark,
    reply: Reply,
    body: Value,
}

impl Mark {
    fn of(version: &str) -> Self {
        if let Some(own) = version.strip_prefix(ASLEEP) {
            Self::Asleep(own.to_owned())
        } else if let Some(own) = version.strip_prefix(MOVING) {
            Self::Moving(own.to_owned())
        } else {
            Self::Awake(version.to_owned())
        }
    }
}

impl Info {
    fn of(reply: Reply) -> Result<Self, EngineError> {
        let reply = reply.done()?;
        let body = reply.json()?.unwrap_or(Value::Null);
        let mark = match &body["weight_version"] {
            Value::String(version) => Mark::of(version),
            Value::Null if body.get("model_path").is_some() => {
                let reason = "it has no weight_version, without which its state is unknown; SGLang has it \
                              from 0.5.1 on; or say sleeps = false, and it is stopped instead";
                return Err(reply.unsupported(reason));
            }
            _ => return Err(reply.unexpected_with_excerpt("this is not SGLang's model information")),
        };
        Ok(Self { mark, reply, body })
    }

    fn is_moving(&self) -> EngineError {
        self.reply.unexpected(
            "a sleep or a wake of it began and did not complete, so its state is unknown; start it \
             again",
        )
    }
}

impl Sglang {
    pub(super) fn new(http: Http, level: u8, prompt: Prompt) -> Self {
        Self { http, level, prompt }
    }

    async fn request_info(&self) -> Result<Reply, Failure> {
        self.http.get_either("/model_info", "/get_model_info").await
    }

    async fn info(&self) -> Result<Info, EngineError> {
        Info::of(self.request_info().await?)
    }

    /// Stores a weight version in the engine and reads it back.
    async fn mark(&self, version: &str) -> Result<(), EngineError> {
        let body = json!({"new_version": version, "abort_all_requests": false});
        let reply = self.http.post("/update_weight_version", Some(body)).await?.done()?;
        let body = self.info().await?.body;
        if body["weight_version"].as_str() == Some(version) {
            return Ok(());
        }
        Err(reply.unexpected(
            "its weight_version was set, and is another one; no other program may set it while it sleeps",
        ))
    }

    async fn is_healthy(&self) -> Result<(), EngineError> {
        self.http.get("/health").await?.done().map(|_| ())
    }

    /// Whether its settings allow sleep and wake. The scheduler answers this, so it is alive; nothing is computed.
    async fn check_settings(&self) -> Result<(), EngineError> {
        let reply = self.http.get_either("/server_info", "/get_server_info").await?.done()?;
        // The answer contains keys, so errors quote none of it.
        let body = reply.json()?.unwrap_or(Value::Null);
        if !body.is_object() {
            return Err(reply.unexpected("this is not SGLang's server information"));
        }
        if body["enable_memory_saver"] == json!(false) {
            return Err(reply.unsupported("it releases no memory; start SGLang with --enable-memory-saver"));
        }
        if self.level < 2 && body["enable_weights_cpu_backup"] == json!(false) {
            return Err(reply.unsupported(
                "its weights would be lost; start SGLang with --enable-weights-cpu-backup, or say `level = 2`, and \
                 they are read again from its model's files",
            ));
        }
        match body["tokenizer_worker_num"].as_u64() {
            Some(2..) => Err(reply.unsupported(
                "it has several tokenizer workers, and each has a weight_version of its own; start SGLang with \
                 --tokenizer-worker-num 1",
            )),
            _ => Ok(()),
        }
    }

    async fn drain(&self) -> Result<(), EngineError> {
        let mut has_warned = false;
        loop {
            let reply = self.http.post("/flush_cache", None).await?;
            if reply.status != BUSY {
                return reply.done().map(|_| ());
            }
            if !has_warned {
                tracing::warn!(
                    "{}: the engine still runs requests; waiting for them before it sleeps",
                    reply.request_line
                );
                has_warned = true;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn reload(&self, info: &Info) -> Result<(), EngineError> {
        let Some(path) = info.body["model_path"].as_str().filter(|path| !path.is_empty()) else {
            return Err(info
                .reply
                .unexpected("it does not report its model_path, which its weights are read from"));
        };
        let body = json!({"model_path": path, "abort_all_requests": false});
        let reply = self.http.post("/update_weights_from_disk", Some(body)).await?.done()?;
        let body = reply.json()?.unwrap_or(Value::Null);
        if body["success"] == json!(true) {
            return Ok(());
        }
        Err(reply.unexpected_with_excerpt("it did not confirm that its weights were read"))
    }
}

impl Sglang {
    /// Before a request, which would end its sleep.
    async fn check_awake(&self) -> Result<(), EngineError> {
        let info = self.info().await?;
        match info.mark {
            Mark::Moving(_) => Err(info.is_moving()),
            Mark::Asleep(_) => Err(info.reply.unexpected("it sleeps, and generating now would end it")),
            Mark::Awake(_) => Ok(()),
        }
    }
}

impl Engine for Sglang {
    fn probe(&self) -> EngineFuture<'_, EngineState> {
        Box::pin(async {
            let info = match self.request_info().await {
                Err(failure) if failure.is_unreachable => return Ok(EngineState::Gone),
                other => Info::of(other?)?,
            };
            let found = match info.mark {
                Mark::Moving(_) => EngineState::Moving,
                Mark::Asleep(_) => EngineState::Asleep,
                Mark::Awake(_) => {
                    // First: before the first generation, some versions do not answer the next request.
                    self.is_healthy().await?;
                    EngineState::Awake
                }
            };
            self.check_settings().await?;
            Ok(found)
        })
    }

    fn sleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            let info = self.info().await?;
            let own = match &info.mark {
                Mark::Asleep(_) => return Ok(()),
                Mark::Awake(own) | Mark::Moving(own) => own,
            };
            self.drain().await?;
            self.mark(&format!("{MOVING}{own}")).await?;
            self.http.post("/release_memory_occupation", Some(json!({}))).await?.done()?;
            self.mark(&format!("{ASLEEP}{own}")).await
        })
    }

    fn wake(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            let info = self.info().await?;
            let own = match &info.mark {
                Mark::Awake(_) => return Ok(()),
                Mark::Asleep(own) | Mark::Moving(own) => own,
            };
            self.mark(&format!("{MOVING}{own}")).await?;
            self.http.post("/resume_memory_occupation", Some(json!({}))).await?.done()?;
            if self.level >= 2 {
                self.reload(&info).await?;
            }
            self.mark(own).await
        })
    }

    fn store_asleep(&self) -> EngineFuture<'_, ()> {
        Box::pin(async {
            match self.info().await?.mark {
                Mark::Moving(own) => self.mark(&format!("{ASLEEP}{own}")).await,
                Mark::Asleep(_) | Mark::Awake(_) => Ok(()),
            }
        })
    }

    fn is_awake(&self) -> EngineFuture<'_, bool> {
        Box::pin(async {
            let info = self.info().await?;
            match &info.mark {
                Mark::Asleep(_) => Ok(false),
                Mark::Awake(_) => self.is_healthy().await.map(|()| true),
                Mark::Moving(own) => {
                    // Whether they were read is not known.
                    if self.level >= 2 {
                        self.reload(&info).await?;
                    }
                    self.mark(own).await?;
                    self.is_healthy().await.map(|()| true)
                }
            }
        })
    }

    /// Refused unless the engine is awake: generating would end a sleeping engine.
    fn generate(&self, kind: Option<CanaryKind>) -> EngineFuture<'_, Answer> {
        Box::pin(async move {
            self.check_awake().await?;
            self.prompt.ask(&self.http, kind).await
        })
    }

    fn generate_in_parts<'a>(&'a self, kind: CanaryKind, on_text: OnText<'a>) -> EngineFuture<'a, Answer> {
        Box::pin(async move {
            self.check_awake().await?;
            self.prompt.ask_in_parts(&self.http, kind, on_text).await
        })
    }
}
