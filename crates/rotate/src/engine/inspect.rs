//! What a running engine reports of itself, before there is a configuration for it. Changes nothing.

use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;

use super::contract::EngineError;
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// An engine that answers with these bodies, by path, and 404 otherwise.
    async fn engine(answers: &'static [(&'static str, &'static str)]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                let len = stream.read(&mut request).await.unwrap();
                let request = String::from_utf8_lossy(&request[..len]).into_owned();
                let answer = answers.iter().find(|(path, _)| request.starts_with(&format!("GET {path} ")));
                let (status, body) = answer.map_or((404, "{}"), |(_, body)| (200, *body));
                let head = format!(
                    "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all((head + body).as_bytes()).await.unwrap();
            }
        });
        url
    }

    #[tokio::test]
    async fn engines_are_asked_for_their_models_and_their_sleep() {
        let of = |models: &[&str], is_sleeping: Option<bool>| Inspection {
            models: models.iter().map(|name| (*name).to_owned()).collect(),
            is_sleeping,
        };
        let list =
            r#"{"data": [{"id": "a", "parent": null}, {"id": "lora", "parent": "a"}, {"id": "b"}, {}]}"#;
        let url = engine(&[("/v1/models", "no JSON"), ("/is_sleeping", "{\"is_sleeping\": \"no\"}")]).await;
        assert_eq!(inspect(&url).await, Ok(of(&[], None)));
        assert_eq!(names(&serde_json::from_str(list).unwrap()), ["a", "b"]);
        assert_eq!(names(&json!({ "error": "no key" })), [""; 0]);
        let url = engine(&[
            ("/v1/models", "{\"data\": [{\"id\": \"a\"}]}"),
            ("/is_sleeping", "{\"is_sleeping\": true}"),
        ])
        .await;
        assert_eq!(inspect(&url).await, Ok(of(&["a"], Some(true))));
        let url = engine(&[("/v1/models", "{\"data\": [{\"id\": \"a\"}]}")]).await;
        assert_eq!(inspect(&url).await, Ok(of(&["a"], None)));
    }

    #[tokio::test]
    async fn what_does_not_answer_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        for url in [url.as_str(), "https://127.0.0.1:1", "http://127.0.0.1"] {
            assert!(matches!(inspect(url).await, Err(EngineError::Unreachable { .. })), "{url}");
        }
    }
}
