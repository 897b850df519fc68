//! The routes of control, and their handlers.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use http::{HeaderMap, HeaderName, StatusCode, header};
use poorwill_front::operators::{ControlError, OPENMETRICS, guard, page, read_body, to_completion};
use serde::Deserialize;
use serde_json::json;

use super::events::{self, Events};
use super::follow::{self, Followed, KEEP_ALIVE_EVERY};
use super::state::{FOLLOWERS_MAX, HandlerState};
use crate::service::ModelCommand;

/// Default number of log lines.
const LINES: usize = 200;
const LINES_MAX: usize = 10_000;
/// Most requests in progress in one answer.
const REQUESTS_MAX: usize = 1000;

pub(super) fn router(shared: HandlerState) -> Router {
    Router::new()
        .route("/", get(async || page::NODE))
        .route("/health", get(health))
        .route("/fleet/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/rotate/status", get(status))
        .route("/rotate/requests", get(requests))
        .route("/rotate/requests/{id}/cancel", post(cancel))
        .route("/rotate/sleep", post(sleep_all))
        .route("/rotate/events", get(events))
        .route("/rotate/reload", post(reload))
        .route("/rotate/profile", post(profile))
        .route("/rotate/models/{name}/log", get(log))
        .route("/rotate/models/{name}/{command}", post(command))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(shared.access.clone(), guard::guard))
        .with_state(shared)
}

async fn health() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

/// Whether routers of its fleet may send it requests. What exactly is wrong is for holders of a key.
async fn ready(State(shared): State<HandlerState>, headers: HeaderMap) -> Result<Response, ControlError> {
    match shared.api.fleet().map(|fleet| fleet.ready) {
        None => {
            let message = "this rotation is a node of no fleet: its configuration has no [fleet]";
            Err(ControlError::new(StatusCode::NOT_FOUND, message))
        }
        Some(Ok(())) => Ok(Json(json!({"status": "ok"})).into_response()),
        Some(Err(not_ready)) => {
            let message = match &not_ready.problem {
                Some(problem) if shared.access.has_key(guard::key(&headers)) => {
                    format!("{not_ready}: {problem}")
                }
                _ => not_ready.to_string(),
            };
            Err(ControlError::new(StatusCode::SERVICE_UNAVAILABLE, message))
        }
    }
}

async fn status(State(shared): State<HandlerState>) -> Response {
    Json(shared.snapshot().await).into_response()
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestsQuery {
    /// Most requests in the answer.
    max: Option<usize>,
}

async fn requests(
    State(shared): State<HandlerState>,
    query: Result<Query<RequestsQuery>, QueryRejection>,
) -> Result<Response, ControlError> {
    let Query(RequestsQuery { max }) =
        query.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let max = max.unwrap_or(REQUESTS_MAX).min(REQUESTS_MAX);
    let (requests, count) = shared.api.requests().active(max);
    Ok(Json(json!({"count": count, "requests": requests})).into_response())
}

/// Ends requests in progress. Their clients get an error.
async fn cancel(
    State(shared): State<HandlerState>,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    let Path(id) = path.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    read_body(body).await?;
    let cancelled = shared.api.requests().cancel(&id);
    if cancelled == 0 {
        let message = format!(
            "no request in progress has the id `{}`; GET /rotate/requests lists those that there are",
            id.chars().take(256).collect::<String>().escape_debug()
        );
        return Err(ControlError::new(StatusCode::NOT_FOUND, message));
    }
    tracing::info!(request_id = id, cancelled, "an operator cancelled a request");
    Ok(Json(json!({"cancelled": cancelled})).into_response())
}

/// Puts every model to sleep.
async fn sleep_all(State(shared): State<HandlerState>, body: Body) -> Result<Response, ControlError> {
    read_body(body).await?;
    let models: Vec<String> = shared.snapshot().await.models.into_iter().map(|model| model.name).collect();
    let (api, all) = (Arc::clone(&shared.api), models.clone());
    to_completion(async move {
        for name in &all {
            // One that was removed meanwhile sleeps anyway.
            api.command(name, ModelCommand::Sleep).await;
        }
    })
    .await?;
    tracing::info!("an operator put all models to sleep");
    Ok((StatusCode::ACCEPTED, Json(json!({"models": models}))).into_response())
}

async fn metrics(State(shared): State<HandlerState>) -> Result<Response, ControlError> {
    let snapshot = shared.snapshot().await;
    let text = shared.metrics.text(&snapshot, shared.api.fleet().as_ref()).map_err(|_| {
        ControlError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the metrics could not be written; see the service's log",
        )
    })?;
    Ok(([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    /// How many past events to begin with.
    #[serde(default)]
    past: usize,
}

async fn events(
    State(shared): State<HandlerState>,
    query: Result<Query<EventsQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ControlError> {
    let Query(EventsQuery { past }) =
        query.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let last_seen = match headers.get("last-event-id") {
        Some(id) => Some(id.to_str().ok().and_then(|id| id.parse::<u64>().ok()).ok_or_else(|| {
            ControlError::new(
                StatusCode::BAD_REQUEST,
                "Last-Event-ID has to be the id of an event, which is a number",
            )
        })?),
        None => None,
    };
    let from = match last_seen {
        Some(id) => events::StartAt::After(id),
        None => events::StartAt::Last(past),
    };
    let events = Events::of(Arc::clone(&shared.hub), from);
    followed(events, "text/event-stream", shared, &headers)
}

/// An answer that goes on.
fn followed(
    followed: impl Followed + 'static,
    kind: &'static str,
    shared: HandlerState,
    headers: &HeaderMap,
) -> Result<Response, ControlError> {
    let permit = Arc::clone(&shared.followers).try_acquire_owned().map_err(|_| {
        let message =
            format!("{FOLLOWERS_MAX} follow events and logs already, and more may not; close one of them");
        ControlError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    })?;
    let key = guard::key(headers).map(str::to_owned);
    let access = shared.access;
    let may_see = move || access.has_key(key.as_deref());
    let stream = follow::stream(followed, KEEP_ALIVE_EVERY, may_see, shared.shutdown, permit);
    // Proxies that buffer answers have to pass this one on at once.
    let headers = [(header::CONTENT_TYPE, kind), (HeaderName::from_static("x-accel-buffering"), "no")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

async fn reload(State(shared): State<HandlerState>, body: Body) -> Result<Response, ControlError> {
    read_body(body).await?;
    to_completion(async move { shared.api.reload().await })
        .await?
        .map_err(|reason| ControlError::new(StatusCode::UNPROCESSABLE_ENTITY, reason))?;
    tracing::info!("an operator reloaded the configuration");
    Ok(Json(json!({"reloaded": true})).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileBody {
    /// A missing one is a mistake, and not none.
    #[serde(deserialize_with = "Option::deserialize")]
    profile: Option<String>,
}

async fn profile(State(shared): State<HandlerState>, body: Body) -> Result<Response, ControlError> {
    let body = read_body(body).await?;
    let ProfileBody { profile } = serde_json::from_slice(&body).map_err(|error| {
        let message =
            format!("the body has to be {{\"profile\": \"NAME\"}} or {{\"profile\": null}}: {error}");
        ControlError::new(StatusCode::BAD_REQUEST, message)
    })?;
    let chosen = shared.api.set_profile(profile.as_deref());
    chosen.map_err(|reason| ControlError::new(StatusCode::NOT_FOUND, reason))?;
    tracing::info!(profile, "an operator chose a profile");
    Ok(Json(json!({"profile": profile})).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogQuery {
    lines: Option<usize>,
    /// Whether the answer goes on with what comes.
    #[serde(default)]
    follow: bool,
}

const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

async fn log(
    State(shared): State<HandlerState>,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<LogQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, ControlError> {
    let Path(name) = path.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let Query(LogQuery { lines, follow }) =
        query.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let lines = lines.unwrap_or(LINES);
    if lines > LINES_MAX {
        let message = format!("{lines} lines were requested, and {LINES_MAX} is the limit");
        return Err(ControlError::new(StatusCode::BAD_REQUEST, message));
    }
    let Some(log) = shared.api.log(&name) else {
        return Err(no_log(&shared, &name).await);
    };
    if follow {
        return followed(log.follow(lines), PLAIN_TEXT, shared, &headers);
    }
    let text: String = log.last(lines).iter().flat_map(|line| [line.as_str(), "\n"]).collect();
    Ok(([(header::CONTENT_TYPE, PLAIN_TEXT)], text).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinBody {
    #[serde(default = "yes")]
    pinned: bool,
}

fn yes() -> bool {
    true
}

async fn command(
    State(shared): State<HandlerState>,
    path: Result<Path<(String, String)>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    let Path((name, what)) =
        path.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let body = read_body(body).await?;
    let command = match what.as_str() {
        "wake" => ModelCommand::Wake,
        "sleep" => ModelCommand::Sleep,
        "hibernate" => ModelCommand::Hibernate,
        "restart" => ModelCommand::Restart,
        "pin" if body.trim_ascii().is_empty() => ModelCommand::Pin(true),
        "pin" => {
            let pin: PinBody = serde_json::from_slice(&body).map_err(|error| {
                let message =
                    format!("the body has to be {{\"pinned\": true}} or {{\"pinned\": false}}: {error}");
                ControlError::new(StatusCode::BAD_REQUEST, message)
            })?;
            ModelCommand::Pin(pin.pinned)
        }
        _ => {
            let message = format!("`{what}` is no command; say wake, sleep, hibernate, restart or pin");
            return Err(ControlError::new(StatusCode::NOT_FOUND, message));
        }
    };
    let refusal =
        shared.api.snapshot().await.models.iter().find(|model| model.is_named(&name)).and_then(|model| {
            Some(format!("`{}`: {what} is refused: {}", model.name, model.refusal(command)?))
        });
    if let Some(refusal) = refusal {
        return Err(ControlError::new(StatusCode::CONFLICT, refusal));
    }
    let (api, asked) = (Arc::clone(&shared.api), name.clone());
    if !to_completion(async move { api.command(&asked, command).await }).await? {
        return Err(no_model(&shared, &name).await);
    }
    tracing::info!(model = name, ?command, "an operator sent a command");
    let models = shared.snapshot().await.models;
    match models.iter().find(|model| model.is_named(&name)) {
        Some(model) => Ok((StatusCode::ACCEPTED, Json(model)).into_response()),
        None => Err(ControlError::no_model(&name, models.into_iter().map(|model| model.name).collect())),
    }
}

async fn not_found() -> ControlError {
    let message = "there is nothing here; there are /, /health, /metrics, /fleet/ready, /rotate/status, /rotate/requests, \
                   /rotate/requests/ID/cancel, /rotate/sleep, /rotate/events, /rotate/reload, /rotate/profile, /rotate/models/NAME/log and /rotate/models/NAME/{wake,sleep,hibernate,restart,pin}, where a / \
                   in a name is written %2F";
    ControlError::new(StatusCode::NOT_FOUND, message)
}

async fn method_not_allowed() -> ControlError {
    ControlError::new(StatusCode::METHOD_NOT_ALLOWED, "reads use GET, and commands use POST")
}

async fn no_model(shared: &HandlerState, name: &str) -> ControlError {
    let models = shared.snapshot().await.models;
    ControlError::no_model(name, models.into_iter().map(|model| model.name).collect())
}

async fn no_log(shared: &HandlerState, name: &str) -> ControlError {
    let models = shared.snapshot().await.models;
    if models.iter().any(|model| model.is_named(name)) {
        let message = format!(
            "the engine of `{name}` was not started here, so none of its output is here; look where it was started"
        );
        return ControlError::new(StatusCode::CONFLICT, message);
    }
    ControlError::no_model(name, models.into_iter().map(|model| model.name).collect())
}
