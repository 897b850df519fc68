//! Which nodes a router sends requests to, and with them its key.
//!
//! Promise: a router that has a key sends nothing to one who can write to etcd and has no key. The address may not be one
//! that a node had before.

use poorwill_fleet::name::{FleetName, NodeName};
use poorwill_fleet::records::NodeRecord;
use poorwill_front::settings;

/// What a node has to show.
#[derive(Debug, Clone, Default)]
pub(super) struct Trust {
    /// The router's key, by which the node has to have signed its address.
    pub(super) key: Option<settings::Key>,
    /// Whether it has to be reached by TLS.
    pub(super) has_tls: bool,
}

impl Trust {
    /// Why nothing is sent there, if so.
    pub(super) fn problem(
        &self,
        fleet: &FleetName,
        node: &NodeName,
        record: &NodeRecord,
        lease: i64,
    ) -> Option<&'static str> {
        let text = record.signed_text(fleet, node, lease);
        let has_signed = |key: &settings::Key| key.has_signed(&text, &record.signatures);
        if self.has_tls && !record.front_url.starts_with("https://") {
            return Some("its front has no https://, so nothing is sent there");
        }
        let is_signed = self.key.as_ref().is_none_or(has_signed);
        (!is_signed).then_some("its address is not signed with node_key, so nothing is sent there")
    }
}

#[test]
fn an_address_is_signed_for_one_node_of_one_fleet() {
    let key = settings::Key::new("a-key", None).unwrap();
    let trust = Trust { key: Some(key.clone()), has_tls: false };
    let [fleet, other_fleet]: [FleetName; 2] = ["prod", "test"].map(|name| name.parse().unwrap());
    let [node, other_node]: [NodeName; 2] = ["gpu-1", "gpu-2"].map(|name| name.parse().unwrap());
    let mut record = NodeRecord { front_url: "http://gpu-1:8080".to_owned(), ..NodeRecord::new("5f0c") };
    // Without a key there is nothing to lose.
    assert_eq!(Trust::default().problem(&fleet, &node, &record, 7), None);
    assert!(trust.problem(&fleet, &node, &record, 7).is_some_and(|why| why.contains("not signed")));
    let text = record.signed_text(&fleet, &node, 7);
    record.signatures =
        vec![settings::Key::new("another", None).unwrap().signature(&text), key.signature(&text)];
    assert_eq!(trust.problem(&fleet, &node, &record, 7), None);
    assert!(trust.problem(&other_fleet, &node, &record, 7).is_some());
    assert!(trust.problem(&fleet, &other_node, &record, 7).is_some());
    // What the node has signed before is of a lease that is over.
    assert!(trust.problem(&fleet, &node, &record, 8).is_some());
    let secure = Trust { has_tls: true, ..trust.clone() };
    assert!(secure.problem(&fleet, &node, &record, 7).is_some_and(|why| why.contains("https://")));
    // One who can write to etcd changes the address, and cannot sign it.
    record.front_url = "http://elsewhere:8080".to_owned();
    assert!(trust.problem(&fleet, &node, &record, 7).is_some());
}
