//! What goes wrong between two ends, in sentences.

use std::io;
use std::path::Path;

use rustls::{AlertDescription, CertificateError, Error};

use super::files::ClientFiles;

/// Why a connection has no TLS, said from a client's side.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TlsFailure(String);

impl TlsFailure {
    /// For URLs that say `https://` where no CA is configured.
    pub(super) fn no_ca() -> io::Error {
        Self("TLS needs the CA of the server, and none is configured".to_owned())
            .into_error(io::ErrorKind::InvalidInput)
    }

    pub(super) fn no_name(host: &str) -> io::Error {
        Self(format!("`{host}` is no name that a certificate can have"))
            .into_error(io::ErrorKind::InvalidInput)
    }

    pub(super) fn late() -> io::Error {
        Self("it does not answer with TLS; does it speak TLS?".to_owned()).into_error(io::ErrorKind::TimedOut)
    }

    fn into_error(self, kind: io::ErrorKind) -> io::Error {
        io::Error::new(kind, self)
    }
}

/// The same, in words if it is of TLS. `is_new` is true until the server has sent data. With TLS 1.3, it refuses a client
/// only after the client has begun to write.
pub(super) fn explained(error: io::Error, files: &ClientFiles, is_new: bool) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    let kind = error.kind();
    let said = match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(of_tls) => sentence(of_tls, files),
        None if is_new && matches!(kind, BrokenPipe | ConnectionReset | UnexpectedEof) => {
            format!(
                "it closed the connection before any answer ({error}); {}",
                of_own(files, "it may refuse")
            )
        }
        None => return error,
    };
    TlsFailure(said).into_error(kind)
}

fn sentence(error: &Error, files: &ClientFiles) -> String {
    use CertificateError::{
        Expired, ExpiredContext, InvalidPurpose, InvalidPurposeContext, NotValidForName,
        NotValidForNameContext, NotValidYet, NotValidYetContext, UnknownIssuer,
    };
    match error {
        Error::InvalidCertificate(wrong) => match wrong {
            UnknownIssuer => format!("its certificate is of no CA in {}", shown(&files.ca)),
            Expired | ExpiredContext { .. } => format!("its certificate has expired ({error})"),
            NotValidYet | NotValidYetContext { .. } => format!("its certificate is not valid yet ({error})"),
            NotValidForName | NotValidForNameContext { .. } => {
                format!("its certificate has another name ({error})")
            }
            InvalidPurpose | InvalidPurposeContext { .. } => {
                format!(
                    "its certificate is not for servers; it needs the extended key usage serverAuth ({error})"
                )
            }
            _ => format!("its certificate cannot be used ({error})"),
        },
        Error::AlertReceived(AlertDescription::UnknownCA) => of_own(files, "it does not know the CA of"),
        Error::AlertReceived(AlertDescription::CertificateExpired) => of_own(files, "it finds expired"),
        Error::AlertReceived(
            alert @ (AlertDescription::BadCertificate
            | AlertDescription::CertificateRequired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::AccessDenied
            | AlertDescription::HandshakeFailure),
        ) => format!("{} ({alert:?})", of_own(files, "it refuses")),
        Error::InvalidMessage(_) => "it does not speak TLS; is it http://?".to_owned(),
        other => format!("TLS failed: {other}"),
    }
}

/// What it thinks of this process's certificate.
fn of_own(files: &ClientFiles, does: &str) -> String {
    match &files.identity {
        Some(identity) => {
            format!("{does} this process's certificate, {}", shown(&identity.certificate))
        }
        None => "it may ask for a certificate, and this process has none configured".to_owned(),
    }
}

fn shown(path: &Path) -> String {
    format!("`{}`", path.display())
}
