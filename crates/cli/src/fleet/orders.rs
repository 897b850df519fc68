//! What a fleet has, and what operators want of it: both are records in etcd.

use std::path::Path;

use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::keys;
use poorwill_router::status::{FleetStatus, Records};
use poorwill_router::wishes::{Wish, wish};
use serde::Serialize;

use super::args::FleetCommand;
use super::serve::read;
use super::show::status_text;
use crate::rotate::runtime;
use poorwill_local::failure::{CommandOutput, Failure};

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum FleetReply {
    Status(FleetStatus),
    Wish {
        /// What is wished now, as a sentence.
        wish: String,
    },
}

impl CommandOutput for FleetReply {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        match self {
            Self::Status(status) => status_text(status),
            Self::Wish { wish } => format!("{wish}\n"),
        }
    }
}

pub(super) fn run(path: &Path, command: FleetCommand) -> Result<FleetReply, Failure> {
    let config = read(path)?;
    let wanted = match command {
        FleetCommand::Status => None,
        FleetCommand::Drain { node, off: true, .. } => Some(Wish::TakeAgain { node }),
        FleetCommand::Drain { node, off: false, why, lasts } => Some(Wish::Drain { node, why, lasts }),
        FleetCommand::Pin { model, off: true, .. } => Some(Wish::Unpin { model }),
        FleetCommand::Pin { model, off: false, copies, nodes } => {
            Some(Wish::Pin { model, copies: copies.get(), nodes })
        }
    };
    runtime()?.block_on(async {
        let etcd = Etcd::with_tls(&config.etcd, Limits::default(), config.etcd_tls.as_ref())?;
        let Some(wanted) = wanted else {
            let (entries, _) = etcd.read(&keys::prefix(&config.fleet)).await?;
            return Ok(FleetReply::Status(Records::read(&config.fleet, &entries).status()));
        };
        Ok(FleetReply::Wish { wish: wish(&etcd, &config.fleet, wanted).await? })
    })
}
