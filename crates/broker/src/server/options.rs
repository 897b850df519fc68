//! How a broker behaves, and why it ends.

use std::time::Duration;

use crate::packets::MESSAGE_BYTES_MAX;

/// How a broker behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BrokerOptions {
    /// It ends when it has had no connection for so long.
    pub idle: Duration,
    /// A connection ends if it has not said so soon what it wants.
    pub hello: Duration,
    /// A client that leaves more than this unread is disconnected.
    pub queue_bytes_max: usize,
    /// More connections are refused.
    pub connections_max: usize,
}

impl Default for BrokerOptions {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(60),
            hello: Duration::from_secs(10),
            queue_bytes_max: 2 * MESSAGE_BYTES_MAX,
            connections_max: 1024,
        }
    }
}

/// Why a broker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokerEnd {
    /// It had no connection for as long as its options say.
    Idle,
    /// It was stopped.
    Stopped,
}
