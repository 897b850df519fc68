//! The paths for an engine's operator: vLLM's in development mode, or those of another engine.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::Like;
use crate::engine::{Engine, Mode};
use crate::extract::{HttpResult, RequestBody, SharedEngine, read};
use crate::failure::Failure;
use crate::fault::Fault;
use crate::request::parsed;

pub(crate) fn router(like: Like) -> Router<Arc<Engine>> {
    match like {
        Like::Vllm => Router::new()
            .route("/health", get(health))
            .route("/is_sleeping", get(is_sleeping))
            .route("/sleep", post(sleep))
            .route("/wake_up", post(wake_up))
            .route("/collective_rpc", post(collective_rpc)),
        Like::LlamaServer => Router::new().route("/health", get(health_in_words)),
        Like::Ollama => Router::new()
            .route("/", get(async || "Ollama is running"))
            .route("/api/version", get(async || Json(json!({ "version": "0.0.0" }))))
            .route("/api/ps", get(list_loaded))
            .route("/api/generate", post(load_or_unload)),
    }
}

async fn health(State(engine): SharedEngine) -> StatusCode {
    if engine.faults().occurs(Fault::HangsInHealth) {
        engine.faults().wait_until_cleared(Fault::HangsInHealth).await;
    }
    if engine.faults().occurs(Fault::Unhealthy) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn health_in_words(State(engine): SharedEngine) -> (StatusCode, Json<Value>) {
    let status = health(State(engine)).await;
    (status, Json(json!({ "status": if status.is_success() { "ok" } else { "error" } })))
}

fn reports_sleep(engine: &Engine) -> bool {
    engine.is_asleep() != engine.faults().occurs(Fault::SaysAsleep)
}

async fn is_sleeping(State(engine): SharedEngine) -> Json<Value> {
    Json(json!({ "is_sleeping": reports_sleep(&engine) }))
}

type Pairs = Vec<(String, String)>;

async fn sleep(State(engine): SharedEngine, Query(pairs): Query<Pairs>) -> HttpResult {
    let of = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let level = match of("level").unwrap_or("1") {
        "0" => 0,
        "1" => 1,
        "2" => 2,
        other => return Err(Failure::bad(format!("level is `{other}`: it must be 0, 1 or 2")).about("level")),
    };
    let mode = match of("mode").unwrap_or("abort") {
        "abort" => Mode::Abort,
        "wait" => Mode::Wait,
        "keep" => Mode::Keep,
        other => {
            let reason = format!("mode is `{other}`: it must be abort, wait or keep");
            return Err(Failure::bad(reason).about("mode"));
        }
    };
    let sleeper = Arc::clone(&engine);
    to_completion(&engine, async move { sleeper.sleep(level, mode).await }).await?;
    Ok(Json(json!({ "status": "sleeping", "level": level })).into_response())
}

async fn wake_up(State(engine): SharedEngine, Query(pairs): Query<Pairs>) -> HttpResult {
    let tags: Vec<String> = pairs.into_iter().filter(|(key, _)| key == "tags").map(|(_, tag)| tag).collect();
    let tags = (!tags.is_empty()).then_some(tags);
    let (waker, named) = (Arc::clone(&engine), tags.clone());
    let is_awake = to_completion(&engine, async move { waker.wake(named.as_deref()).await }).await?;
    let status = if is_awake { "awake" } else { "sleeping" };
    Ok(Json(json!({ "status": status, "tags": tags })).into_response())
}

#[derive(Debug, Deserialize)]
struct Rpc {
    method: Option<String>,
}

async fn collective_rpc(State(engine): SharedEngine, body: RequestBody) -> HttpResult {
    let rpc: Rpc = parsed(&read(body)?)?;
    match rpc.method.as_deref() {
        Some("reload_weights") => {
            let loader = Arc::clone(&engine);
            to_completion(&engine, async move { loader.reload_weights().await }).await?;
            Ok(Json(json!({ "results": [null] })).into_response())
        }
        Some(other) => {
            let reason = format!("the worker has no method `{other}`; a mock engine has reload_weights");
            Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason))
        }
        None => Err(Failure::bad("Missing 'method' in request body").about("method")),
    }
}

async fn list_loaded(State(engine): SharedEngine) -> Json<Value> {
    let model = json!({ "name": engine.model(), "model": engine.model() });
    Json(json!({ "models": if reports_sleep(&engine) { vec![] } else { vec![model] } }))
}

#[derive(Debug, Deserialize)]
struct Load {
    model: Option<String>,
    #[serde(default)]
    prompt: String,
    keep_alive: Option<Value>,
}

/// Without a prompt, `keep_alive` of 0 unloads the model, and others load it.
async fn load_or_unload(State(engine): SharedEngine, body: RequestBody) -> HttpResult {
    let load: Load = parsed(&read(body)?)?;
    if load.model.as_deref() != Some(engine.model()) {
        let reason = format!("model '{}' not found", load.model.unwrap_or_default());
        return Err(Failure::new(StatusCode::NOT_FOUND, reason));
    }
    if !load.prompt.is_empty() {
        return Err(Failure::bad("a mock engine generates by /v1 only; leave out the prompt").about("prompt"));
    }
    let unloads = load.keep_alive.is_some_and(|time| time == 0 || time == "0");
    let mover = Arc::clone(&engine);
    to_completion(&engine, async move {
        if unloads { mover.sleep(1, Mode::Wait).await } else { mover.wake(None).await.map(drop) }
    })
    .await?;
    let reason = if unloads { "unload" } else { "load" };
    let answer = json!({ "model": engine.model(), "response": "", "done": true, "done_reason": reason });
    Ok(Json(answer).into_response())
}

/// Runs a call to its end even if the client disconnects, as a real engine does.
async fn to_completion<T: Send + 'static>(
    engine: &Engine,
    act: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let end = engine.end().clone();
    match tokio::spawn(async move { end.run_until_cancelled(act).await }).await {
        Ok(Some(done)) => done,
        // The engine has crashed or is ending: no answer comes, and the connection is about to close.
        Ok(None) => std::future::pending().await,
        Err(error) => {
            let reason = format!("a task of the engine ended: {error}");
            Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason))
        }
    }
}
