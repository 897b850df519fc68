//! The keys of TLS: files of certificates, and of their keys.

use std::path::PathBuf;

use poorwill_net::tls::{ClientFiles, ClientTls, FileKind, Identity, ServerFiles, ServerTls, TlsError};

/// What a client needs, from the keys that begin with `prefix`. The files are read, so that a mistake is seen now.
///
/// # Errors
/// What is missing, or wrong with a file.
pub fn client_files(
    prefix: &str,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<ClientFiles>, String> {
    let identity = identity(prefix, certificate, key)?;
    let Some(ca) = ca else {
        return match identity {
            None => Ok(None),
            Some(_) => Err(format!(
                "{prefix}certificate is for TLS, and {prefix}ca is missing, by which the server is verified; name its file"
            )),
        };
    };
    let files = ClientFiles { ca, identity };
    ClientTls::new(files.clone()).map_err(|error| named(prefix, "ca", &error))?;
    Ok(Some(files))
}

/// What a server needs, as [`client_files`].
///
/// # Errors
/// As there.
pub fn server_files(
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    clients_ca: Option<PathBuf>,
) -> Result<Option<ServerFiles>, String> {
    let Some(identity) = identity("", certificate, key)? else {
        return match clients_ca {
            None => Ok(None),
            Some(_) => Err(
                "clients_ca is for TLS, and certificate and certificate_key are missing; name their files"
                    .to_owned(),
            ),
        };
    };
    let files = ServerFiles { identity, clients_ca };
    ServerTls::new(files.clone()).map_err(|error| named("", "clients_ca", &error))?;
    Ok(Some(files))
}

fn identity(
    prefix: &str,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
) -> Result<Option<Identity>, String> {
    match (certificate, key) {
        (Some(certificate), Some(key)) => Ok(Some(Identity { certificate, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(format!("{prefix}certificate needs {prefix}certificate_key; name its file")),
        (None, Some(_)) => Err(format!("{prefix}certificate_key needs {prefix}certificate; name its file")),
    }
}

/// Begins with the key whose file it is.
fn named(prefix: &str, ca: &str, error: &TlsError) -> String {
    let key = match error.kind {
        FileKind::Ca => ca,
        FileKind::Certificate => "certificate",
        FileKind::Key => "certificate_key",
    };
    format!("{prefix}{key}: {error}")
}
