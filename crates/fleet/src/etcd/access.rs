//! Where an etcd is, and what it asks of its clients.

use http::Uri;
use poorwill_net::tls::ClientFiles;

use super::error::EtcdError;
use super::user::User;

/// The members' URLs, and what a client needs for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    endpoints: Vec<String>,
    tls: Option<ClientFiles>,
    user: Option<User>,
}

impl Access {
    /// For the members at these URLs, such as `http://10.0.0.1:2379`; at `https://` with files of TLS.
    ///
    /// # Errors
    /// [`EtcdError::Endpoint`] if there is none, or one cannot be used.
    pub fn new(
        endpoints: &[String],
        tls: Option<ClientFiles>,
        user: Option<User>,
    ) -> Result<Self, EtcdError> {
        if endpoints.is_empty() {
            return Err(wrong("", "name at least one member, such as http://127.0.0.1:2379"));
        }
        let checked = |endpoint: &String| checked(endpoint, tls.is_some());
        let endpoints = endpoints.iter().map(checked).collect::<Result<_, _>>()?;
        Ok(Self { endpoints, tls, user })
    }

    /// The members' URLs.
    #[must_use]
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// For `https://`.
    #[must_use]
    pub fn tls(&self) -> Option<&ClientFiles> {
        self.tls.as_ref()
    }

    pub(super) fn into_parts(self) -> (Vec<String>, Option<ClientFiles>, Option<User>) {
        (self.endpoints, self.tls, self.user)
    }
}

fn checked(endpoint: &str, has_tls: bool) -> Result<String, EtcdError> {
    if let Some((user, host)) = endpoint.rsplit_once('@') {
        // The message does not repeat what may be a password.
        let scheme = user.split_once("://").map_or("", |(scheme, _)| scheme);
        let shown = format!("{scheme}://…@{host}");
        return Err(wrong(&shown, "it has a user; name that by etcd_user and etcd_password instead"));
    }
    let url = endpoint.trim().trim_end_matches('/');
    let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| wrong(endpoint, &error.to_string()))?;
    let is_whole = uri.host().is_some() && uri.path() == "/";
    match uri.scheme_str() {
        Some("http") if has_tls => {
            Err(wrong(endpoint, "there is a CA for etcd; say https://, or leave etcd_ca out"))
        }
        Some("https") if !has_tls => {
            Err(wrong(endpoint, "it is https://, so name the CA of its certificate by etcd_ca"))
        }
        Some("http" | "https") if is_whole => Ok(url.to_owned()),
        _ => Err(wrong(endpoint, "say http://, a host and a port, or the same with https://")),
    }
}

fn wrong(endpoint: &str, reason: &str) -> EtcdError {
    EtcdError::Endpoint { endpoint: endpoint.to_owned(), reason: reason.to_owned() }
}
