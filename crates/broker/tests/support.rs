//! A broker on a thread, memory that knows its number, and clients.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use poorwill_broker::{
    Ask, Broker, BrokerEnd, BrokerError, BrokerOptions, BrokerStop, Client, Hello, LentChunk,
};
use poorwill_testkit::watchdog::TEST_TIMEOUT;
use rustix::fs::{MemfdFlags, memfd_create};

/// The device of most tests.
pub(crate) const DEVICE: &str = "GPU-5a5a5a5a";

/// Options under which nothing ends by time.
pub(crate) fn options() -> BrokerOptions {
    let mut options = BrokerOptions::default();
    options.idle = TEST_TIMEOUT;
    options.hello = TEST_TIMEOUT;
    options
}

/// A broker on a thread, until this is dropped.
pub(crate) struct Served {
    pub(crate) path: PathBuf,
    stop: Arc<BrokerStop>,
    thread: Option<JoinHandle<Result<BrokerEnd, BrokerError>>>,
    _folder: tempfile::TempDir,
}

impl Served {
    pub(crate) fn start(options: BrokerOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let stop = Arc::new(BrokerStop::new().unwrap());
        let broker = Broker::bind(&path, options).unwrap();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || broker.run(&stopped));
        Self { path, stop, thread: Some(thread), _folder: folder }
    }

    pub(crate) fn client(&self, name: &str) -> Client {
        connect(&self.path, DEVICE, name)
    }

    pub(crate) fn end(&mut self) -> Option<BrokerEnd> {
        self.stop.stop();
        Some(self.thread.take()?.join().unwrap().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
    }
}

pub(crate) fn connect(path: &Path, device: &str, name: &str) -> Client {
    let hello = Hello { device: device.into(), name: name.into() };
    Client::connect(path, &hello, TEST_TIMEOUT).unwrap()
}

pub(crate) fn hello() -> Hello {
    Hello { device: DEVICE.into(), name: "test".into() }
}

/// Memory that holds a number.
pub(crate) fn memory(number: u64) -> OwnedFd {
    let memory = memfd_create("poorwill-test", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&memory, &number.to_ne_bytes(), 0).unwrap();
    memory
}

/// The number that memory holds.
pub(crate) fn number(memory: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::pread(memory, &mut bytes, 0).unwrap();
    u64::from_ne_bytes(bytes)
}

/// Chunks with these ids and bytes, whose memory holds the id.
pub(crate) fn chunks(list: &[(u64, u64)]) -> Vec<LentChunk> {
    let chunk = |(id, bytes): &(u64, u64)| LentChunk {
        id: *id,
        bytes: *bytes,
        is_dropped: false,
        descriptor: memory(*id),
    };
    list.iter().map(chunk).collect()
}

/// What came back: ids and bytes, once the memory is known to be the right one.
pub(crate) fn taken_back(client: &Client) -> Vec<(u64, u64)> {
    let chunks = client.take_back(None).unwrap();
    assert!(chunks.iter().all(|chunk| number(&chunk.descriptor) == chunk.id), "{chunks:?}");
    chunks.iter().map(|chunk| (chunk.id, chunk.bytes)).collect()
}

/// An ask that waits for owners as long as a test may take.
pub(crate) fn waiting(bytes: u64) -> Ask {
    Ask::freeing(bytes).waiting(TEST_TIMEOUT)
}

/// How many descriptors a process has.
pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}
