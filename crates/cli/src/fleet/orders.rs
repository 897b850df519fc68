//! What a fleet has, and what operators want of it: both are records in etcd.

use std::path::Path;

use poorwill_fleet::etcd::{Etcd, Limits};
use poorwill_fleet::keys;
use poorwill_router::FleetConfig;
use poorwill_router::status::{FleetStatus, Records};
use poorwill_router::wishes::{Wish, wish};
use serde::Serialize;

use super::args::FleetCommand;
use super::show::status_text;
use crate::rotate::{config_failure, runtime};
use poorwill_local::failure::{CommandOutput, Failure};

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum FleetReply {
    Status(FleetStatus),
    Init {
        /// Its text.
        configuration: &'static str,
    },
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
            Self::Init { configuration } => (*configuration).to_owned(),
            Self::Wish { wish } => format!("{wish}\n"),
        }
    }
}

pub(super) fn run(path: &Path, command: FleetCommand) -> Result<FleetReply, Failure> {
    if matches!(command, FleetCommand::Init) {
        return Ok(FleetReply::Init { configuration: include_str!("init.toml") });
    }
    let config = FleetConfig::read(path).map_err(|error| config_failure(path, &error))?;
    let wanted = match command {
        FleetCommand::Status | FleetCommand::Init => None,
        FleetCommand::Drain { node, off: true, .. } => Some(Wish::TakeAgain { node }),
        FleetCommand::Drain { node, off: false, why, lasts } => Some(Wish::Drain { node, why, lasts }),
        FleetCommand::Pin { model, off: true, .. } => Some(Wish::Unpin { model }),
        FleetCommand::Pin { model, off: false, copies, nodes } => {
            Some(Wish::Pin { model, copies: copies.get(), nodes })
        }
    };
    runtime()?.block_on(async {
        let etcd = Etcd::open(&config.etcd, Limits::default())?;
        let Some(wanted) = wanted else {
            let (entries, _) = etcd.read(&keys::prefix(&config.fleet)).await?;
            return Ok(FleetReply::Status(Records::read(&config.fleet, &entries).status()));
        };
        Ok(FleetReply::Wish { wish: wish(&etcd, &config.fleet, wanted).await? })
    })
}
