//! TLS by certificates in PEM files, for clients and servers.
//!
//! Promises:
//!
//! - A server's certificate is verified against the CA of the configuration and the host of the URL. There is no other
//!   list of CAs. Both ends' certificates are verified anew for each connection.
//! - Files that have changed are read again for the next connection. New ones that cannot be used leave the last ones in
//!   use, with a warning.
//! - An error names the file, and what is wrong with it.

mod connect;
mod failure;
mod files;

pub use self::connect::{Connector, Secured, Stream};
pub use self::failure::TlsFailure;
pub use self::files::{ClientFiles, ClientTls, FileKind, Identity, ServerFiles, ServerTls, TlsError};
