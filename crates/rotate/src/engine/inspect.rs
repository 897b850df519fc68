//! What a running engine reports of itself, before there is a configuration for it. Changes nothing.

use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::EngineError;
use super::http::Http;

/// An engine that loads its model answers late, or not at all.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// What an engine at some URL reports.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The names of its models in `/v1/models`, without adapters. Empty if it has no such list, or needs a key for it.
    pub models: Vec<String>,
    /// What `/is_sleeping` answers. `None` if there is no such path, so that the engine cannot sleep as it was started.
    pub is_sleeping: Option<bool>,
}

/// Asks the engine at `url`.
///
/// # Errors
/// If nothing there answers HTTP in time.
pub async fn inspect(url: &str) -> Result<Inspection, EngineError> {
    let request_line = format!("GET {url}/v1/models");
    let failed = |reason: String| EngineError::Unreachable { request_line: request_line.clone(), reason };
    let http = Http::new(url).map_err(failed)?;
    let asked = timeout(ANSWER_MAX, async {
        let models = http.get("/v1/models").await?.json().ok().flatten();
        let is_sleeping = match http.get("/is_sleeping").await {
            Ok(reply) => reply.json().ok().flatten().and_then(|body| body["is_sleeping"].as_bool()),
            Err(_) => None,
        };
        Ok(Inspection { models: models.as_ref().map(names).unwrap_or_default(), is_sleeping })
    });
    asked.await.unwrap_or_else(|_| Err(failed(format!("no answer within {} s", ANSWER_MAX.as_secs()))))
}

/// An adapter has the model that it belongs to as its parent.
fn names(list: &Value) -> Vec<String> {
    let all = list["data"].as_array().into_iter().flatten();
    let models = all.filter(|model| !model["parent"].is_string());
    models.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect()
}
