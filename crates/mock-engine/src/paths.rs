//! The HTTP paths for clients: those of vLLM 0.33 that are asked for, and `/mock/faults`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use bytes::Bytes;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, StatusCode, Uri};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::api::{Api, Like};
use crate::delta::{Delta, GenerateRequest};
use crate::engine::Engine;
use crate::extract::{HttpResult, RequestBody, SharedEngine, read};
use crate::failure::Failure;
use crate::fault::FaultSpec;
use crate::generate;
use crate::operator;
use crate::random::{hash, nth};
use crate::request::{Chat, Common, Completion, Embed, Encoding, MODEL_LEN_MAX, Rank, Respond, Talk, parsed};
use crate::shape::{AnswerKind, Shape};
use crate::text::Text;

const BODY_BYTES_MAX: usize = 64 << 20;

pub(crate) fn router(engine: Arc<Engine>, serves: &[Api], like: Like) -> Router {
    let own = Router::new()
        .route("/v1/models", get(models))
        .route("/metrics", get(metrics))
        .route("/mock/faults", get(faults).put(put_faults))
        .merge(operator::router(like));
    let served = Api::ALL.into_iter().filter(|api| serves.contains(api));
    let all = served.fold(own, |router, api| match api {
        Api::Completions => router.route("/v1/completions", post(completions)),
        Api::Chat => router.route("/v1/chat/completions", post(chat)),
        Api::Responses => router.route("/v1/responses", post(responses)),
        Api::Embeddings => router.route("/v1/embeddings", post(embeddings)),
        Api::Rerank => router.route("/v1/rerank", post(rerank)),
        Api::Messages => router.route("/v1/messages", post(messages)),
    });
    all.fallback(async |uri: Uri| {
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
        "id": engine.model(),
        "object": "model",
        "created": 0,
        "owned_by": "poorwill",
        "root": engine.model(),
        "parent": null,
        "max_model_len": MODEL_LEN_MAX,
    });
    Json(json!({ "object": "list", "data": [model] }))
}

async fn metrics(State(engine): SharedEngine) -> HttpResult {
    let text = engine.metrics().await?;
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn faults(State(engine): SharedEngine) -> Json<Vec<String>> {
    Json(engine.faults().names())
}

async fn put_faults(State(engine): SharedEngine, body: RequestBody) -> Result<Json<Vec<String>>, Failure> {
    let names: Vec<String> = parsed(&read(body)?)?;
    let specs: Result<Vec<FaultSpec>, _> = names.iter().map(|name| name.parse()).collect();
    engine.faults().replace(specs.map_err(|error| Failure::bad(error.to_string()))?);
    Ok(Json(engine.faults().names()))
}

async fn completions(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Completion = parsed(&body)?;
    request.common.check(engine.model())?;
    answer(
        &engine,
        AnswerKind::Completion,
        &request.common,
        request.generate_request()?,
        &id(&headers, &body),
    )
    .await
}

async fn chat(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Chat = parsed(&body)?;
    request.common.check(engine.model())?;
    answer(&engine, AnswerKind::Chat, &request.common, request.generate_request()?, &id(&headers, &body))
        .await
}

async fn responses(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Respond = parsed(&body)?;
    request.common.check(engine.model())?;
    answer(&engine, AnswerKind::Response, &request.common, request.generate_request()?, &id(&headers, &body))
        .await
}

async fn embeddings(State(engine): SharedEngine, body: RequestBody) -> HttpResult {
    let request: Embed = parsed(&read(body)?)?;
    request.common.check(engine.model())?;
    let (texts, tokens) = request.input.read("input")?;
    let sampled = generate::embed(&engine, tokens).await?;
    let embedding = |(index, text): (usize, &String)| {
        let numbers = Text::new(engine.model(), text).embedding(sampled);
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
    let list = json!({ "object": "list", "data": data, "model": engine.model(), "usage": usage });
    Ok(Json(list).into_response())
}

async fn messages(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Talk = parsed(&body)?;
    request.common.check(engine.model())?;
    answer(&engine, AnswerKind::Message, &request.common, request.generate_request()?, &id(&headers, &body))
        .await
}

async fn rerank(State(engine): SharedEngine, headers: HeaderMap, body: RequestBody) -> HttpResult {
    let body = read(body)?;
    let request: Rank = parsed(&body)?;
    request.common.check(engine.model())?;
    let (documents, tokens) = request.read()?;
    let sampled = generate::embed(&engine, tokens).await?;
    let scored = documents.iter().enumerate().map(|(index, document)| {
        let pair = Text::new(engine.model(), &format!("{}\n{document}", request.query));
        (index, document, pair.score(&request.query == document, sampled))
    });
    let mut scored: Vec<(usize, &String, f64)> = scored.collect();
    scored.sort_by(|one, other| other.2.total_cmp(&one.2));
    scored.truncate(request.top_n.unwrap_or(usize::MAX));
    let result = |(index, text, score): (usize, &String, f64)| json!({ "index": index, "document": { "text": text }, "relevance_score": score });
    let results: Vec<Value> = scored.into_iter().map(result).collect();
    let id = format!("rerank-{}", id(&headers, &body));
    let usage = json!({ "total_tokens": tokens });
    let ranked = json!({ "id": id, "model": engine.model(), "usage": usage, "results": results });
    Ok(Json(ranked).into_response())
}

/// Generates, and answers as a whole or as a stream.
async fn answer(
    engine: &Arc<Engine>,
    kind: AnswerKind,
    common: &Common,
    generation: GenerateRequest,
    id: &str,
) -> HttpResult {
    let shape = Shape::new(kind, id, engine.model(), generation.prompts.len(), generation.prompt_tokens)
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

/// The client's request identifier, or a hash of the body.
fn id(headers: &HeaderMap, body: &[u8]) -> String {
    let named = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let number = hash(body);
    named.map_or_else(|| format!("{number:016x}{:016x}", nth(number, 0)), str::to_owned)
}
