//! Certificates and keys, as their files are now.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::{self, PemObject as _};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A certificate, with those between it and its CA, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The certificate's file.
    pub certificate: PathBuf,
    /// The key's file.
    pub key: PathBuf,
}

/// What a client needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFiles {
    /// The CAs of servers.
    pub ca: PathBuf,
    /// What it shows to servers; `None` if they ask for nothing.
    pub identity: Option<Identity>,
}

/// What a server needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerFiles {
    /// What it shows to clients.
    pub identity: Identity,
    /// The CAs of clients; `None` if they need no certificate.
    pub clients_ca: Option<PathBuf>,
}

/// What a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// Certificates of CAs.
    Ca,
    /// A certificate.
    Certificate,
    /// A key.
    Key,
}

/// A file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{}`: {reason}", path.display())]
pub struct TlsError {
    /// What it is for.
    pub kind: FileKind,
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// A client's certificates. Clones share what they have read.
#[derive(Debug, Clone)]
pub struct ClientTls(Arc<Current<ClientFiles, ClientConfig>>);

impl ClientTls {
    /// Reads the files.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn new(files: ClientFiles) -> Result<Self, TlsError> {
        let paths = all(Some(&files.ca), files.identity.as_ref());
        Current::new(files, paths, client).map(|current| Self(Arc::new(current)))
    }

    /// Where they are.
    #[must_use]
    pub fn files(&self) -> &ClientFiles {
        &self.0.files
    }

    /// As the files are now. It reads them, if they have changed.
    #[must_use]
    pub fn config(&self) -> Arc<ClientConfig> {
        self.0.get()
    }
}

/// A server's certificates. Clones share what they have read.
#[derive(Debug, Clone)]
pub struct ServerTls(Arc<Current<ServerFiles, ServerConfig>>);

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn new(files: ServerFiles) -> Result<Self, TlsError> {
        let paths = all(files.clients_ca.as_deref(), Some(&files.identity));
        Current::new(files, paths, server).map(|current| Self(Arc::new(current)))
    }

    /// As the files are now. It reads them, if they have changed.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        self.0.get()
    }

    /// A connection with TLS over this one.
    ///
    /// # Errors
    /// The client speaks no TLS, or breaks off.
    pub async fn accept(&self, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config()).accept(tcp).await
    }
}

fn all(ca: Option<&Path>, identity: Option<&Identity>) -> Vec<PathBuf> {
    let of_identity = identity.into_iter().flat_map(|Identity { certificate, key }| [&**certificate, &**key]);
    ca.into_iter().chain(of_identity).map(Path::to_path_buf).collect()
}

/// What was made of files, until they change.
struct Current<F, C> {
    files: F,
    paths: Vec<PathBuf>,
    make: fn(&F) -> Result<C, TlsError>,
    made: Mutex<(Vec<Option<Mark>>, Arc<C>)>,
}

/// Other contents have another one.
type Mark = (u64, u64, i64, i64, u64);

fn marks(paths: &[PathBuf]) -> Vec<Option<Mark>> {
    let mark = |of: Metadata| (of.dev(), of.ino(), of.mtime(), of.mtime_nsec(), of.len());
    paths.iter().map(|path| fs::metadata(path).ok().map(mark)).collect()
}

impl<F, C> Current<F, C> {
    fn new(files: F, paths: Vec<PathBuf>, make: fn(&F) -> Result<C, TlsError>) -> Result<Self, TlsError> {
        // First, so that a change while they are read is seen later.
        let marks = marks(&paths);
        let made = Mutex::new((marks, Arc::new(make(&files)?)));
        Ok(Self { files, paths, make, made })
    }

    fn get(&self) -> Arc<C> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let marks = marks(&self.paths);
        if made.0 != marks {
            made.0 = marks;
            match (self.make)(&self.files) {
                Ok(new) => {
                    tracing::info!(files = ?self.paths, "reloaded certificates");
                    made.1 = Arc::new(new);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot use new certificates; keeping the last ones");
                }
            }
        }
        Arc::clone(&made.1)
    }
}

impl<F: fmt::Debug, C> fmt::Debug for Current<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

/// The algorithms. The process's default is left to others.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn client(files: &ClientFiles) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider());
    let builder =
        builder.with_safe_default_protocol_versions().map_err(|error| ca_error(&files.ca, &error))?;
    let builder = builder.with_root_certificates(roots(&files.ca)?);
    let mut config = match &files.identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let (certificates, key) = read_identity(identity)?;
            let made = builder.with_client_auth_cert(certificates, key);
            made.map_err(|error| identity_error(identity, &error))?
        }
    };
    // A resumed session is not verified again.
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn server(files: &ServerFiles) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider());
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|error| identity_error(&files.identity, &error))?;
    let verifier: Arc<dyn ClientCertVerifier> = match &files.clients_ca {
        None => WebPkiClientVerifier::no_client_auth(),
        Some(ca) => {
            let roots = Arc::new(roots(ca)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            verifier.map_err(|error| ca_error(ca, &error))?
        }
    };
    let (certificates, key) = read_identity(&files.identity)?;
    let made = builder.with_client_cert_verifier(verifier).with_single_cert(certificates, key);
    let mut config = made.map_err(|error| identity_error(&files.identity, &error))?;
    // A resumed session is not verified again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(FileKind::Ca, path)? {
        roots.add(certificate).map_err(|error| ca_error(path, &error))?;
    }
    Ok(roots)
}

fn read_identity(
    identity: &Identity,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
    Ok((certificates(FileKind::Certificate, &identity.certificate)?, key(&identity.key)?))
}

fn certificates(kind: FileKind, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(kind, path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.map_err(|error| wrong(kind, path, &not_pem(&error)))?;
    if all.is_empty() {
        return Err(wrong(kind, path, "it has no certificate; PEM has one behind BEGIN CERTIFICATE"));
    }
    Ok(all)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(FileKind::Key, path)?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| {
        let is_locked = text.windows(9).any(|nine| nine == b"ENCRYPTED");
        let reason = match error {
            pem::Error::NoItemsFound if is_locked => {
                "its key has a passphrase; store it without one".to_owned()
            }
            pem::Error::NoItemsFound => "it has no key; PEM has one behind BEGIN PRIVATE KEY".to_owned(),
            error => not_pem(&error),
        };
        wrong(FileKind::Key, path, &reason)
    })
}

fn read(kind: FileKind, path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|error: io::Error| wrong(kind, path, &error.to_string()))
}

/// Without what it read, which may be a key.
fn not_pem(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => {
            "it is no PEM: an END line is missing; is it whole?".to_owned()
        }
        pem::Error::Base64Decode(_) => {
            "it is no PEM: there is other text than base64 between its lines".to_owned()
        }
        _ => "it is no PEM".to_owned(),
    }
}

fn ca_error(path: &Path, error: &dyn fmt::Display) -> TlsError {
    wrong(FileKind::Ca, path, &format!("a certificate in it cannot be used: {error}"))
}

fn identity_error(identity: &Identity, error: &rustls::Error) -> TlsError {
    let (certificate, key) = (&identity.certificate, &identity.key);
    match error {
        rustls::Error::InconsistentKeys(_) => {
            let reason = format!("it is not the key of the certificate in `{}`", certificate.display());
            wrong(FileKind::Key, key, &reason)
        }
        rustls::Error::General(reason) => {
            wrong(FileKind::Key, key, &format!("its key cannot be used: {reason}"))
        }
        error => {
            wrong(FileKind::Certificate, certificate, &format!("its certificate cannot be used: {error}"))
        }
    }
}

fn wrong(kind: FileKind, path: &Path, reason: &str) -> TlsError {
    TlsError { kind, path: path.to_path_buf(), reason: reason.to_owned() }
}
