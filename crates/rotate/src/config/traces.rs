//! The export of traces.

use std::collections::BTreeMap;

use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use poorwill_front::file::{ConfigError, Secret, invalid};
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
    pub(super) fn checked(self, secret: Secret<'_>) -> Result<TraceExport, ConfigError> {
        let invalid = |reason: &str| invalid("traces", reason);
        let endpoint = self.endpoint.ok_or_else(|| {
            invalid(&format!("endpoint is missing; say endpoint = \"{EXAMPLE}\", or leave out [traces]"))
        })?;
        check_endpoint(&endpoint)
            .map_err(|reason| invalid(&format!("endpoint {reason}; say \"{EXAMPLE}\"")))?;
        let sample = self.sample.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&sample) {
            return Err(invalid(&format!("sample is {sample}; say a share of requests from 0 to 1")));
        }
        let service = self.service.unwrap_or_else(|| "poorwill".to_owned());
        if service.trim().is_empty() {
            return Err(invalid("service is empty; leave it out, or say a name"));
        }
        let mut headers = HeaderMap::new();
        for (name, source) in &self.headers {
            let failed = |reason: &str| invalid(&format!("the header {name:?} of headers {reason}"));
            let known: HeaderName = name.parse().map_err(|_| failed("has no valid name"))?;
            if [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::HOST].contains(&known) {
                return Err(failed("is set by the exporter; leave it out"));
            }
            let value = secret(source).map_err(|reason| failed(&format!("has no value: {reason}")))?;
            let mut value = HeaderValue::from_str(value.trim())
                .map_err(|_| failed("has a value that no header can have"))?;
            value.set_sensitive(true);
            headers.insert(known, value);
        }
        Ok(TraceExport { endpoint, sample, service, headers })
    }
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
