//! What of a process can be seen from outside, and what of it makes a checkpoint or its restore fail.
//!
//! Promise: [`obstacles`] is a function of texts. It names what was measured to lose a process. It does not name what was
//! measured to work: memory on two devices, access between them, and a communicator of one rank.

use std::io::{self, ErrorKind};
use std::path::Path;

use poorwill_core::hibernation::Obstacle;

use super::nccl::Sockets;
use crate::cuda::state::IMPORTS_MARK;
use crate::system::System;
use crate::system::proc::{self, ProcessEnvironment};

/// Memory of CUDA IPC, of the process that exports it and of those that have opened it.
const CUDA_IPC: &str = "/dev/shm/cuda.shm.";
const DEVICE_FILE: &str = "/dev/nvidia";

/// Texts of `/proc`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// `maps`.
    pub(super) maps: String,
    /// Where the links in `fd` lead.
    pub(super) descriptors: Vec<String>,
    pub(super) sockets: Sockets,
    pub(super) is_mps_client: bool,
}

impl Seen {
    /// # Errors
    /// The text that may not be read: what it would show is not known then.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let text = |name: &str| proc::text(pid, name);
        let descriptors = proc::descriptors(pid)?;
        let own = descriptors.iter().filter_map(|link| proc::socket(link).map(str::to_owned)).collect();
        let tcp6 = match text("net/tcp6") {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(), // A system without IPv6.
            found => found?,
        };
        let tcp = text("net/tcp")? + &tcp6;
        let environment = ProcessEnvironment::of(pid);
        Ok(Self {
            maps: text("maps")?,
            descriptors: descriptors.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
            sockets: Sockets { unix: text("net/unix")?, tcp, own },
            is_mps_client: System::at(format!("/proc/{pid}/root"))
                .has_mps(&|name| environment.variable(name)),
        })
    }

    /// The devices whose files it has open: N of `/dev/nvidiaN`.
    pub(super) fn minors(&self) -> Vec<u32> {
        minors(&self.descriptors)
    }

    /// Those of another process.
    pub(super) fn minors_of(pid: u32) -> io::Result<Vec<u32>> {
        Ok(minors(&proc::descriptors(pid)?))
    }
}

fn minors(descriptors: &[impl AsRef<Path>]) -> Vec<u32> {
    let number = |path: &Path| path.to_str()?.strip_prefix(DEVICE_FILE)?.parse().ok();
    let files = descriptors.iter().filter_map(|path| number(path.as_ref()));
    let mut minors: Vec<u32> = files.collect();
    minors.sort_unstable();
    minors.dedup();
    minors
}

pub(super) fn obstacles(seen: &Seen) -> Vec<Obstacle> {
    let communicators = seen.sockets.communicators().into_iter().map(|socket| {
        Obstacle::Communicator(format!("NCCL's socket {socket}: suspend or destroy the communicator first"))
    });
    let mut found: Vec<Obstacle> = communicators.collect();
    let files = mapped(&seen.maps).chain(seen.descriptors.iter().map(String::as_str));
    if let Some(path) = files.into_iter().find(|path| path.starts_with(CUDA_IPC)) {
        found.push(Obstacle::SharedMemory(format!("over CUDA IPC, {path}")));
    }
    if seen.descriptors.iter().any(|path| path.contains(IMPORTS_MARK)) {
        let what =
            "it came back from a broker of lent memory; let the process sleep and lend or release first";
        found.push(Obstacle::SharedMemory(what.into()));
    }
    if seen.is_mps_client {
        found.push(Obstacle::Service("it is a client of the Multi-Process Service".into()));
    }
    found
}

/// The paths of a `maps`.
fn mapped(maps: &str) -> impl Iterator<Item = &str> {
    maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000200000 rw-s 00000000 00:05 620 /dev/nvidiactl
7f1a00000000-7f1a00001000 rw-s 00000000 00:18 21 /dev/shm/torch_77_1_0
7f2b00000000-7f2b01000000 r-xp 00000000 08:01 99 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
7f2c00000000-7f2c01000000 rw-p 00000000 00:00 0
";

    fn seen(descriptors: &[&str]) -> Seen {
        let descriptors = descriptors.iter().map(|path| (*path).to_owned()).collect();
        Seen { maps: MAPS.into(), descriptors, ..Seen::default() }
    }

    #[test]
    fn a_communicator_is_named_by_its_socket() {
        let unix = "0: 2 0 0 2 01 31338 @tmp/nccl-socket-1-8fd5c5c2a51b0f2\n".to_owned();
        let sockets = Sockets { unix, tcp: String::new(), own: ["31338".to_owned()].into() };
        let found = obstacles(&Seen { sockets, ..seen(&[]) });
        let [Obstacle::Communicator(what)] = &found[..] else { panic!("{found:?}") };
        assert!(what.contains("@tmp/nccl-socket-1-8fd5c5c2a51b0f2"), "{what}");
    }

    #[test]
    fn shared_memory_is_named_by_its_file() {
        assert_eq!(obstacles(&seen(&["/dev/nvidia0", "/dev/shm/torch_77_1_0"])), []);
        let maps = format!("{MAPS}7f3-7f4 rw-s 0 00:18 3 /dev/shm/cuda.shm.0.2b.1\n");
        for found in [Seen { maps, ..seen(&[]) }, seen(&["/dev/shm/cuda.shm.0.2b.1"])] {
            let found = obstacles(&found);
            assert!(matches!(&found[..], [Obstacle::SharedMemory(what)] if what.contains("cuda.shm.0.2b.1")));
        }
    }

    #[test]
    fn memory_that_came_back_from_a_broker_is_named() {
        let link = format!("/memfd:{IMPORTS_MARK} (deleted)");
        let found = obstacles(&seen(&["/dev/nvidia0", &link]));
        assert!(matches!(&found[..], [Obstacle::SharedMemory(what)] if what.contains("broker")), "{found:?}");
    }

    #[test]
    fn a_client_of_the_service_is_named() {
        let found = obstacles(&Seen { is_mps_client: true, ..Seen::default() });
        assert!(matches!(&found[..], [Obstacle::Service(_)]), "{found:?}");
    }

    #[test]
    fn device_files_are_found() {
        let files =
            ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "pipe:[3]"];
        assert_eq!(seen(&files).minors(), [0, 1]);
    }

    #[test]
    fn this_process_is_seen() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let seen = Seen::of(std::process::id()).unwrap();
        assert!(seen.maps.contains("/proc/") || mapped(&seen.maps).next().is_some());
        assert!(!seen.sockets.own.is_empty() && seen.sockets.tcp.contains("local_address"));
        assert_eq!(obstacles(&seen), []);
        drop(socket);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let error = Seen::of(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("/proc/4294967295/fd cannot be read"), "{error}");
    }
}
