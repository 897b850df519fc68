//! Ports of engines: those that llama-swap would give, and one of its own for each model.
//!
//! llama-swap runs one engine at a time by default, so that several may have one port. Here each has its own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};

use super::super::draft::Draft;
use super::address::{self, Address};
use super::command::without_comments;
use super::macros::Scope;
use super::warnings::Warnings;
use super::yaml::{LineColumn, Mistake, Node};

/// Where llama-swap begins to count.
const PORT_MIN: u16 = 5800;
/// The first port to try for a listener.
const LISTEN_MIN: u16 = 8080;

#[derive(Debug)]
pub(super) struct Ports<'y> {
    by_model: BTreeMap<&'y str, u16>,
    /// The next that is to be given; `None` after the last one.
    next: Option<u16>,
}

impl<'y> Ports<'y> {
    /// Models whose commands ask for one get it in the order of their names.
    pub(super) fn new(models: &'y Node, first: Option<&Node>, scope: &Scope<'y>) -> Result<Self, Mistake> {
        let mut ports = Self { by_model: BTreeMap::new(), next: Some(PORT_MIN) };
        if let Some(node) = first {
            let text = scope.text(node.text().unwrap_or_default(), node.place)?;
            ports.next = text.parse().ok().filter(|port| *port > 0);
            if ports.next.is_none() {
                return Mistake::at(node.place, format!("startPort is `{text}`, which is no port"));
            }
        }
        let sorted: BTreeMap<&str, &Node> =
            models.entries().iter().map(|entry| (entry.key.as_str(), &entry.value)).collect();
        for (name, model) in sorted {
            let command = model.get("cmd").and_then(Node::text).unwrap_or_default();
            if scope.of_model(name, model)?.mentions(&without_comments(command), "PORT") {
                let Some(port) = ports.take() else {
                    return Mistake::at(models.place, "there are not enough ports from startPort on");
                };
                ports.by_model.insert(name, port);
            }
        }
        Ok(ports)
    }

    pub(super) fn of(&self, model: &str) -> Option<u16> {
        self.by_model.get(model).copied()
    }

    fn take(&mut self) -> Option<u16> {
        let port = self.next?;
        self.next = port.checked_add(1);
        Some(port)
    }

    /// Gives models another port whose address an earlier one has, and the listeners free ones.
    pub(super) fn separate(
        &mut self,
        draft: &mut Draft,
        places: &BTreeMap<String, LineColumn>,
        warnings: &mut Warnings,
    ) {
        let ports = draft.models.iter().filter_map(|model| Address::of_url(&model.url));
        let mut taken: BTreeSet<u16> = ports.map(|address| address.port).collect();
        let mut seen: BTreeMap<Address, String> = BTreeMap::new();
        draft.models.retain_mut(|model| {
            let Some(address) = Address::of_url(&model.url) else { return true };
            let Some(other) = seen.get(&address) else {
                seen.insert(address, model.name.clone());
                return true;
            };
            let url = &model.url;
            let here = format!("model `{}`: its address {url} is that of `{other}`", model.name);
            let place = places.get(&model.name).copied().unwrap_or_default();
            let new = std::iter::from_fn(|| self.take()).find(|port| !taken.contains(port));
            match new.filter(|_| address::replace(&mut model.command, address.port)) {
                Some(new) => {
                    model.url = format!("{}:{new}", model.url.rsplit_once(':').map_or("", |(rest, _)| rest));
                    warnings.add(place, &format!("{here}; it has {new} here, in its command, too"));
                    taken.insert(new);
                    seen.insert(Address { port: new, ..address }, model.name.clone());
                    true
                }
                None => {
                    let reason = format!(
                        "{here}, and its command does not say that port; it is not carried over: each engine has an \
                         address of its own here, so give it one, and import again"
                    );
                    warnings.add(place, &reason);
                    false
                }
            }
        });
        let mut free = (LISTEN_MIN..u16::MAX).filter(|port| !taken.contains(port));
        let mut listen = || free.next().map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
        draft.front = listen();
        draft.control = listen();
    }
}
