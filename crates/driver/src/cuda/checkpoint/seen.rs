//! What of a process can be seen from outside, and what of it makes a checkpoint or its restore fail.
//!
//! Promise: [`obstacles`] is a function of texts. It names what was measured to lose a process, and nothing that was
//! measured to work: memory on two devices, peer access between them, and exports that no process has opened.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use poorwill_core::hibernation::Obstacle;

use crate::system::System;

/// Sockets of a communicator of NCCL, in the abstract namespace.
const NCCL_SOCKET: &str = "@tmp/nccl-socket-";
/// Memory of CUDA IPC: `/dev/shm/cuda.shm.USER.PID.NUMBER`, by whom it was exported, in hexadecimal.
const CUDA_IPC: &str = "/dev/shm/cuda.shm.";
const DEVICE_FILE: &str = "/dev/nvidia";

/// Texts of `/proc`, empty where they may not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Its numbers, from the outermost namespace to its own.
    pub(super) pids: Vec<u32>,
    /// `maps`.
    pub(super) maps: String,
    /// `net/unix`.
    pub(super) sockets: String,
    /// Where the links in `fd` lead.
    pub(super) descriptors: Vec<String>,
    pub(super) is_mps_client: bool,
}

impl Seen {
    pub(super) fn of(pid: u32) -> Self {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let text = |name: &str| {
            let bytes = fs::read(folder.join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let links = fs::read_dir(folder.join("fd")).into_iter().flatten().filter_map(Result::ok);
        let links = links.filter_map(|link| fs::read_link(link.path()).ok());
        let environment = fs::read(folder.join("environ")).unwrap_or_default();
        Self {
            pids: pids(&text("status")),
            maps: text("maps"),
            sockets: text("net/unix"),
            descriptors: links.map(|path| path.to_string_lossy().into_owned()).collect(),
            is_mps_client: System::at(folder.join("root")).has_mps(&|name| variable(&environment, name)),
        }
    }

    /// The devices whose files it has open: N of `/dev/nvidiaN`.
    pub(super) fn minors(&self) -> Vec<u32> {
        let files = self.descriptors.iter().filter_map(|path| path.strip_prefix(DEVICE_FILE)?.parse().ok());
        let mut minors: Vec<u32> = files.collect();
        minors.sort_unstable();
        minors.dedup();
        minors
    }
}

pub(super) fn obstacles(seen: &Seen) -> Vec<Obstacle> {
    let mut found = Vec::new();
    if let Some(socket) = communicator(seen) {
        let what = format!("NCCL's socket {socket}: suspend or destroy the communicator first");
        found.push(Obstacle::Communicator(what));
    }
    if let Some(path) = opened_from_another(seen) {
        found.push(Obstacle::SharedMemory(format!("opened over CUDA IPC: {path}")));
    }
    if seen.is_mps_client {
        found.push(Obstacle::Service("it is a client of the Multi-Process Service".into()));
    }
    found
}

/// A socket of NCCL that the process has open. The table has those of all processes.
fn communicator(seen: &Seen) -> Option<&str> {
    seen.sockets.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(6);
        let (inode, path) = (fields.next()?, fields.next()?);
        let link = format!("socket:[{inode}]");
        (path.starts_with(NCCL_SOCKET) && seen.descriptors.contains(&link)).then_some(path)
    })
}

fn opened_from_another(seen: &Seen) -> Option<&str> {
    let paths = mapped(&seen.maps).chain(seen.descriptors.iter().map(String::as_str));
    paths.filter(|path| path.starts_with(CUDA_IPC)).find(|path| {
        let exporter = path.trim_start_matches(CUDA_IPC).split('.').nth(1);
        let exporter = exporter.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        exporter.is_some_and(|pid| !seen.pids.contains(&pid))
    })
}

/// The paths of a `maps`.
fn mapped(maps: &str) -> impl Iterator<Item = &str> {
    maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]))
}

fn pids(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

fn variable(environment: &[u8], name: &str) -> Option<OsString> {
    let value = |entry: &[u8]| Some(entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_vec());
    environment.split(|byte| *byte == 0).find_map(value).map(OsString::from_vec)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a process with PyTorch, in a communicator of two ranks, as driver 580 and NCCL 2.28 show it.
    const SOCKETS: &str = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00000000 0002 01 31337 @tmp/nccl-socket-0-8fd5c5c2a51b0f2
0000000000000000: 00000002 00000000 00000000 0002 01 31338 @tmp/nccl-socket-1-8fd5c5c2a51b0f2
0000000000000000: 00000003 00000000 00000000 0001 03 31339
0000000000000000: 00000002 00000000 00010000 0001 01 31340 @cuda-uvmfd-4026531836-2f3@
";
    const MAPS: &str = "\
7f0000000000-7f0000200000 rw-s 00000000 00:05 620 /dev/nvidiactl
7f1a00000000-7f1a00001000 rw-s 00000000 00:18 21 /dev/shm/cuda.shm.0.2a.1
7f2b00000000-7f2b01000000 r-xp 00000000 08:01 99 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04
7f2c00000000-7f2c01000000 rw-p 00000000 00:00 0
";

    fn seen(descriptors: &[&str]) -> Seen {
        let descriptors = descriptors.iter().map(|path| (*path).to_owned()).collect();
        Seen {
            pids: vec![4711, 42],
            maps: MAPS.into(),
            sockets: SOCKETS.into(),
            descriptors,
            is_mps_client: false,
        }
    }

    #[test]
    fn a_communicator_is_seen_by_its_socket() {
        let found = obstacles(&seen(&["/dev/nvidiactl", "socket:[31338]", "/dev/nvidia0"]));
        let [Obstacle::Communicator(what)] = &found[..] else { panic!("{found:?}") };
        assert!(what.contains("@tmp/nccl-socket-1-8fd5c5c2a51b0f2"), "{what}");
        for others in [&["socket:[31340]", "socket:[31339]"][..], &["socket:[3133]"], &[]] {
            assert_eq!(obstacles(&seen(others)), [], "{others:?}");
        }
    }

    #[test]
    fn memory_of_another_process_is_seen_and_its_own_exports_are_none() {
        let with = |path: &str| Seen { maps: format!("{MAPS}7f3-7f4 rw-s 0 00:18 3 {path}\n"), ..seen(&[]) };
        for own in
            ["/dev/shm/cuda.shm.0.2a.2", "/dev/shm/cuda.shm.1000.1267.1 (deleted)", "/dev/shm/torch_77_1_0"]
        {
            assert_eq!(obstacles(&with(own)), [], "{own}");
        }
        let found = obstacles(&with("/dev/shm/cuda.shm.0.2b.1"));
        assert!(
            matches!(&found[..], [Obstacle::SharedMemory(what)] if what.contains("cuda.shm.0.2b.1")),
            "{found:?}"
        );
        assert_eq!(obstacles(&seen(&["/dev/shm/cuda.shm.0.2b.1"])).len(), 1, "by a descriptor alone");
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
    fn small_texts_are_read() {
        assert_eq!(pids("Name:\tx\nNSpid:\t4711\t42\nThreads:\t3\n"), [4711, 42]);
        assert_eq!(pids(""), []);
        let environment = b"PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY=/run/mps\0X=";
        assert_eq!(variable(environment, "CUDA_MPS_PIPE_DIRECTORY"), Some("/run/mps".into()));
        assert_eq!((variable(environment, "X"), variable(environment, "CUDA")), (Some("".into()), None));
    }

    #[test]
    fn this_process_is_seen() {
        let seen = Seen::of(std::process::id());
        assert!(seen.pids.contains(&std::process::id()) && !seen.descriptors.is_empty());
        assert_eq!(obstacles(&seen), []);
    }
}
