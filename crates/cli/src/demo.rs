//! `poorwill demo`: the main job on the host device in one go.

use std::time::Instant;

use poorwill::checkpoint::{Checkpoint, SyntheticMoe};
use poorwill::{Arena, ByteSize, Config, Level};
use serde::Serialize;

use crate::args::DemoArgs;
use crate::failure::{Failure, Outcome};
use crate::nap::{self, NapReport, Plan};
use crate::progress::Progress;
use crate::show;

/// What the demonstration did.
#[derive(Debug, Serialize)]
pub(crate) struct DemoReport {
    nap: NapReport,
    /// Seconds that writing the checkpoint took.
    write_s: f64,
    verified: bool,
}

/// The command.
pub(crate) fn run(args: &DemoArgs) -> Result<DemoReport, Failure> {
    let arena = Arena::open(Config::on(args.device.clone()))?;
    let synthetic = SyntheticMoe::default();
    let size = ByteSize(synthetic.total_bytes());
    let folder = tempfile::Builder::new().prefix("poorwill-demo-").tempdir().map_err(|error| {
        Failure::new(format!(
            "cannot make a temporary folder: {error}; set TMPDIR to one that exists and has {size} free"
        ))
    })?;
    let started = Instant::now();
    let progress = Progress::bytes("writing", synthetic.total_bytes());
    synthetic.write(folder.path(), |bytes| progress.set(bytes))?;
    drop(progress);
    let write_s = started.elapsed().as_secs_f64();
    let checkpoint = Checkpoint::open(&[folder.path().to_owned()])?;
    // The open files are all that is needed: whatever ends this process now, no folder is left behind.
    folder.close().map_err(|error| Failure::new(format!("cannot remove the temporary folder: {error}")))?;
    let plan =
        Plan { device: args.device.clone(), cycles: 3, level: Level::One, kv_cache: ByteSize::mib(256) };
    let nap = nap::nap(&arena, &checkpoint, &plan)?;
    Ok(DemoReport { verified: nap.verified, nap, write_s })
}

impl Outcome for DemoReport {
    fn mismatch(&self) -> Option<&str> {
        self.nap.mismatch()
    }

    fn text(&self) -> String {
        let model = "A mixture-of-experts checkpoint as Hugging Face would lay it out";
        format!("{model}, written in {:.2} s.\n{}", self.write_s, show::nap(&self.nap))
    }
}
