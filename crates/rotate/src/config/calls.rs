//! `[model.http]`: where an engine without an adapter says that it serves, and by which requests it sleeps and wakes.

use std::fmt;
use std::marker::PhantomData;

use http::{Method, Uri};
use poorwill_front::settings::SectionMistakes;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

const METHODS: [Method; 5] = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
/// As vLLM and llama.cpp name it.
const ASLEEP_AT: &str = "/is_sleeping";

/// The paths of an engine with an HTTP API of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpApi {
    /// Answers 2xx once the engine serves, awake or asleep.
    pub health: String,
    /// `None` for an engine that does not sleep.
    pub sleep: Option<SleepCalls>,
}

impl Default for HttpApi {
    fn default() -> Self {
        Self { health: "/health".to_owned(), sleep: None }
    }
}

/// How an engine sleeps and wakes. An answer of 2xx means that it is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SleepCalls {
    /// Releases its GPU memory.
    pub sleep: Call,
    /// Takes it again.
    pub wake: Call,
    /// Reports which of both came last, also if another program asked for it.
    pub asleep: AsleepCall,
}

/// One request.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    pub(crate) method: Method,
    /// With the query, if any.
    pub(crate) path: String,
    pub(crate) body: Option<Value>,
}

impl fmt::Debug for Call {
    /// Omits the body, which may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}

/// A request whose answer says whether the engine sleeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsleepCall {
    pub(crate) call: Call,
    /// A JSON pointer into the answer.
    pub(crate) at: String,
    /// What is there while it sleeps.
    pub(crate) is: Value,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawHttp {
    health: Option<String>,
    #[serde(default, deserialize_with = "call_or_table")]
    sleep: Option<RawCall>,
    #[serde(default, deserialize_with = "call_or_table")]
    wake: Option<RawCall>,
    #[serde(default, deserialize_with = "call_or_table")]
    asleep: Option<RawAsleep>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCall {
    call: String,
    body: Option<toml::Value>,
}

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAsleep {
    call: String,
    body: Option<toml::Value>,
    at: Option<String>,
    is: Option<toml::Value>,
}

impl From<String> for RawCall {
    fn from(call: String) -> Self {
        Self { call, ..Self::default() }
    }
}

impl From<String> for RawAsleep {
    fn from(call: String) -> Self {
        Self { call, ..Self::default() }
    }
}

/// Such as `"POST /sleep"`, or a table with that as its `call`.
fn call_or_table<'de, D: Deserializer<'de>, T: Deserialize<'de> + From<String>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    struct CallVisitor<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de> + From<String>> Visitor<'de> for CallVisitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a method and a path in quotes, like \"POST /sleep\", or a table with a `call`")
        }

        fn visit_str<E>(self, text: &str) -> Result<T, E> {
            Ok(T::from(text.to_owned()))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }
    deserializer.deserialize_any(CallVisitor(PhantomData)).map(Some)
}

impl RawHttp {
    /// Mistakes begin with the key.
    pub(super) fn checked(self, mistakes: &mut SectionMistakes<'_>) -> Option<HttpApi> {
        let health = self.health.unwrap_or_else(|| HttpApi::default().health);
        let is_right = mistakes.right(check_path(&health).map_err(|reason| format!("health {reason}")));
        let sleep = match (self.sleep, self.wake, self.asleep) {
            (None, None, None) => None,
            (Some(sleep), Some(wake), Some(asleep)) => {
                let sleep = mistakes.right(checked("sleep", &sleep.call, sleep.body));
                let wake = mistakes.right(checked("wake", &wake.call, wake.body));
                let asleep = mistakes.right(asleep.checked());
                Some(SleepCalls { sleep: sleep?, wake: wake?, asleep: asleep? })
            }
            (sleep, wake, asleep) => {
                let missing = match (sleep, wake, asleep) {
                    (None, ..) => "sleep = \"POST /sleep\"",
                    (_, None, _) => "wake = \"POST /wake\"",
                    _ => "asleep = \"GET /is_sleeping\", by which a service that starts knows its state",
                };
                mistakes
                    .add(format!("sleep, wake and asleep are needed together or not at all; say {missing}"));
                return None;
            }
        };
        is_right.map(|()| HttpApi { health, sleep })
    }
}

impl RawAsleep {
    fn checked(self) -> Result<AsleepCall, String> {
        let at = self.at.unwrap_or_else(|| ASLEEP_AT.to_owned());
        if !(at.is_empty() || at.starts_with('/')) {
            return Err(format!(
                "asleep has at = {at:?}; it begins with a /, such as \"/models\", or is empty for the whole answer"
            ));
        }
        let is = self.is.map_or(Ok(Value::Bool(true)), |is| json_of("asleep", is))?;
        Ok(AsleepCall { call: checked("asleep", &self.call, self.body)?, at, is })
    }
}

fn checked(key: &str, text: &str, body: Option<toml::Value>) -> Result<Call, String> {
    let (method, path) = text.split_once(' ').unwrap_or((text, ""));
    let Some(method) = METHODS.into_iter().find(|known| known.as_str() == method) else {
        return Err(format!(
            "{key} is {text:?}; say GET, POST, PUT, PATCH or DELETE and a path, such as \"POST /{key}\""
        ));
    };
    check_path(path).map_err(|reason| format!("the path of {key} {reason}"))?;
    let body = match body {
        None => None,
        Some(_) if method == Method::GET => {
            return Err(format!("{key} is a GET, which has no body; leave body out, or say POST"));
        }
        Some(body @ toml::Value::Table(_)) => Some(json_of(key, body)?),
        Some(_) => return Err(format!("{key} has a body that is no table; say body = {{ model = \"x\" }}")),
    };
    Ok(Call { method, path: path.to_owned(), body })
}

/// Refuses what JSON does not have.
fn json_of(key: &str, value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Boolean(is_so) => is_so.into(),
        toml::Value::Float(number) if number.is_finite() => number.into(),
        toml::Value::Float(number) => {
            return Err(format!("{key} has {number} in it, which JSON does not have; leave it out"));
        }
        toml::Value::Datetime(date) => {
            return Err(format!("{key} has {date} in it, which JSON does not have; write it in quotes"));
        }
        toml::Value::Array(all) => {
            all.into_iter().map(|one| json_of(key, one)).collect::<Result<Vec<_>, _>>()?.into()
        }
        toml::Value::Table(table) => {
            let entries = table.into_iter().map(|(name, one)| Ok((name, json_of(key, one)?)));
            Value::Object(entries.collect::<Result<_, String>>()?)
        }
    })
}

/// Accepts a path, and a query after it.
pub(super) fn check_path(path: &str) -> Result<(), String> {
    let is_path = path.starts_with('/') && !path.starts_with("//") && !path.contains('#');
    if is_path && path.parse::<Uri>().is_ok() {
        return Ok(());
    }
    Err(format!("is {path:?}; it begins with one /, and has no blanks"))
}
