//! Communicators of NCCL between ranks, as the kernel's tables of sockets show them.
//!
//! Each rank has a socket with its number in the abstract namespace. A rank above 0 has others beside it. Rank 0 may be
//! alone, and then a checkpoint works: what shows others is a connection that it has accepted from outside.

use std::collections::HashSet;

const SOCKET: &str = "@tmp/nccl-socket-";
const ESTABLISHED: &str = "01";
const LISTENS: &str = "0A";
/// How tables of IPv6 write the first part of an address of IPv4.
const IPV4_IN_IPV6: &str = "0000000000000000FFFF0000";

/// The tables of a process's network namespace, and which of the sockets are its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sockets {
    /// `net/unix`.
    pub(super) unix: String,
    /// `net/tcp` and `net/tcp6`.
    pub(super) tcp: String,
    /// Inodes of its descriptors.
    pub(super) own: HashSet<String>,
}

/// A row of `net/tcp`.
struct Row<'a> {
    local: &'a str,
    remote: &'a str,
    state: &'a str,
}

impl Sockets {
    /// The sockets of communicators, one for each. None if no rank is elsewhere.
    pub(super) fn communicators(&self) -> Vec<&str> {
        let ranks = self.unix.lines().filter_map(|line| {
            let mut fields = line.split_whitespace().skip(6);
            let (inode, path) = (fields.next()?, fields.next()?);
            let rank: u32 = path.strip_prefix(SOCKET)?.split('-').next()?.parse().ok()?;
            self.own.contains(inode).then_some((rank, path))
        });
        let mut found: Vec<(u32, &str)> = ranks.collect();
        found.sort_unstable();
        let are_together = found.iter().any(|(rank, _)| *rank > 0) || self.has_accepted();
        // The name is padded with NUL, which the table shows so.
        let names = found.iter().map(|(_, path)| path.trim_end_matches('@'));
        names.filter(|_| are_together).collect()
    }

    /// Whether it has accepted a connection from another process.
    fn has_accepted(&self) -> bool {
        let rows: Vec<Row<'_>> = self.tcp.lines().filter_map(|line| self.own_row(line)).collect();
        let listens: HashSet<&str> =
            rows.iter().filter(|row| row.state == LISTENS).filter_map(|row| port(row.local)).collect();
        let established = || rows.iter().filter(|row| row.state == ESTABLISHED);
        let own_ends: HashSet<&str> = established().map(|row| row.local).collect();
        established()
            .filter(|row| port(row.local).is_some_and(|port| listens.contains(port)))
            .any(|row| !own_ends.contains(row.remote))
    }

    fn own_row<'a>(&self, line: &'a str) -> Option<Row<'a>> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, state, ..] = fields[..] else { return None };
        let plain = |address: &'a str| address.strip_prefix(IPV4_IN_IPV6).unwrap_or(address);
        let is_own = self.own.contains(*fields.get(9)?);
        is_own.then_some(Row { local: plain(local), remote: plain(remote), state })
    }
}

fn port(address: &str) -> Option<&str> {
    address.rsplit_once(':').map(|(_, port)| port)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIX: &str = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00000000 0002 01 500 @tmp/nccl-socket-0-8fd5c5c2a51b0f2
0000000000000000: 00000002 00000000 00000000 0002 01 600 @tmp/nccl-socket-1-77d5c5c2a51b0f2@@@@@@
0000000000000000: 00000003 00000000 00000000 0001 03 501
0000000000000000: 00000002 00000000 00010000 0001 01 502 @cuda-uvmfd-4026531836-2f3@
";
    /// The first process listens on 28028 and holds both ends of a connection to it.
    const ALONE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 510 1 0 100 0 0 10 0
   1: 0100007F:6D7C 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 511 1 0 20 4 30 10 -1
   2: 0100007F:9C40 0100007F:6D7C 01 00000000:00000000 00:00000000 00000000     0        0 512 1 0 20 4 30 10 -1
   3: 0100007F:9C41 0A00000A:01BB 01 00000000:00000000 00:00000000 00000000     0        0 513 1 0 20 4 30 10 -1
   4: 0100007F:9C42 0100007F:1F90 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0
";
    /// The second process has connected to the first one, which accepted it over IPv6.
    const ACCEPTED: &str = "\
   0: 0000000000000000FFFF00000100007F:6D7C 0000000000000000FFFF00000100007F:9D00 01 00000000:00000000 00:00000000 00000000     0        0 514 1 0 20
   1: 0100007F:9D00 0100007F:6D7C 01 00000000:00000000 00:00000000 00000000     0        0 610 1 0 20 4 30 10 -1
";

    fn sockets(tcp: &[&str], own: &[u32]) -> Sockets {
        Sockets { unix: UNIX.into(), tcp: tcp.concat(), own: own.iter().map(u32::to_string).collect() }
    }

    const FIRST: &str = "@tmp/nccl-socket-0-8fd5c5c2a51b0f2";
    const SECOND: &str = "@tmp/nccl-socket-1-77d5c5c2a51b0f2";

    #[test]
    fn a_rank_above_0_has_others() {
        assert_eq!(sockets(&[ALONE], &[600, 610]).communicators(), [SECOND]);
        assert_eq!(sockets(&[], &[600]).communicators(), [SECOND]);
        assert_eq!(sockets(&[ALONE], &[500, 600]).communicators(), [FIRST, SECOND], "of two communicators");
    }

    #[test]
    fn rank_0_has_others_where_it_accepted_a_connection() {
        let first = [500, 501, 510, 511, 512, 513, 514];
        let none: [&str; 0] = [];
        assert_eq!(sockets(&[ALONE], &first).communicators(), none);
        assert_eq!(sockets(&[ALONE, ACCEPTED], &first).communicators(), [FIRST]);
        assert_eq!(
            sockets(&[ALONE, ACCEPTED], &first[..6]).communicators(),
            none,
            "another process accepted it"
        );
    }

    #[test]
    fn a_process_without_a_communicator_may_accept() {
        let none: [&str; 0] = [];
        assert_eq!(sockets(&[ALONE, ACCEPTED], &[501, 502, 510, 514]).communicators(), none);
        assert_eq!(Sockets::default().communicators(), none);
        for malformed in ["x", "a b c d e f 500", "a b c d e f 500 @tmp/nccl-socket-x-1", "0: 1 2"] {
            let sockets =
                Sockets { unix: malformed.into(), tcp: malformed.into(), own: ["500".into()].into() };
            assert_eq!(sockets.communicators(), none, "{malformed}");
        }
    }
}
