//! The HTTP paths: those of vLLM 0.33 with its development endpoints, and `/mock/faults`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, StatusCode, Uri};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::engine::{Engine, Mode};
use crate::failure::Failure;
use crate::fault::{Fault, FaultSpec};
use crate::generate::{self, Delta, GenerateRequest};
use crate::metrics;
use crate::random::{hash, nth};
use crate::request::{Chat, Common, Completion, Embed, Encoding, MODEL_LEN_MAX, Respond, parsed};
use crate::shape::{Kind, Shape};
use crate::text::Text;

const BODY_BYTES_MAX: usize = 64 << 20;

type SharedEngine = State<Arc<Engine>>;
type RequestBody = Result<Bytes, BytesRejection>;
type HttpResult = Result<Response, Failure>;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/health", get(async || StatusCode::OK))
        .route("/v1/models", get(models))
        .route("/is_sleeping", get(is_sleeping))
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/collective_rpc", post(collective_rpc))
        .route("/metrics", get(metrics))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/embeddings", post(embeddings))
        .route("/mock/faults", get(faults).put(put_faults))
        // The old path, for one release.
        .route("/mock/lies", get(faults).put(put_faults))
        .fallback(async |uri: Uri| {
            Failure::new(StatusCode::NOT_FOUND, format!("there is nothing at {}", uri.path()))
        })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            let reason = format!("{} does not take {method}", uri.path());
            Failure::new(StatusCode::METHOD_NOT_ALLOWED, reason)
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(engine)
}

async fn models(State(engine): SharedEngine) -> Json<Value> {
    let model = json!({
        "id": engine.model,
        "object": "model",
        "created": 0,
        "owned_by": "poorwill",
        "root": engine.model,
        "parent": null,
        "max_model_len": MODEL_LEN_MAX,
    });
    Json(json!({ "object": "list", "data": [model] }))
}

async fn is_sleeping(State(engine): SharedEngine) -> Json<Value> {
    let is_sleeping = engine.is_asleep() != engine.faults.occurs(Fault::SaysAsleep);
    Json(json!({ "is_sleeping": is_sleeping }))
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

/// Runs a call to its end even if the client disconnects, as a real engine does.
async fn to_completion<T: Send + 'static>(
    engine: &Engine,
    act: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let end = engine.end.clone();
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

async fn metrics(State(engine): SharedEngine) -> HttpResult {
    let text = metrics::text(&engine).await?;
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn faults(State(engine): SharedEngine) -> Json<Vec<String>> {
    Json(engine.faults.names())
}

async fn put_faults(State(engine): SharedEngine, body: RequestBody) -> Result<Json<Vec<String>>, Failure> {
    let names: Vec<String> = parsed(&read(body)?)?;
    let specs: Result<Vec<FaultSpec>, _> = names.iter().map(|name| name.parse()).collect();
    engine.faults.replace(specs.map_err(|error| Failure::bad(error.to_string()))?);
    Ok(Json(engine.faults.names()))
}

async fn completions(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Completion = parsed(&body)?;
    request.common.check(&engine.model)?;
    answer(&engine, Kind::Completion, &request.common, request.generate_request()?, &id(&headers, &body))
        .await
}

async fn chat(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Chat = parsed(&body)?;
    request.common.check(&engine.model)?;
    answer(&engine, Kind::Chat, &request.common, request.generate_request()?, &id(&headers, &body)).await
}

async fn responses(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Respond = parsed(&body)?;
    request.common.check(&engine.model)?;
    answer(&engine, Kind::Response, &request.common, request.generate_request()?, &id(&headers, &body)).await
}

async fn embeddings(State(engine): SharedEngine, body: RequestBody) -> HttpResult {
    let request: Embed = parsed(&read(body)?)?;
    request.common.check(&engine.model)?;
    let (texts, tokens) = request.input.read("input")?;
    let sampled = generate::embed(&engine, tokens).await?;
    let embedding = |(index, text): (usize, &String)| {
        let numbers = Text::new(&engine.model, text).embedding(sampled);
        let embedding = match request.encoding_format {
            Encoding::Float => json!(numbers),
            Encoding::Base64 => {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                json!(BASE64_STANDARD.encode(bytes))
            }
        };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    };
    let data: Vec<Value> = texts.iter().enumerate().map(embedding).collect();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let list = json!({ "object": "list", "data": data, "model": engine.model, "usage": usage });
    Ok(Json(list).into_response())
}

/// Generates, and answers as a whole or as a stream.
async fn answer(
    engine: &Arc<Engine>,
    kind: Kind,
    common: &Common,
    generation: GenerateRequest,
    id: &str,
) -> HttpResult {
    let shape = Shape::new(kind, id, &engine.model, generation.prompts.len(), generation.prompt_tokens)
        .including_usage(common.includes_usage());
    let is_streamed = common.is_streamed();
    let deltas = generate::begin(engine, generation).await?;
    if is_streamed {
        Ok(streamed(shape, deltas))
    } else {
        Ok(Json(whole(shape, deltas).await).into_response())
    }
}

async fn whole(mut shape: Shape, mut deltas: UnboundedReceiver<Delta>) -> Value {
    while let Some(delta) = deltas.recv().await {
        shape.take(&delta);
    }
    if !shape.is_complete() {
        // The engine has crashed: no answer comes.
        return std::future::pending().await;
    }
    shape.whole()
}

fn streamed(mut shape: Shape, deltas: UnboundedReceiver<Delta>) -> Response {
    let opening = shape.opening();
    let rest = stream::unfold((shape, deltas, false), async |(mut shape, mut deltas, is_over)| {
        if is_over {
            return None;
        }
        let Some(delta) = deltas.recv().await else {
            // An unfinished stream must not look finished.
            return std::future::pending().await;
        };
        shape.take(&delta);
        let chunk = shape.chunk(&delta);
        let is_over = shape.is_complete();
        // With the last token: alone, the end could be an empty chunk.
        let chunk = if is_over { chunk + &shape.closing() } else { chunk };
        Some((Ok::<_, Infallible>(Bytes::from(chunk)), (shape, deltas, is_over)))
    });
    let opening = (!opening.is_empty()).then(|| Ok(Bytes::from(opening)));
    let body = Body::from_stream(stream::StreamExt::chain(stream::iter(opening), rest));
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}

fn read(body: RequestBody) -> Result<Bytes, Failure> {
    body.map_err(|rejection| Failure::new(rejection.status(), rejection.body_text()))
}

/// The client's request identifier, or a hash of the body.
fn id(headers: &HeaderMap, body: &[u8]) -> String {
    let named = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let number = hash(body);
    named.map_or_else(|| format!("{number:016x}{:016x}", nth(number, 0)), str::to_owned)
}
