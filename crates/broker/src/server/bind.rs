//! One broker at a path: the lock beside the socket, and the socket in the place of a stale one.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::error::BrokerError;

/// How long another broker may hold the lock while it does not answer: one that begins, or one that ends.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(5);

/// Connections that the kernel keeps until they are taken.
const BACKLOG: i32 = 128;

/// Takes the lock of a path, or finds the broker that has it.
pub(super) fn lock(path: &Path) -> Result<File, BrokerError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let failed = |source| BrokerError::System { step: "open the lock", path: path.to_owned(), source };
    // It stays when the broker ends: removing it would let two brokers lock two files of one name.
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(PathBuf::from(name))
        .map_err(failed)?;
    let began = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::AGAIN) if began.elapsed() < LOCK_WAIT && !is_live(path)? => {
                std::thread::sleep(LOCK_POLL);
            }
            Err(Errno::AGAIN) => return Err(BrokerError::AlreadyRunning { path: path.to_owned() }),
            Err(error) => return Err(BrokerError::of("take the lock", path)(error)),
        }
    }
    // As when the file of its lock was removed.
    if is_live(path)? { Err(BrokerError::AlreadyRunning { path: path.to_owned() }) } else { Ok(file) }
}

/// Listens in the place of what an ended broker left. The caller has the lock.
pub(super) fn listen(path: &Path) -> Result<OwnedFd, BrokerError> {
    match path.symlink_metadata() {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(BrokerError::NoSocket { path: path.to_owned() });
        }
        Ok(_) => unlink(path),
        Err(_) => {}
    }
    let address = SocketAddrUnix::new(path).map_err(BrokerError::of("use the path", path))?;
    let socket = socket().map_err(BrokerError::of("make a socket", path))?;
    rustix::net::bind(&socket, &address).map_err(BrokerError::of("bind the socket", path))?;
    rustix::net::listen(&socket, BACKLOG).map_err(BrokerError::of("listen", path))?;
    Ok(socket)
}

/// Removes the socket of a broker. The next holder of the lock replaces what is left.
pub(super) fn unlink(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// Whether a process listens at the path.
fn is_live(path: &Path) -> Result<bool, BrokerError> {
    let address = SocketAddrUnix::new(path).map_err(BrokerError::of("use the path", path))?;
    let socket = socket().map_err(BrokerError::of("make a socket", path))?;
    // `AGAIN`: its backlog is full.
    Ok(matches!(rustix::net::connect(&socket, &address), Ok(()) | Err(Errno::AGAIN)))
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}
