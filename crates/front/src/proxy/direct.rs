//! Requests that do not name their model in a body: for stored responses, for what is read, WebSockets, and engines' own
//! pages.

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, header};

use super::api_error::ApiError;
use super::path::{check_path, climbs};
use super::stored::{RESPONSES, StoredResponses};
use super::{query, websocket};
use crate::affinity::Affinity;
use crate::backend::{Backend, Route};
use crate::settings;
use crate::settings::paths::{self, decoded};

/// Where the paths of engines are.
const ENGINES: &str = "/engines/";
/// Most segments of a model's name.
const SEGMENTS_MAX: usize = 8;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Direct {
    /// For the response of this identifier.
    Stored(String),
    WebSocket,
    /// Reads what is at a path of the model that the query names.
    Read,
    /// For a path of an engine.
    Engine {
        is_websocket: bool,
    },
}

/// Where such a request goes.
#[derive(Debug)]
pub(super) struct EngineTarget {
    pub(super) route: Route,
    /// Of the engine.
    pub(super) path: PathAndQuery,
    /// What precedes the engine's path in the client's.
    pub(super) base: Option<String>,
}

/// What to do with such a request.
#[derive(Debug)]
pub(super) enum Directed {
    To(EngineTarget),
    /// To the same path with a slash, so that a page's relative links lead below it.
    Slash(HeaderValue),
}

impl Direct {
    /// `None` for other requests.
    pub(super) fn of(parts: &Parts, front: &settings::Front) -> Result<Option<Self>, ApiError> {
        let path = parts.uri.path();
        let is_websocket = websocket::is_offered(&parts.headers);
        if path.starts_with(ENGINES) {
            return if front.passthrough {
                Ok(Some(Self::Engine { is_websocket }))
            } else {
                Err(ApiError::no_passthrough())
            };
        }
        if is_websocket {
            let is_path = path.strip_prefix('/').is_some_and(|rest| check_path(rest).is_ok());
            let is_open = path == websocket::REALTIME || paths::is_own(path, &front.paths);
            return if is_path && is_open {
                Ok(Some(Self::WebSocket))
            } else {
                Err(ApiError::no_websocket())
            };
        }
        if path == websocket::REALTIME && !paths::is_own(path, &front.paths) {
            return Err(ApiError::upgrade_required("this path is for WebSockets"));
        }
        let is_reading = parts.method == Method::GET || parts.method == Method::HEAD;
        if is_reading && paths::is_readable(path, &front.paths) {
            check_path(path.strip_prefix('/').unwrap_or_default())?;
            return Ok(Some(Self::Read));
        }
        stored_id(&parts.method, path).map(|id| id.map(Self::Stored))
    }

    pub(super) fn is_websocket(&self) -> bool {
        matches!(self, Self::WebSocket | Self::Engine { is_websocket: true })
    }

    pub(super) fn resolve(
        &self,
        path: PathAndQuery,
        parts: &Parts,
        backend: &dyn Backend,
        stored: &StoredResponses,
        owner: Option<&str>,
    ) -> Result<Directed, ApiError> {
        if self.is_websocket() {
            websocket::check(parts)?;
        }
        match self {
            Self::Stored(id) => {
                let route = stored.maker_of(id, owner).and_then(|(name, place)| {
                    backend.route_of_model(&name, Affinity { place: Some(place), key: None })
                });
                let route = route.ok_or_else(|| ApiError::no_response(id))?;
                Ok(Directed::To(EngineTarget { route, path, base: None }))
            }
            Self::WebSocket | Self::Read => {
                let name = query::model_of(path.query())?;
                let route = backend.route(&name, Affinity::default());
                let route = route.ok_or_else(|| ApiError::no_model(&name, &backend.listed()))?;
                let path = if route.served_as == name {
                    Some(path)
                } else {
                    query::with_model(&path, &route.served_as)
                };
                let path = path.ok_or_else(ApiError::no_path)?;
                Ok(Directed::To(EngineTarget { route, path, base: None }))
            }
            Self::Engine { .. } => {
                let directed = engine_path(&path, backend)?;
                if let Directed::To(to) = &directed
                    && is_of_page(parts)
                    && !backend.listed().iter().any(|model| model.name == to.route.name && model.is_ready)
                {
                    return Err(ApiError::not_ready(&to.route.name));
                }
                Ok(directed)
            }
        }
    }
}

/// `None` if the path is not that of a stored response.
fn stored_id(method: &Method, path: &str) -> Result<Option<String>, ApiError> {
    let rest = path.strip_prefix(RESPONSES).and_then(|rest| rest.strip_prefix('/'));
    let Some(rest) = rest.filter(|rest| check_path(rest).is_ok()) else { return Ok(None) };
    let is_reading = *method == Method::GET || *method == Method::HEAD;
    let (id, allowed, is_allowed) = match rest.split_once('/') {
        // Other clients post a body with a model below this path.
        None if *method == Method::POST => return Ok(None),
        // A browser's question before a request is answered elsewhere.
        _ if *method == Method::OPTIONS => return Ok(None),
        None => (rest, "GET, HEAD, DELETE, POST", is_reading || *method == Method::DELETE),
        Some((id, "input_items")) => (id, "GET, HEAD", is_reading),
        Some((id, "cancel")) => (id, "POST", *method == Method::POST),
        Some(_) => return Ok(None),
    };
    if is_allowed { Ok(Some(id.to_owned())) } else { Err(ApiError::no_method(allowed)) }
}

/// The longest beginning that is a model's name decides. Slashes in it may be encoded.
fn engine_path(path: &PathAndQuery, backend: &dyn Backend) -> Result<Directed, ApiError> {
    let rest = path.path().strip_prefix(ENGINES).unwrap_or_default();
    let slashes = rest.match_indices('/').map(|(at, _)| at).chain([rest.len()]).take(SEGMENTS_MAX);
    let ends: Vec<usize> = slashes.collect();
    let found = ends.iter().rev().find_map(|end| {
        let name = decoded(&rest[..*end])?;
        Some((*end, backend.route(&name, Affinity::default())?))
    });
    let Some((end, route)) = found else {
        let name = ends.first().and_then(|end| decoded(&rest[..*end])).unwrap_or_default();
        return Err(ApiError::no_model(&name, &backend.listed()));
    };
    let query = path.query().map(|query| format!("?{query}")).unwrap_or_default();
    let base = format!("{ENGINES}{}", &rest[..end]);
    let bad = || ApiError::bad("the path is no path of an engine");
    if end == rest.len() {
        let there = HeaderValue::try_from(format!("{base}/{query}"));
        return there.map(Directed::Slash).map_err(|_| bad());
    }
    if climbs(&rest[end..]) {
        return Err(ApiError::bad("a path of an engine has no `.` and `..`, also not encoded"));
    }
    let path = format!("{}{query}", &rest[end..]).parse().map_err(|_| bad())?;
    Ok(Directed::To(EngineTarget { route, path, base: Some(base) }))
}

/// Whether an open page asks by itself: for its parts, or again and again. Such requests wake no model, or a forgotten tab
/// would keep it awake.
fn is_of_page(parts: &Parts) -> bool {
    let is_reading = parts.method == Method::GET || parts.method == Method::HEAD;
    let mode = parts.headers.get("sec-fetch-mode");
    is_reading && mode.is_some_and(|mode| mode.as_bytes() != b"navigate")
}

/// Leads redirects of an engine to the paths that clients use.
pub(super) fn rebase(headers: &mut HeaderMap, base: &str, url: &str) {
    let there = headers.get(header::LOCATION).and_then(|there| there.to_str().ok());
    let path = there.map(|there| there.strip_prefix(url).unwrap_or(there));
    let path = path.filter(|path| path.starts_with('/') && !path.starts_with("//"));
    if let Some(there) = path.and_then(|path| HeaderValue::try_from(format!("{base}{path}")).ok()) {
        headers.insert(header::LOCATION, there);
    }
}
