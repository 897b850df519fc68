//! A peer of a broker that sends what it likes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use poorwill_testkit::watchdog::TEST_TIMEOUT;
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::support::DEVICE;

pub(crate) struct Peer(pub(crate) OwnedFd);

impl Peer {
    pub(crate) fn connect(path: &Path) -> Self {
        let socket = socket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        // A broker that never answers fails the test.
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(TEST_TIMEOUT)).unwrap();
        Self(socket)
    }

    /// A client's connection.
    pub(crate) fn hello(path: &Path) -> Self {
        let peer = Self::connect(path);
        peer.send(format!(r#".{{"request":"hello","version":1,"device":"{DEVICE}","name":"peer"}}"#), &[])
            .unwrap();
        assert!(peer.answer().unwrap().contains("welcome"));
        peer
    }

    /// Sends a packet, with its first byte.
    pub(crate) fn send(&self, packet: impl AsRef<[u8]>, descriptors: &[OwnedFd]) -> Result<(), Errno> {
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        let packet = [IoSlice::new(packet.as_ref())];
        rustix::net::sendmsg(&self.0, &packet, &mut control, SendFlags::NOSIGNAL).map(drop)
    }

    /// The next packet, without descriptors. `None`: the broker has closed.
    pub(crate) fn answer(&self) -> Option<String> {
        let mut buffer = vec![0; 64 << 10];
        let mut read = || {
            let mut control = rustix::net::RecvAncillaryBuffer::default();
            let mut into = [IoSliceMut::new(&mut buffer)];
            rustix::net::recvmsg(&self.0, &mut into, &mut control, RecvFlags::empty())
        };
        let read = match read() {
            // What was sent last comes after this.
            Err(Errno::CONNRESET) => read(),
            other => other,
        };
        assert!(!matches!(read, Err(Errno::AGAIN)), "the broker does not answer");
        let bytes = read.map_or(0, |read| read.bytes);
        (bytes > 0).then(|| String::from_utf8(buffer[..bytes].to_vec()).unwrap())
    }
}

pub(crate) fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}
