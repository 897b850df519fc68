//! What is asked of a broker that runs.

use std::path::Path;
use std::time::Duration;

use comfy_table::CellAlignment;
use poorwill::ByteSize;
use poorwill_broker::{Ask, BrokerStatus, Client, ClientError, Hello};
use poorwill_local::failure::{CommandOutput, Failure};
use poorwill_local::text::table;
use serde::Serialize;

use super::Amount;

/// The name under which the broker knows this command.
const NAME: &str = "poorwill broker";

/// What the broker has, of all devices.
pub(super) fn status(path: &Path) -> Result<FoundStatus, Failure> {
    // Its own device is of no account, as it lends nothing.
    Ok(FoundStatus(connect(path, "none")?.status()?))
}

/// Has lent memory freed. Owners that have to back memory up first get `wait_max`.
pub(super) fn give_up(
    path: &Path,
    device: String,
    amount: Amount,
    wait_max: Duration,
) -> Result<GiveUpReport, Failure> {
    let (asked_bytes, bytes) = match amount {
        Amount::All => (None, Ask::ALL),
        Amount::Bytes(bytes) => (Some(bytes), bytes),
    };
    let client = match connect(path, &device) {
        Ok(client) => client,
        // Nothing is lent then.
        Err(ClientError::NotThere { .. }) => {
            return Ok(GiveUpReport {
                device,
                asked_bytes,
                freed_bytes: 0,
                given_up_bytes: 0,
                kept_bytes: 0,
            });
        }
        Err(error) => return Err(error.into()),
    };
    let asked = client.ask(&Ask::freeing(bytes).waiting(wait_max))?;
    let freed_bytes = asked.freed_bytes.saturating_add(asked.given_up_bytes);
    // What is not lent at all is not kept.
    let kept_bytes = client.status()?.reclaimable_bytes(&device).min(asked.missing_bytes);
    Ok(GiveUpReport { device, asked_bytes, freed_bytes, given_up_bytes: asked.given_up_bytes, kept_bytes })
}

fn connect(path: &Path, device: &str) -> Result<Client, ClientError> {
    let hello = Hello { device: device.to_owned(), name: NAME.to_owned() };
    Client::connect(path, &hello, Client::TIMEOUT)
}

/// What a broker answered.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct FoundStatus(BrokerStatus);

/// What a broker has freed.
#[derive(Debug, Serialize)]
pub(super) struct GiveUpReport {
    /// The device.
    device: String,
    /// What was to be freed. `null`: all.
    asked_bytes: Option<u64>,
    /// What is free now.
    freed_bytes: u64,
    /// Of this, what its owners had to back up first.
    given_up_bytes: u64,
    /// What its owners could not give up in time.
    kept_bytes: u64,
}

impl CommandOutput for FoundStatus {
    fn mismatch(&self) -> Option<&str> {
        None
    }

    fn text(&self) -> String {
        let BrokerStatus { pid, lenders, totals, last_problem, .. } = &self.0;
        let mut rows = table(["device", "process", "name", "lent", "chunks", "could give up", "for, s"]);
        for lender in lenders {
            rows.add_row([
                lender.device.clone(),
                lender.pid.to_string(),
                lender.name.clone(),
                ByteSize(lender.lent_bytes).to_string(),
                lender.chunks.to_string(),
                ByteSize(lender.announced_bytes).to_string(),
                lender.lent_s.map(|seconds| seconds.to_string()).unwrap_or_default(),
            ]);
        }
        for column in rows.column_iter_mut().skip(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let rows = if lenders.is_empty() { "nothing is lent\n".to_owned() } else { format!("{rows}\n") };
        let problem = last_problem.iter().map(|problem| format!("last problem: {problem}\n"));
        format!(
            "{rows}process {pid} has had {} lent, {} taken by others, {} brought back, {} given up by owners\n{}",
            ByteSize(totals.lent_bytes),
            ByteSize(totals.taken_bytes),
            ByteSize(totals.brought_back_bytes),
            ByteSize(totals.given_up_bytes),
            problem.collect::<String>()
        )
    }
}

impl CommandOutput for GiveUpReport {
    const MISMATCH: &'static str = "not all of it was given up";

    fn mismatch(&self) -> Option<&str> {
        (self.kept_bytes > 0)
            .then_some("its owners could not back it up in time; give them longer by --wait-max")
    }

    fn text(&self) -> String {
        let asked = self.asked_bytes.map(|bytes| format!(" of the {} asked for", ByteSize(bytes)));
        let given_up = match self.given_up_bytes {
            0 => String::new(),
            bytes => format!(", {} of it backed up by its owners", ByteSize(bytes)),
        };
        let freed = ByteSize(self.freed_bytes);
        format!("freed {freed}{} on {}{given_up}\n", asked.unwrap_or_default(), self.device)
    }
}
