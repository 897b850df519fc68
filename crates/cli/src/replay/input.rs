//! Files of recordings, read within free memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use poorwill::ByteSize;
use poorwill_local::failure::Failure;
use poorwill_local::progress::Progress;
use poorwill_replay::{Trace, read, share_cards};

use super::args::ReplayArgs;

/// What a byte of a file takes until its answer is there, about.
const MEMORY_OF_BYTE: u64 = 6;
const CHUNK_BYTES: u64 = 4 << 20;

pub(super) fn read_traces(args: &ReplayArgs) -> Result<Vec<Trace>, Failure> {
    let mut traces = Vec::new();
    for file in &args.files {
        let path = file.display().to_string();
        let bytes = read_bytes(file)?;
        let parsing = Progress::waiting("parse");
        let mut read = read::read(&path, bytes)?;
        share_cards(&mut read);
        drop(parsing);
        let name = file.file_name().map_or_else(|| path.clone(), |name| name.display().to_string());
        // Ranks may have files of one name in folders of their own.
        let is_alone = args.files.iter().filter(|other| other.file_name() == file.file_name()).count() == 1;
        let shown = if is_alone { &name } else { &path };
        traces.extend(
            read.into_iter().map(|trace| Trace { name: trace.name.replacen(&path, shown, 1), ..trace }),
        );
    }
    Ok(traces)
}

/// Ends early where no format begins so, or where memory would not suffice.
fn read_bytes(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::new(format!("{}: {error}", path.display()));
    let mut file = File::open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    let free_bytes = poorwill::proc::available_bytes().unwrap_or(u64::MAX);
    let most_bytes = (free_bytes / MEMORY_OF_BYTE).min(read::FILE_BYTES_MAX);
    let too_long = |bytes: u64| {
        Failure::new(format!(
            "{}: of {} or more, {} can be read with {} of free memory; record a shorter part, or read it on another \
             machine",
            path.display(),
            ByteSize(bytes),
            ByteSize(most_bytes),
            ByteSize(free_bytes)
        ))
    };
    if len > most_bytes {
        return Err(too_long(len));
    }
    let progress = Progress::bytes("read", len);
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
    loop {
        let read = file.by_ref().take(CHUNK_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        if read == 0 {
            return Ok(bytes);
        }
        progress.add(read as u64);
        // Blank lines may come first.
        if bytes.len() == read && !bytes.trim_ascii_start().is_empty() {
            read::check_beginning(&path.display().to_string(), &bytes)?;
        }
        if bytes.len() as u64 > most_bytes {
            return Err(too_long(bytes.len() as u64));
        }
    }
}

pub(super) fn keep_device(traces: &mut Vec<Trace>, device: usize) -> Result<(), Failure> {
    let devices: BTreeSet<usize> = traces.iter().filter_map(|trace| trace.device).collect();
    traces.retain(|trace| trace.device == Some(device));
    if !traces.is_empty() {
        return Ok(());
    }
    let known: Vec<String> = devices.iter().map(ToString::to_string).collect();
    let known = if known.is_empty() {
        "no file says one".to_owned()
    } else {
        format!("there is {}", known.join(", "))
    };
    Err(Failure::new(format!("nothing was recorded on device {device}; {known}")))
}
