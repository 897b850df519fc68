//! The export of traces.

use std::collections::BTreeMap;

use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use poorwill_front::file::Secret;
use poorwill_front::settings::SectionMistakes;
use serde::Deserialize;

const EXAMPLE: &str = "http://127.0.0.1:4318/v1/traces";

/// Where traces are exported to.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceExport {
    /// `http://`, host, port, and path of an OTLP collector.
    pub endpoint: String,
    /// Share of requests that are traced, from 0 to 1. A client's decision comes first.
    pub sample: f64,
    /// The name of this service in traces.
    pub service: String,
    /// Additional headers, marked as sensitive.
    pub(crate) headers: HeaderMap,
}

/// The share is a number: the check refuses others.
impl Eq for TraceExport {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTraces {
    endpoint: Option<String>,
    sample: Option<f64>,
    service: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

impl RawTraces {
    /// `None` only with a mistake.
    pub(super) fn checked(
        self,
        secret: Secret<'_>,
        mistakes: &mut SectionMistakes<'_>,
    ) -> Option<TraceExport> {
        let endpoint = match self.endpoint {
            Some(endpoint) => check_endpoint(&endpoint)
                .map_err(|reason| format!("endpoint {reason}; say \"{EXAMPLE}\""))
                .map(|()| endpoint),
            None => Err(format!("endpoint is missing; say endpoint = \"{EXAMPLE}\", or leave out [traces]")),
        };
        let endpoint = mistakes.right(endpoint);
        let sample = self.sample.unwrap_or(1.0);
        mistakes.add_if(
            !(0.0..=1.0).contains(&sample),
            format!("sample is {sample}; say a share of requests from 0 to 1"),
        );
        let service = self.service.unwrap_or_else(|| "poorwill".to_owned());
        mistakes.add_if(service.trim().is_empty(), "service is empty; leave it out, or say a name");
        let header = |(name, source): (&String, &String)| {
            let checked = checked_header(name, source, secret);
            mistakes.right(checked.map_err(|reason| format!("the header {name:?} of headers {reason}")))
        };
        let headers = self.headers.iter().filter_map(header).collect();
        Some(TraceExport { endpoint: endpoint?, sample, service, headers })
    }
}

fn checked_header(name: &str, source: &str, secret: Secret<'_>) -> Result<(HeaderName, HeaderValue), String> {
    let known: HeaderName = name.parse().map_err(|_| "has no valid name".to_owned())?;
    if [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::HOST].contains(&known) {
        return Err("is set by the exporter; leave it out".to_owned());
    }
    let value = secret(source).map_err(|reason| format!("has no value: {reason}"))?;
    let value = HeaderValue::from_str(value.trim());
    let mut value = value.map_err(|_| "has a value that no header can have".to_owned())?;
    value.set_sensitive(true);
    Ok((known, value))
}

/// The message does not repeat the address, which may contain a password.
fn check_endpoint(endpoint: &str) -> Result<(), &'static str> {
    let uri: Uri = endpoint.parse().map_err(|_| "is no address")?;
    if uri.scheme() != Some(&Scheme::HTTP) {
        return Err("has to begin with http://, as of a collector on this machine that sends on by TLS");
    }
    let has_port = uri.authority().is_some_and(|place| place.port_u16().is_some_and(|port| port > 0));
    if !has_port || endpoint.contains(['@', '#']) {
        return Err("has to have a host and a port, and no password");
    }
    if uri.path() == "/" {
        return Err("has no path");
    }
    Ok(())
}
