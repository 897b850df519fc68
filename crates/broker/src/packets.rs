//! Messages over a socket of packets. A message is text with descriptors; a long one travels in several packets.
//!
//! Each packet begins with a byte that says whether more follow. What a peer sends is bounded before it is kept, and
//! the descriptors of a message that is given up are closed.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Longer packets are not sent, and not read.
pub(crate) const PACKET_BYTES_MAX: usize = 32 << 10;

/// As many as the kernel passes at once.
const PACKET_DESCRIPTORS_MAX: usize = 253;

/// Longer messages are not sent, and not read.
pub(crate) const MESSAGE_BYTES_MAX: usize = 8 << 20;

/// More descriptors are not sent with a message, and not read.
pub(crate) const MESSAGE_DESCRIPTORS_MAX: usize = 1 << 17;

const MORE: u8 = b'+';
const LAST: u8 = b'.';

/// A whole message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) text: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// This process had no number left for some of its descriptors.
    pub(crate) is_cut: bool,
}

/// What a peer sent that is no message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PacketError {
    #[error("a packet is longer than {PACKET_BYTES_MAX} bytes; send longer messages in several")]
    LongPacket,
    #[error("a message is longer than {MESSAGE_BYTES_MAX} bytes; ask for less at once")]
    LongMessage,
    #[error("a message has more than {MESSAGE_DESCRIPTORS_MAX} descriptors; send fewer at once")]
    Descriptors,
    #[error("a packet begins with byte {0}; it has to be `+` or `.`")]
    Begin(u8),
    #[error("the socket cannot be read: {0}")]
    Socket(Errno),
}

/// What is there to read.
#[derive(Debug)]
pub(crate) enum Received {
    Nothing,
    End,
    /// A packet that is not the last of its message.
    Some,
    Message(Message),
}

/// Packets that have arrived, up to a message.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    text: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    is_cut: bool,
}

impl Inbox {
    /// Reads a packet, if there is one. `buffer` is as long as a packet may be.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffer: &mut [u8],
    ) -> Result<Received, PacketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut read =
            || retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags));
        // A peer that closes while it has not read all is seen first; its last words come after that.
        let received = match read() {
            Err(Errno::CONNRESET) => read(),
            other => other,
        };
        let received = match received {
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::End),
            other => other.map_err(PacketError::Socket)?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        self.is_cut |= received.flags.contains(ReturnFlags::CTRUNC);
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(PacketError::LongPacket);
        }
        match buffer[..received.bytes].split_first() {
            None => Ok(Received::End),
            Some((first, text)) => self.add(*first, text),
        }
    }

    fn add(&mut self, first: u8, text: &[u8]) -> Result<Received, PacketError> {
        if self.text.len() + text.len() > MESSAGE_BYTES_MAX {
            return Err(PacketError::LongMessage);
        }
        if self.descriptors.len() > MESSAGE_DESCRIPTORS_MAX {
            return Err(PacketError::Descriptors);
        }
        self.text.extend_from_slice(text);
        match first {
            MORE => Ok(Received::Some),
            LAST => {
                let Self { text, descriptors, is_cut } = std::mem::take(self);
                Ok(Received::Message(Message { text, descriptors, is_cut }))
            }
            other => Err(PacketError::Begin(other)),
        }
    }
}

/// What became of the packets of an [`Outbox`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flushed {
    All,
    /// The peer has to read first.
    Blocked,
    /// Too many descriptors of this user are on their way between processes: try again soon.
    Crowded,
}

/// Packets that have not left yet.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    packets: VecDeque<Packet>,
    bytes: usize,
}

#[derive(Debug)]
struct Packet {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Outbox {
    /// Adds a message. Its descriptors are closed here when they have left.
    pub(crate) fn push(&mut self, text: &[u8], descriptors: Vec<OwnedFd>) {
        let mut pieces = text.chunks(PACKET_BYTES_MAX - 1);
        let count = pieces.len().max(descriptors.len().div_ceil(PACKET_DESCRIPTORS_MAX)).max(1);
        let mut descriptors = descriptors.into_iter();
        for nth in 1..=count {
            let mut bytes = vec![if nth == count { LAST } else { MORE }];
            bytes.extend_from_slice(pieces.next().unwrap_or_default());
            self.bytes += bytes.len();
            let descriptors = descriptors.by_ref().take(PACKET_DESCRIPTORS_MAX).collect();
            self.packets.push_back(Packet { bytes, descriptors });
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sends what the socket takes now.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<Flushed, Errno> {
        while let Some(packet) = self.packets.front() {
            match packet.send(socket) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Ok(Flushed::Blocked),
                Err(Errno::TOOMANYREFS) => return Ok(Flushed::Crowded),
                Err(error) => return Err(error),
            }
            self.bytes -= packet.bytes.len();
            self.packets.pop_front();
        }
        Ok(Flushed::All)
    }
}

impl Packet {
    fn send(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let descriptors: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let rights = SendAncillaryMessage::ScmRights(&descriptors);
        let mut space = vec![MaybeUninit::uninit(); rights.size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(rights) {
            return Err(Errno::MSGSIZE);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        retry_on_intr(|| sendmsg(socket, &[IoSlice::new(&self.bytes)], &mut control, flags)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
    }

    /// Sends and reads by turns until a message is whole.
    fn pass(text: &[u8], descriptors: usize) -> (Message, usize) {
        let (from, to) = pair();
        let (mut outbox, mut inbox, mut packets) = (Outbox::default(), Inbox::default(), 0);
        outbox.push(text, files(descriptors));
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        loop {
            outbox.flush(from.as_fd()).unwrap();
            match inbox.receive(to.as_fd(), &mut buffer).unwrap() {
                Received::Some => packets += 1,
                Received::Message(message) => return (message, packets + 1),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_message_arrives_whole_whatever_its_length() {
        for (bytes, descriptors, packets) in [
            (0, 0, 1),
            (1, 253, 1),
            (PACKET_BYTES_MAX - 1, 1, 1),
            (PACKET_BYTES_MAX, 0, 2),
            (10, 254, 2),
            (5 * PACKET_BYTES_MAX, 600, 6),
            // More than a socket takes at once.
            (40 * PACKET_BYTES_MAX, 0, 41),
        ] {
            let text: Vec<u8> = b"poorwill".iter().copied().cycle().take(bytes).collect();
            let (message, used) = pass(&text, descriptors);
            assert!(message.text == text && !message.is_cut, "{bytes} {descriptors}");
            assert_eq!((message.descriptors.len(), used), (descriptors, packets));
        }
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (from, to) = pair();
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let mut read = |bytes: &[u8]| {
            rustix::io::write(&from, bytes).unwrap();
            Inbox::default().receive(to.as_fd(), &mut buffer)
        };
        assert!(matches!(read(b"{}"), Err(PacketError::Begin(b'{'))));
        assert!(matches!(read(&vec![b'+'; PACKET_BYTES_MAX + 1]), Err(PacketError::LongPacket)));
        let mut inbox = Inbox::default();
        let piece = vec![b'a'; PACKET_BYTES_MAX];
        let mut packets = 0;
        while inbox.add(MORE, &piece).is_ok() {
            packets += 1;
        }
        assert_eq!(packets, MESSAGE_BYTES_MAX / PACKET_BYTES_MAX);
    }

    #[test]
    fn a_peer_that_ends_is_seen_after_its_last_words() {
        let (from, to) = pair();
        let mut outbox = Outbox::default();
        outbox.push(b"last", Vec::new());
        outbox.flush(from.as_fd()).unwrap();
        rustix::io::write(&to, b".never read").unwrap();
        drop(from);
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let mut inbox = Inbox::default();
        let first = inbox.receive(to.as_fd(), &mut buffer).unwrap();
        assert!(matches!(first, Received::Message(message) if message.text == b"last"));
        assert!(matches!(inbox.receive(to.as_fd(), &mut buffer).unwrap(), Received::End));
    }
}
