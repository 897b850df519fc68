//! Certificates for tests of TLS, made anew in each of them.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod,
    PublicKeyData, SerialNumber, SignatureAlgorithm, SigningKey, date_time_ymd,
};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

/// For what a certificate may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Only as that of a server.
    Server,
    /// Only as that of a client.
    Client,
    /// As both.
    Both,
}

/// The files of a certificate and of its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// A certificate authority, and the folder of all that it has issued.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, Key>,
    issued: u64,
    /// Its own certificate, in PEM.
    pub ca: PathBuf,
}

#[derive(Debug)]
struct Key {
    pair: EcdsaKeyPair,
    pkcs8: Vec<u8>,
}

impl Key {
    fn new() -> Self {
        let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_ASN1_SIGNING);
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap().as_ref().to_vec();
        Self { pair: EcdsaKeyPair::from_pkcs8(algorithm, &pkcs8, &random).unwrap(), pkcs8 }
    }

    fn id(&self) -> KeyIdMethod {
        let hash = ring::digest::digest(&ring::digest::SHA256, self.der_bytes());
        KeyIdMethod::PreSpecified(hash.as_ref()[..20].to_vec())
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signed = self.pair.sign(&SystemRandom::new(), message);
        Ok(signed.map_err(|_| rcgen::Error::RemoteKeyError)?.as_ref().to_vec())
    }
}

impl Authority {
    /// With its files in this folder, where their names begin with `name`.
    ///
    /// # Panics
    /// If the folder cannot be written.
    #[must_use]
    pub fn new(folder: &Path, name: &str) -> Self {
        let key = Key::new();
        let mut of_itself = parameters(name, &[], 1);
        of_itself.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        of_itself.key_identifier_method = key.id();
        let ca = folder.join(format!("{name}.pem"));
        fs::write(&ca, pem("CERTIFICATE", of_itself.self_signed(&key).unwrap().der())).unwrap();
        Self { folder: folder.to_path_buf(), issuer: Issuer::new(of_itself, key), issued: 1, ca }
    }

    /// A certificate for these host names and addresses. It replaces one with the same file name.
    ///
    /// # Panics
    /// If the folder cannot be written.
    pub fn issue(&mut self, name: &str, hosts: &[&str], purpose: Use) -> Files {
        self.issue_until(name, hosts, purpose, 4000)
    }

    /// As [`issue`](Self::issue), for a time that ended long ago.
    ///
    /// # Panics
    /// See there.
    pub fn issue_expired(&mut self, name: &str, hosts: &[&str], purpose: Use) -> Files {
        self.issue_until(name, hosts, purpose, 2001)
    }

    fn issue_until(&mut self, name: &str, hosts: &[&str], purpose: Use, year: i32) -> Files {
        self.issued += 1;
        let mut parameters = parameters(name, hosts, self.issued);
        parameters.not_after = date_time_ymd(year, 1, 1);
        let (server, client) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        parameters.extended_key_usages = match purpose {
            Use::Server => vec![server],
            Use::Client => vec![client],
            Use::Both => vec![server, client],
        };
        let key = Key::new();
        let signed = parameters.signed_by(&key, &self.issuer).unwrap();
        let at = |ending: &str| self.folder.join(format!("{name}{ending}"));
        let files = Files { certificate: at(".pem"), key: at(".key.pem") };
        fs::write(&files.certificate, pem("CERTIFICATE", signed.der())).unwrap();
        fs::write(&files.key, pem("PRIVATE KEY", &key.pkcs8)).unwrap();
        files
    }
}

fn parameters(name: &str, hosts: &[&str], serial: u64) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut parameters = CertificateParams::new(hosts).unwrap();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters.not_before = date_time_ymd(2000, 1, 1);
    parameters.serial_number = Some(SerialNumber::from(serial));
    parameters.use_authority_key_identifier_extension = true;
    parameters
}

fn pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    for line in BASE64_STANDARD.encode(der).as_bytes().chunks(64) {
        let _ = writeln!(text, "{}", String::from_utf8_lossy(line));
    }
    text + &format!("-----END {label}-----\n")
}
