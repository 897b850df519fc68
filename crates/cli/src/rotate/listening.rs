//! Processes that listen on TCP ports of this machine, by `/proc`. Those of other users are not named.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTENS: &str = "0A";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listening {
    pub(super) address: SocketAddr,
    pub(super) pid: u32,
}

/// All of this user, and of every user for root. Empty where `/proc` cannot be read.
pub(super) fn listening() -> Vec<Listening> {
    let mut sockets = BTreeMap::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = fs::read_to_string(table).unwrap_or_default();
        sockets.extend(text.lines().skip(1).filter_map(socket));
    }
    let mut all = Vec::new();
    for pid in pids() {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let inodes = files.filter_map(|file| inode(&fs::read_link(file.path()).ok()?));
        // A socket may be open twice.
        for inode in inodes.collect::<BTreeSet<_>>() {
            all.extend(sockets.get(&inode).map(|address| Listening { address: *address, pid }));
        }
    }
    all
}

/// The words of a process's command line. Empty for threads of the kernel, and for processes that have ended.
pub(super) fn command_of(pid: u32) -> Vec<String> {
    fields(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default())
}

/// The value that a variable had when the process began. `None` for processes of other users.
pub(super) fn variable_of(pid: u32, name: &str) -> Option<String> {
    let variables = fields(&fs::read(format!("/proc/{pid}/environ")).unwrap_or_default());
    variables.iter().find_map(|one| Some(one.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

pub(super) fn folder_of(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/cwd")).ok()
}

/// The parent of every process.
pub(super) fn parents() -> BTreeMap<u32, u32> {
    let parent = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        Some((pid, line.trim().parse().ok()?))
    };
    pids().filter_map(parent).collect()
}

/// The process, its parent, and so on.
pub(super) fn ancestry(parents: &BTreeMap<u32, u32>, pid: u32) -> impl Iterator<Item = u32> {
    // A table that is read while processes end could have a circle in it.
    std::iter::successors(Some(pid), |pid| parents.get(pid).copied().filter(|parent| *parent > 1)).take(64)
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The inode and address of a line of the table, if it listens.
fn socket(line: &str) -> Option<(u64, SocketAddr)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    if *fields.get(3)? != LISTENS {
        return None;
    }
    let (ip, port) = fields.get(1)?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some((fields.get(9)?.parse().ok()?, SocketAddr::new(address(ip)?, port)))
}

/// Each word of 32 bits is a number in the machine's byte order.
fn address(hex: &str) -> Option<IpAddr> {
    let words = (0..hex.len()).step_by(8).map(|at| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok());
    let bytes: Vec<u8> =
        words.collect::<Option<Vec<u32>>>()?.iter().flat_map(|word| word.to_ne_bytes()).collect();
    match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(four) => Some(Ipv4Addr::from(four).into()),
        Err(_) => Some(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).ok()?).into()),
    }
}

/// Of a link such as `socket:[1234]`.
fn inode(link: &std::path::Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The fields of a file in `/proc`, each ended by NUL.
fn fields(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|byte| *byte == 0).map(|field| String::from_utf8_lossy(field).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn this_process_is_found_by_its_port() {
        for ip in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
            // A machine may lack IPv6.
            let Ok(listener) = TcpListener::bind(ip) else { continue };
            let expected = Listening { address: listener.local_addr().unwrap(), pid: std::process::id() };
            assert!(listening().contains(&expected), "{expected:?}");
            drop(listener);
            assert!(!listening().contains(&expected), "{expected:?}");
        }
    }

    #[test]
    fn this_process_has_a_command_line_a_folder_and_parents() {
        let own = std::process::id();
        assert_eq!(command_of(own), std::env::args().collect::<Vec<_>>());
        assert_eq!(folder_of(own), std::env::current_dir().ok());
        assert_eq!(variable_of(own, "PATH"), std::env::var("PATH").ok());
        assert_eq!(variable_of(own, "PAT"), None);
        let parents = parents();
        let ancestry: Vec<u32> = ancestry(&parents, own).collect();
        assert_eq!(ancestry.first(), Some(&own));
        assert_eq!(ancestry.get(1).copied().unwrap_or(1), std::os::unix::process::parent_id());
    }

    #[test]
    fn an_empty_argument_is_a_word() {
        assert_eq!(fields(b"a\0\0b\0"), ["a", "", "b"]);
        assert!(fields(b"").is_empty() && fields(b"\0").is_empty());
    }
}
