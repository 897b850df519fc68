//! Which of a fleet's stores counts: the first one in the list that can be reached.
//!
//! A store asks those before it every second. While one of them serves, it refuses. Once none has for some looks, more the
//! later it is in the list, it serves, empty and as a new cluster. It finds itself in the list by its random instance. One that is not in the list, or cannot
//! reach itself, serves while no other one in the list does.

use std::io::{self, Read as _};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use poorwill_net::client::{connector, read, request};
use poorwill_net::tls::{ClientTls, Connector};
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use super::serve::StoreService;
use crate::etcd::Access;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// For one to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
const ANSWER_MAX_BYTES: usize = 4096;
/// Looks at which none before it serves, for each of them. So they do not begin together.
const LOOKS_MIN: usize = 2;

/// What `/health` says. An etcd has no instance.
#[derive(Deserialize)]
struct Health {
    health: String,
    #[serde(default)]
    instance: String,
}

/// A random number, as for a token.
///
/// # Errors
/// The system has none.
pub fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

/// A random number for a cluster or an instance, never 0.
///
/// # Errors
/// As [`random`].
pub fn random_id() -> io::Result<u64> {
    Ok(u64::try_from(random()? >> 64).unwrap_or(1).max(1))
}

/// Has a store serve or refuse, as the others of its list do, for ever. One that is alone in it serves at once.
///
/// # Errors
/// A certificate for asking the others cannot be used, or no random number be read.
pub async fn follow(service: &StoreService, stores: &Access) -> io::Result<()> {
    let tls = stores.tls().cloned().map(ClientTls::new).transpose().map_err(io::Error::other)?;
    let client = Client::builder(TokioExecutor::new()).build(connector(ANSWER_MAX, tls));
    let stores = stores.endpoints();
    if stores.len() == 1 {
        service.keep(random_id()?);
        return std::future::pending().await;
    }
    let mut alone = 0;
    loop {
        match look(&client, stores, service.instance()).await {
            Serves::Other(url) => {
                alone = 0;
                service.defer_to(url);
            }
            Serves::NoOther { before } => {
                alone += 1;
                if alone > LOOKS_MIN * before {
                    service.keep(random_id()?);
                }
            }
        }
        sleep(LOOK_EVERY).await;
    }
}

enum Serves<'a> {
    Other(&'a str),
    NoOther { before: usize },
}

type HealthClient = Client<Connector, Full<Bytes>>;

async fn look<'a>(client: &HealthClient, stores: &'a [String], instance: u64) -> Serves<'a> {
    let own = instance.to_string();
    for (nth, url) in stores.iter().enumerate() {
        match timeout(ANSWER_MAX, ask(client, url)).await.ok().flatten() {
            Some(health) if health.instance == own => return Serves::NoOther { before: nth },
            Some(health) if health.health == "true" => return Serves::Other(url),
            _ => {}
        }
    }
    Serves::NoOther { before: stores.len() }
}

async fn ask(client: &HealthClient, url: &str) -> Option<Health> {
    let request = request(&Method::GET, &format!("{}/health", url.trim_end_matches('/')), None).ok()?;
    let answer = client.request(request).await.ok()?;
    serde_json::from_slice(&read(answer.into_body(), ANSWER_MAX_BYTES).await.bytes).ok()
}
