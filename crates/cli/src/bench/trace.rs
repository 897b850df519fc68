//! A load step by step, as comma-separated values: one line for each block taken or given back.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use poorwill_bench::churn::{Event, Moment};

use crate::failure::Failure;

/// A file being written. What goes wrong with it comes out at the end, not amid the measurement.
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

    pub(super) fn add(&mut self, moment: &Moment, mapped_bytes: u64) {
        let Moment { step, event, block, bytes, live_bytes } = moment;
        let event = match event {
            Event::Take => "take",
            Event::Give => "give",
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
