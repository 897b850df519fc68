//! The routes of a router's control, and their handlers.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router, middleware};
use http::{StatusCode, header};
use poorwill_fleet::controller;
use poorwill_fleet::mirror::Contents;
use poorwill_fleet::name::ModelName;
use poorwill_front::operators::{ControlError, OPENMETRICS, guard, page, read_body, to_completion};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::state::OperatorState;
use crate::status::{FleetStatus, ModelWhy, Records};
use crate::wishes::{Wish, WishError, wish};

pub(super) fn router(shared: OperatorState) -> Router {
    Router::new()
        .route("/", get(async || page::FLEET))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/fleet/ready", get(ready))
        .route("/fleet/status", get(status))
        .route("/fleet/changes", get(changes))
        .route("/fleet/why/{model}", get(why))
        .route("/fleet/drains/{node}", put(drain).delete(take_again))
        .route("/fleet/pins/{model}", put(pin).delete(unpin))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(shared.access.clone(), guard::guard))
        .with_state(shared)
}

async fn health() -> Response {
    Json(json!({"status": "ok"})).into_response()
}

/// Whether it has read the fleet's records. Later it routes by them, also while etcd cannot be reached.
async fn ready(State(shared): State<OperatorState>) -> Result<Response, ControlError> {
    if shared.operated.contents.borrow().revision() > 0 {
        return Ok(Json(json!({"status": "ok"})).into_response());
    }
    let message = "this router has not read its fleet's records from etcd yet";
    Err(ControlError::new(StatusCode::SERVICE_UNAVAILABLE, message))
}

/// What a fleet has, and what this process does about it.
#[derive(Debug, Serialize)]
struct RouterStatus {
    #[serde(flatten)]
    fleet: FleetStatus,
    /// The revision of etcd that all of it is of; 0 before it was read.
    revision: u64,
    /// Whether etcd was reached a short time ago.
    is_current: bool,
    /// `None` in a process that is no candidate.
    controller: Option<ControllerStatus>,
}

#[derive(Debug, Serialize)]
struct ControllerStatus {
    is_leader: bool,
    /// The revision of its election.
    leads_since: Option<u64>,
    /// What it wrote with its last decision.
    plan: Vec<String>,
    shortages: Vec<ShortageStatus>,
    /// Records that it left as they are.
    problems: Vec<String>,
    decided_in_s: f64,
    /// Placements since it was started.
    written: u64,
}

#[derive(Debug, Serialize)]
struct ShortageStatus {
    model: String,
    text: String,
}

impl From<controller::Status> for ControllerStatus {
    fn from(now: controller::Status) -> Self {
        let shortage = |one: &poorwill_fleet::policy::Shortage| ShortageStatus {
            model: one.model.to_string(),
            text: one.to_string(),
        };
        Self {
            is_leader: now.leads_since.is_some(),
            leads_since: now.leads_since,
            plan: now.plan.changes.iter().map(ToString::to_string).collect(),
            shortages: now.plan.shortages.iter().map(shortage).collect(),
            problems: now.problems,
            decided_in_s: now.decided_in.as_secs_f64(),
            written: now.written,
        }
    }
}

async fn records(shared: &OperatorState) -> Result<(Records, Contents), ControlError> {
    shared.operated.records().await.map_err(|error| {
        tracing::error!(%error, "cannot read the fleet's records");
        ControlError::new(StatusCode::INTERNAL_SERVER_ERROR, "this broke halfway; see the router's log")
    })
}

async fn status(State(shared): State<OperatorState>) -> Result<Response, ControlError> {
    let (records, contents) = records(&shared).await?;
    let status = RouterStatus {
        fleet: records.status(),
        revision: contents.revision(),
        is_current: contents.is_current(),
        controller: shared.operated.controller().map(ControllerStatus::from),
    };
    Ok(Json(status).into_response())
}

async fn changes(State(shared): State<OperatorState>) -> Response {
    Json(json!({"changes": shared.operated.changes()})).into_response()
}

#[derive(Debug, Serialize)]
struct Why {
    #[serde(flatten)]
    model: ModelWhy,
    /// What it should have and does not get, if this process leads.
    shortages: Vec<String>,
}

async fn why(
    State(shared): State<OperatorState>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Response, ControlError> {
    let name = in_path(path)?;
    let (records, _) = records(&shared).await?;
    let model = name.parse::<ModelName>().ok().and_then(|model| records.why(&model));
    let Some(model) = model else {
        let models = records.view.models().into_iter().map(ToString::to_string).collect();
        return Err(ControlError::no_model(&name, models));
    };
    let leading = shared.operated.controller().filter(|controller| controller.leads_since.is_some());
    let plan = leading.map(|leading| leading.plan).unwrap_or_default();
    let of_model = plan.shortages.iter().filter(|shortage| shortage.model.as_str() == name);
    let shortages = of_model.map(ToString::to_string).collect();
    Ok(Json(Why { model, shortages }).into_response())
}

async fn metrics(State(shared): State<OperatorState>) -> Result<Response, ControlError> {
    let (records, contents) = records(&shared).await?;
    let controller = shared.operated.controller();
    let text = shared.metrics.text(&records, contents.is_current(), controller.as_ref()).map_err(|_| {
        let message = "the metrics could not be written; see the router's log";
        ControlError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    })?;
    Ok(([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response())
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct DrainBody {
    why: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CopiesBody {
    copies: u32,
    nodes: Vec<String>,
}

impl Default for CopiesBody {
    fn default() -> Self {
        Self { copies: 1, nodes: Vec::new() }
    }
}

async fn drain(
    State(shared): State<OperatorState>,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    let node = in_path(path)?;
    let DrainBody { why } = json_of(body, "{\"why\": \"TEXT\"}, or nothing").await?;
    carry_out(shared, Wish::Drain { node, why, lasts: None }).await
}

async fn take_again(
    State(shared): State<OperatorState>,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    read_body(body).await?;
    carry_out(shared, Wish::TakeAgain { node: in_path(path)? }).await
}

async fn pin(
    State(shared): State<OperatorState>,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    let model = in_path(path)?;
    let CopiesBody { copies, nodes } = json_of(body, "{\"copies\": 2, \"nodes\": []}, or nothing").await?;
    carry_out(shared, Wish::Pin { model, copies, nodes }).await
}

async fn unpin(
    State(shared): State<OperatorState>,
    path: Result<Path<String>, PathRejection>,
    body: Body,
) -> Result<Response, ControlError> {
    read_body(body).await?;
    carry_out(shared, Wish::Unpin { model: in_path(path)? }).await
}

fn in_path(path: Result<Path<String>, PathRejection>) -> Result<String, ControlError> {
    let Path(name) = path.map_err(|error| ControlError::new(StatusCode::BAD_REQUEST, error.body_text()))?;
    Ok(name)
}

/// An empty body is one without fields.
async fn json_of<T: DeserializeOwned + Default>(body: Body, example: &str) -> Result<T, ControlError> {
    let body = read_body(body).await?;
    if body.trim_ascii().is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(&body).map_err(|error| {
        let message = format!("the body has to be like {example}: {error}");
        ControlError::new(StatusCode::BAD_REQUEST, message)
    })
}

async fn carry_out(shared: OperatorState, wanted: Wish) -> Result<Response, ControlError> {
    tracing::info!(?wanted, "an operator changed a wish");
    let operated = Arc::clone(&shared.operated);
    let done = to_completion(async move { wish(&operated.etcd, &operated.fleet, wanted).await }).await?;
    let wish = done.map_err(|error| {
        let status = match error {
            WishError::Unknown { .. } => StatusCode::NOT_FOUND,
            WishError::Name { .. } | WishError::Record(_) => StatusCode::BAD_REQUEST,
            WishError::Etcd(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        ControlError::new(status, poorwill_core::chain(&error))
    })?;
    Ok(Json(json!({"wish": wish})).into_response())
}

async fn not_found() -> ControlError {
    let message = "there is nothing here; there are /, /health, /metrics, /fleet/ready, /fleet/status, \
                   /fleet/changes, /fleet/why/MODEL, /fleet/drains/NODE and /fleet/pins/MODEL, where a / in a name is \
                   written %2F";
    ControlError::new(StatusCode::NOT_FOUND, message)
}

async fn method_not_allowed() -> ControlError {
    let message = "reads use GET, and wishes use PUT and DELETE";
    ControlError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}
