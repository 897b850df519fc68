//! Processes that listen on TCP ports of this machine, by `/proc`. Those of other users are not named.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use poorwill::proc;

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
    for pid in proc::pids().unwrap_or_default() {
        let files = proc::descriptors(pid).unwrap_or_default();
        let inodes = files.iter().filter_map(|file| proc::socket(file)?.parse::<u64>().ok());
        // A socket may be open twice.
        for inode in inodes.collect::<BTreeSet<_>>() {
            all.extend(sockets.get(&inode).map(|address| Listening { address: *address, pid }));
        }
    }
    all
}

/// The parent of every process.
pub(super) fn parents() -> BTreeMap<u32, u32> {
    let parent = |pid: u32| Some((pid, proc::status(pid).ok()??.parent));
    proc::pids().unwrap_or_default().into_iter().filter_map(parent).collect()
}

/// The process, its parent, and so on.
pub(super) fn ancestry(parents: &BTreeMap<u32, u32>, pid: u32) -> impl Iterator<Item = u32> {
    // A table that is read while processes end could have a circle in it.
    std::iter::successors(Some(pid), |pid| parents.get(pid).copied().filter(|parent| *parent > 1)).take(64)
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
    fn this_process_has_parents() {
        let own = std::process::id();
        let parents = parents();
        let ancestry: Vec<u32> = ancestry(&parents, own).collect();
        assert_eq!(ancestry.first(), Some(&own));
        assert_eq!(ancestry.get(1).copied().unwrap_or(1), std::os::unix::process::parent_id());
    }
}
