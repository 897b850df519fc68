//! The steps of a load as comma-separated values, one line for each allocation and free.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use poorwill_bench::churn::{ChurnEvent, ChurnProgress};

use crate::failure::Failure;

/// An open trace file. Errors are reported at the end, not during the measurement.
#[derive(Debug)]
pub(super) struct Trace {
    path: PathBuf,
    file: BufWriter<File>,
    written: io::Result<()>,
}

impl Trace {
    pub(super) fn create(path: &Path) -> Result<Self, Failure> {
        let path = path.to_owned();
        let mut file = BufWriter::new(File::create(&path).map_err(|error| failure(&path, &error))?);
        let written = writeln!(file, "step,event,block,bytes,live_bytes,mapped_bytes");
        Ok(Self { path, file, written })
    }

    pub(super) fn add(&mut self, progress: &ChurnProgress, mapped_bytes: u64) {
        let ChurnProgress { step, event, block, bytes, live_bytes } = progress;
        let event = match event {
            ChurnEvent::Alloc => "take",
            ChurnEvent::Free => "give",
        };
        if self.written.is_ok() {
            self.written = writeln!(self.file, "{step},{event},{block},{bytes},{live_bytes},{mapped_bytes}");
        }
    }

    pub(super) fn finish(mut self) -> Result<(), Failure> {
        let written = self.written.and_then(|()| self.file.flush());
        written.map_err(|error| failure(&self.path, &error))
    }
}

fn failure(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot write the trace to {path:?}: {error}"))
}
