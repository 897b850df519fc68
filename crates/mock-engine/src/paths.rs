//! The paths of a mock engine: those of vLLM 0.33 with its development endpoints, and one to say which lies it tells.

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

use crate::asked::{Chat, Common, Completion, Embed, Encoding, MODEL_LEN_MAX, Respond, parsed};
use crate::chance::{hash, nth};
use crate::engine::{Engine, Mode};
use crate::failure::Failure;
use crate::generate::{self, Ask, Piece};
use crate::lie::{Lie, Telling};
use crate::metrics;
use crate::shape::{Kind, Shape};
use crate::text::Text;

/// Longest body that is read.
const BODY_BYTES_MAX: usize = 64 << 20;

type It = State<Arc<Engine>>;
type Asked = Result<Bytes, BytesRejection>;
type Answer = Result<Response, Failure>;

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
        .route("/mock/lies", get(lies).put(put_lies))
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

async fn models(State(engine): It) -> Json<Value> {
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

async fn is_sleeping(State(engine): It) -> Json<Value> {
    let is_sleeping = engine.is_asleep() != engine.lies.tells(Lie::SaysAsleep);
    Json(json!({ "is_sleeping": is_sleeping }))
}

type Pairs = Vec<(String, String)>;

async fn sleep(State(engine): It, Query(pairs): Query<Pairs>) -> Answer {
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
    to_its_end(&engine, async move { sleeper.sleep(level, mode).await }).await?;
    Ok(Json(json!({ "status": "sleeping", "level": level })).into_response())
}

async fn wake_up(State(engine): It, Query(pairs): Query<Pairs>) -> Answer {
    let tags: Vec<String> = pairs.into_iter().filter(|(key, _)| key == "tags").map(|(_, tag)| tag).collect();
    let tags = (!tags.is_empty()).then_some(tags);
    let (waker, named) = (Arc::clone(&engine), tags.clone());
    let is_awake = to_its_end(&engine, async move { waker.wake(named.as_deref()).await }).await?;
    let status = if is_awake { "awake" } else { "sleeping" };
    Ok(Json(json!({ "status": status, "tags": tags })).into_response())
}

#[derive(Debug, Deserialize)]
struct Rpc {
    method: Option<String>,
}

async fn collective_rpc(State(engine): It, body: Asked) -> Answer {
    let rpc: Rpc = parsed(&read(body)?)?;
    match rpc.method.as_deref() {
        Some("reload_weights") => {
            let loader = Arc::clone(&engine);
            to_its_end(&engine, async move { loader.reload_weights().await }).await?;
            Ok(Json(json!({ "results": [null] })).into_response())
        }
        Some(other) => {
            let reason = format!("the worker has no method `{other}`; a mock engine has reload_weights");
            Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason))
        }
        None => Err(Failure::bad("Missing 'method' in request body").about("method")),
    }
}

/// Does what moves memory, also when whoever asked for it leaves: an engine would.
async fn to_its_end<T: Send + 'static>(
    engine: &Engine,
    act: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let end = engine.end.clone();
    match tokio::spawn(async move { end.run_until_cancelled(act).await }).await {
        Ok(Some(done)) => done,
        // It has crashed, or ends: no answer comes, and the connection is about to break.
        Ok(None) => std::future::pending().await,
        Err(error) => {
            let reason = format!("a task of the engine ended: {error}");
            Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, reason))
        }
    }
}

async fn metrics(State(engine): It) -> Answer {
    let text = metrics::text(&engine).await?;
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn lies(State(engine): It) -> Json<Vec<String>> {
    Json(engine.lies.names())
}

async fn put_lies(State(engine): It, body: Asked) -> Result<Json<Vec<String>>, Failure> {
    let names: Vec<String> = parsed(&read(body)?)?;
    let told: Result<Vec<Telling>, _> = names.iter().map(|name| name.parse()).collect();
    engine.lies.replace(told.map_err(|error| Failure::bad(error.to_string()))?);
    Ok(Json(engine.lies.names()))
}

async fn completions(State(engine): It, headers: HeaderMap, body: Asked) -> Answer {
    let body = read(body)?;
    let asked: Completion = parsed(&body)?;
    asked.common.check(&engine.model)?;
    answer(&engine, Kind::Completion, &asked.common, asked.ask()?, &id(&headers, &body)).await
}

async fn chat(State(engine): It, headers: HeaderMap, body: Asked) -> Answer {
    let body = read(body)?;
    let asked: Chat = parsed(&body)?;
    asked.common.check(&engine.model)?;
    answer(&engine, Kind::Chat, &asked.common, asked.ask()?, &id(&headers, &body)).await
}

async fn responses(State(engine): It, headers: HeaderMap, body: Asked) -> Answer {
    let body = read(body)?;
    let asked: Respond = parsed(&body)?;
    asked.common.check(&engine.model)?;
    answer(&engine, Kind::Response, &asked.common, asked.ask()?, &id(&headers, &body)).await
}

async fn embeddings(State(engine): It, body: Asked) -> Answer {
    let asked: Embed = parsed(&read(body)?)?;
    asked.common.check(&engine.model)?;
    let (texts, tokens) = asked.input.read("input")?;
    let sampled = generate::embed(&engine, tokens).await?;
    let embedding = |(index, text): (usize, &String)| {
        let numbers = Text::new(&engine.model, text).embedding(sampled);
        let embedding = match asked.encoding_format {
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
async fn answer(engine: &Arc<Engine>, kind: Kind, common: &Common, ask: Ask, id: &str) -> Answer {
    let shape = Shape::new(kind, id, &engine.model, ask.prompts.len(), ask.prompt_tokens)
        .including_usage(common.includes_usage());
    let is_streamed = common.is_streamed();
    let pieces = generate::begin(engine, ask).await?;
    if is_streamed {
        Ok(streamed(shape, pieces))
    } else {
        Ok(Json(whole(shape, pieces).await).into_response())
    }
}

async fn whole(mut shape: Shape, mut pieces: UnboundedReceiver<Piece>) -> Value {
    while let Some(piece) = pieces.recv().await {
        shape.take(&piece);
    }
    if !shape.is_complete() {
        // The engine is gone: no answer comes, and the connection is about to break.
        return std::future::pending().await;
    }
    shape.whole()
}

fn streamed(mut shape: Shape, pieces: UnboundedReceiver<Piece>) -> Response {
    let opening = shape.opening();
    let rest = stream::unfold((shape, pieces, false), async |(mut shape, mut pieces, is_over)| {
        if is_over {
            return None;
        }
        let Some(piece) = pieces.recv().await else {
            // As above: a stream that has not ended does not look as if it had.
            return std::future::pending().await;
        };
        shape.take(&piece);
        let chunk = shape.chunk(&piece);
        let is_over = shape.is_complete();
        // What ends a stream comes with its last token, or there would be an empty chunk without one.
        let chunk = if is_over { chunk + &shape.closing() } else { chunk };
        Some((Ok::<_, Infallible>(Bytes::from(chunk)), (shape, pieces, is_over)))
    });
    let opening = (!opening.is_empty()).then(|| Ok(Bytes::from(opening)));
    let body = Body::from_stream(stream::StreamExt::chain(stream::iter(opening), rest));
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8")], body).into_response()
}

fn read(body: Asked) -> Result<Bytes, Failure> {
    body.map_err(|rejection| Failure::new(rejection.status(), rejection.body_text()))
}

/// What the answer is known by: what the client calls its request, or a number for what it asked.
fn id(headers: &HeaderMap, body: &[u8]) -> String {
    let named = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let number = hash(body);
    named.map_or_else(|| format!("{number:016x}{:016x}", nth(number, 0)), str::to_owned)
}
