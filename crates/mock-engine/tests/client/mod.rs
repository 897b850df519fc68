//! A plain client for the tests: no proxy, no redirects, no retries.

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;
use serde_json::Value;

type Inner = legacy::Client<HttpConnector, Full<Bytes>>;

/// Each request has its own connection.
pub(crate) struct Client(Inner);

/// A request to send.
pub(crate) struct RequestBuilder {
    client: Inner,
    request: Request<Full<Bytes>>,
}

/// A response whose body has not arrived yet.
#[derive(Debug)]
pub(crate) struct Response {
    status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
}

impl Client {
    pub(crate) fn new() -> Self {
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        Self(builder.pool_max_idle_per_host(0).retry_canceled_requests(false).build_http())
    }

    pub(crate) fn request(&self, method: Method, url: &str) -> RequestBuilder {
        let mut request = Request::new(Full::default());
        *request.method_mut() = method;
        *request.uri_mut() = url.parse().unwrap();
        RequestBuilder { client: self.0.clone(), request }
    }
}

impl RequestBuilder {
    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        *self.request.body_mut() = Full::new(body.into());
        self
    }

    pub(crate) fn json(self, value: &Value) -> Self {
        self.header("content-type", "application/json").body(value.to_string())
    }

    pub(crate) fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.request.headers_mut().insert(name, header::HeaderValue::from_static(value));
        self
    }

    pub(crate) async fn send(self) -> Result<Response, legacy::Error> {
        let (parts, body) = self.client.request(self.request).await?.into_parts();
        Ok(Response { status: parts.status, headers: parts.headers, body })
    }
}

impl Response {
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The next part of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, hyper::Error> {
        match self.body.frame().await {
            Some(frame) => frame.map(|frame| frame.into_data().ok()),
            None => Ok(None),
        }
    }

    pub(crate) async fn bytes(self) -> Bytes {
        self.body.collect().await.unwrap().to_bytes()
    }

    pub(crate) async fn text(self) -> String {
        String::from_utf8(self.bytes().await.to_vec()).unwrap()
    }

    pub(crate) async fn json<T: DeserializeOwned>(self) -> T {
        serde_json::from_slice(&self.bytes().await).unwrap()
    }
}
