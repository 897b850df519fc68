//! Transfers by a few threads, each one at a time.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use poorwill_core::{DriverError, Op};

use super::file::BackingFile;
use super::refused::refused;
use super::task::Task;

/// Enough that the file system always has requests.
const THREADS: usize = 4;

pub(super) fn start(file: &Arc<BackingFile>, queue: Receiver<Task>) -> Result<(), DriverError> {
    let queue = Arc::new(Mutex::new(queue));
    for _ in 0..THREADS {
        let (file, queue) = (Arc::clone(file), Arc::clone(&queue));
        spawn(move || {
            loop {
                let task = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                match task {
                    Ok(task) => run(&file, task),
                    Err(_) => return,
                }
            }
        })?;
    }
    Ok(())
}

/// It ends by itself when the disk and all that is on it are gone.
pub(super) fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), DriverError> {
    let thread = thread::Builder::new().name("poorwill-disk".into()).spawn(work);
    thread.map(drop).map_err(|error| refused(Op::DiskOpen, "no thread", &error, "raise the limit of threads"))
}

pub(super) fn run(file: &BackingFile, task: Task) {
    match task {
        Task::Transfer(transfer) => transfer.run(file),
        Task::GiveBack => file.give_back_leaving(),
    }
}
