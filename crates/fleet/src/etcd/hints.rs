//! What may be done about a refusal of etcd's, where its own words do not say it.

/// gRPC's code of what is not permitted.
const DENIED: u32 = 7;
/// gRPC's code of what cannot be reached.
const UNAVAILABLE: u32 = 14;
/// In the answer of a gateway that takes no certificate with a name.
pub(super) const COMMON_NAME: &str = "CommonName of client sending a request against gateway";

/// etcd's words, and what would help.
pub(super) fn hinted(endpoint: &str, message: String, code: u32) -> String {
    let hint = if message.contains("user name is empty") {
        "etcd has users: name one by etcd_user and etcd_password".to_owned()
    } else if message.contains("authentication failed") {
        "look at etcd_user and etcd_password".to_owned()
    } else if code == DENIED {
        "etcd_user needs a role that permits readwrite for the prefix /poorwill/".to_owned()
    } else if is_of_gateway(endpoint, &message, code) {
        format!(
            "the gateway of {endpoint} cannot reach its own etcd, to which it shows the certificate of --cert-file: with \
             --client-cert-auth, that has to be of a CA in --trusted-ca-file, for serverAuth and clientAuth"
        )
    } else {
        return message;
    };
    format!("{message}; {hint}")
}

/// A gateway is a client of its own member, and that refuses it if its certificate is only a server's.
fn is_of_gateway(endpoint: &str, message: &str, code: u32) -> bool {
    // What is refused by etcd, or by a store that waits for another one, was reached.
    let is_reached = message.starts_with("etcdserver:") || message.starts_with("unavailable: ");
    code == UNAVAILABLE && endpoint.starts_with("https://") && !is_reached
}
