//! The model in a query, for requests that name none in a body.

use http::uri::PathAndQuery;

use super::api_error::ApiError;
use crate::settings::paths::decoded;

/// The model of a query.
pub(super) fn model_of(query: Option<&str>) -> Result<String, ApiError> {
    let mut names = query.unwrap_or_default().split('&').filter_map(model_in);
    let missing = || ApiError::bad_model("this request names its model in the query, as in ?model=NAME");
    let name = names.next().filter(|_| names.next().is_none()).ok_or_else(missing)?;
    let name = decoded(&name.replace('+', " ")).filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::bad_model("the model in the query is empty, or not encoded rightly"))
}

/// Whether a query names a model at all.
pub(super) fn has_model(query: Option<&str>) -> bool {
    query.unwrap_or_default().split('&').any(|pair| model_in(pair).is_some())
}

/// The path for an engine that calls its model by another name.
pub(super) fn with_model(path: &PathAndQuery, name: &str) -> Option<PathAndQuery> {
    let encoded = || format!("model={}", encoded(name));
    let query = path.query().unwrap_or_default().split('&');
    let query: Vec<String> =
        query.map(|one| if model_in(one).is_some() { encoded() } else { one.to_owned() }).collect();
    format!("{}?{}", path.path(), query.join("&")).parse().ok()
}

fn model_in(pair: &str) -> Option<&str> {
    pair.strip_prefix("model=").or_else(|| (pair == "model").then_some(""))
}

/// For a query.
fn encoded(text: &str) -> String {
    let of = |byte: u8| {
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
        if is_plain { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    };
    text.bytes().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_in_the_query_once() {
        for (query, wanted) in [
            ("model=a", "a"),
            ("x=1&model=org%2Fone&y=2", "org/one"),
            ("model=org/one", "org/one"),
            ("model=a+b%20c", "a b c"),
        ] {
            assert_eq!(model_of(Some(query)).ok().as_deref(), Some(wanted), "{query}");
        }
        for query in ["", "x=1", "model", "model=", "model=a&model=a", "model=%ff", "model=%", "models=a"] {
            assert!(model_of(Some(query)).is_err(), "{query}");
        }
        let path = PathAndQuery::from_static("/v1/realtime?x=%20&model=a&y");
        let renamed = with_model(&path, "/m/\"b\" &c").unwrap();
        assert_eq!(renamed, "/v1/realtime?x=%20&model=/m/%22b%22%20%26c&y");
        assert_eq!(model_of(renamed.query()).ok().as_deref(), Some("/m/\"b\" &c"));
    }
}
