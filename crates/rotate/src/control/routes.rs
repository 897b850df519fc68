//! The routes of control, and their handlers.

use std::future::Future;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Deserialize;
use serde_json::json;

use super::answer::Wrong;
use super::{BODY_MAX_BYTES, FOLLOWERS_MAX, REQUEST_MAX, Shared, events, guard, page};
use crate::service::{ModelNow, Order};

/// Default number of log lines.
const LINES: usize = 200;
/// Most log lines.
const LINES_MAX: usize = 10_000;
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) fn router(shared: Shared) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/rotate/status", get(status))
        .route("/rotate/events", get(follow))
        .route("/rotate/reload", post(reload))
        .route("/rotate/models/{name}/log", get(log))
        .route("/rotate/models/{name}/{order}", post(order))
        .fallback(nothing)
        .method_not_allowed_fallback(not_so)
        .layer(middleware::from_fn_with_state(shared.clone(), guard::guard))
        .with_state(shared)
}

async fn health() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

async fn status(State(shared): State<Shared>) -> Response {
    Json(shared.desk.snapshot().await).into_response()
}

async fn metrics(State(shared): State<Shared>) -> Result<Response, Wrong> {
    let snapshot = shared.desk.snapshot().await;
    let text = shared.metrics.text(&snapshot).map_err(|_| {
        Wrong::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the metrics could not be written; see the service's log",
        )
    })?;
    Ok(([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Past {
    /// How many past events to begin with.
    #[serde(default)]
    past: usize,
}

async fn follow(
    State(shared): State<Shared>,
    query: Result<Query<Past>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Wrong> {
    let Query(Past { past }) =
        query.map_err(|error| Wrong::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let last_seen = match headers.get("last-event-id") {
        Some(id) => Some(id.to_str().ok().and_then(|id| id.parse::<u64>().ok()).ok_or_else(|| {
            Wrong::new(
                StatusCode::BAD_REQUEST,
                "Last-Event-ID has to be the id of an event, which is a number",
            )
        })?),
        None => None,
    };
    let place = Arc::clone(&shared.followers).try_acquire_owned().map_err(|_| {
        let message = format!("{FOLLOWERS_MAX} follow events already, and more may not; close one of them");
        Wrong::new(StatusCode::SERVICE_UNAVAILABLE, message)
    })?;
    let from = match last_seen {
        Some(id) => events::From::Behind(id),
        None => events::From::Past(past),
    };
    let key = guard::key(&headers).map(str::to_owned);
    let desk = Arc::clone(&shared.desk);
    let may_see = move || guard::has_key(&desk.control(), key.as_deref());
    let stream = events::stream(Arc::clone(&shared.hub), from, events::BEAT, may_see, shared.shutdown, place);
    // Proxies that buffer answers have to pass this one on at once.
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream"), (HeaderName::from_static("x-accel-buffering"), "no")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

async fn reload(State(shared): State<Shared>, body: Body) -> Result<Response, Wrong> {
    whole(body).await?;
    to_its_end(async move { shared.desk.reload().await })
        .await?
        .map_err(|reason| Wrong::new(StatusCode::UNPROCESSABLE_ENTITY, reason))?;
    tracing::info!("an operator had the configuration read again");
    Ok(Json(json!({"reloaded": true})).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lines {
    lines: Option<usize>,
}

async fn log(
    State(shared): State<Shared>,
    path: Result<Path<String>, PathRejection>,
    query: Result<Query<Lines>, QueryRejection>,
) -> Result<Response, Wrong> {
    let Path(name) = path.map_err(|error| Wrong::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let Query(Lines { lines }) =
        query.map_err(|error| Wrong::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let lines = lines.unwrap_or(LINES);
    if lines > LINES_MAX {
        let message = format!("{lines} lines were asked for, and {LINES_MAX} are the most");
        return Err(Wrong::new(StatusCode::BAD_REQUEST, message));
    }
    let Some(lines) = shared.desk.log(&name, lines) else {
        return Err(no_model(&shared, &name).await);
    };
    let text: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    #[serde(default = "yes")]
    pinned: bool,
}

fn yes() -> bool {
    true
}

async fn order(
    State(shared): State<Shared>,
    path: Result<Path<(String, String)>, PathRejection>,
    body: Body,
) -> Result<Response, Wrong> {
    let Path((name, what)) = path.map_err(|error| Wrong::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    let body = whole(body).await?;
    let order = match what.as_str() {
        "wake" => Order::Wake,
        "sleep" => Order::Sleep,
        "restart" => Order::Restart,
        "pin" if body.trim_ascii().is_empty() => Order::Pin(true),
        "pin" => {
            let pin: Pin = serde_json::from_slice(&body).map_err(|error| {
                let message =
                    format!("the body has to be {{\"pinned\": true}} or {{\"pinned\": false}}: {error}");
                Wrong::new(StatusCode::BAD_REQUEST, message)
            })?;
            Order::Pin(pin.pinned)
        }
        _ => {
            let message =
                format!("`{what}` is nothing that a model can be told; say wake, sleep, restart or pin");
            return Err(Wrong::new(StatusCode::NOT_FOUND, message));
        }
    };
    let (desk, asked) = (Arc::clone(&shared.desk), name.clone());
    if !to_its_end(async move { desk.order(&asked, order).await }).await? {
        return Err(no_model(&shared, &name).await);
    }
    tracing::info!(model = name, ?order, "an operator gave an order");
    let is_it = |model: &ModelNow| model.name == name || model.aliases.contains(&name);
    let models = shared.desk.snapshot().await.models;
    match models.iter().find(|model| is_it(model)) {
        Some(model) => Ok((StatusCode::ACCEPTED, Json(model)).into_response()),
        None => Err(Wrong::no_model(&name, models.into_iter().map(|model| model.name).collect())),
    }
}

async fn nothing() -> Wrong {
    let message = "there is nothing here; there are /, /health, /metrics, /rotate/status, /rotate/events, \
                   /rotate/reload, /rotate/models/NAME/log and /rotate/models/NAME/{wake,sleep,restart,pin}, where a / \
                   in a name is written %2F";
    Wrong::new(StatusCode::NOT_FOUND, message)
}

async fn not_so() -> Wrong {
    Wrong::new(StatusCode::METHOD_NOT_ALLOWED, "this is read with GET, and orders are given with POST")
}

async fn no_model(shared: &Shared, name: &str) -> Wrong {
    let models = shared.desk.snapshot().await.models;
    Wrong::no_model(name, models.into_iter().map(|model| model.name).collect())
}

/// Completes `work` even if the client disconnects.
async fn to_its_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<T, Wrong> {
    tokio::spawn(work).await.map_err(|error| {
        tracing::error!(%error, "an operator's order broke");
        Wrong::new(StatusCode::INTERNAL_SERVER_ERROR, "this broke halfway; see the service's log")
    })
}

/// Reads a body within the size limit and timeout.
async fn whole(body: Body) -> Result<Bytes, Wrong> {
    let read = tokio::time::timeout(REQUEST_MAX, Limited::new(body, BODY_MAX_BYTES).collect()).await;
    match read {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let message = format!("the body is longer than {BODY_MAX_BYTES} bytes, which is the most");
            Err(Wrong::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Ok(Err(error)) => Err(Wrong::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))),
        Err(_) => {
            let message = format!("the body did not come within {} s", REQUEST_MAX.as_secs());
            Err(Wrong::new(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}
