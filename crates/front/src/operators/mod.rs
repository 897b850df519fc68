//! The frame of a listener for operators: who may ask, how long and how much, errors, and web pages.
//!
//! Promises:
//!
//! - Where keys are configured, only a page's own text, `/health` and `/fleet/ready` are served without a key. A changed
//!   key takes effect at once.
//! - A page of another site in an operator's browser reads nothing and commands nothing.
//! - Heads, bodies and connections of each client are bounded.
//! - A command completes even if its client disconnects.
//! - At shutdown, answers may take up to [`DRAIN_MAX`].

mod answer;
mod body;
pub mod guard;
mod limits;
pub mod listener;
pub mod page;
mod removed;

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::gauge::Gauge;

pub use self::answer::ControlError;
pub use self::body::{read_body, to_completion};
pub use self::guard::Access;
pub use self::limits::{BODY_MAX_BYTES, DRAIN_MAX};
pub use self::removed::Removed;

/// The type of an answer with metrics.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A metric that is a whole number.
pub type Number = Gauge<u64, AtomicU64>;
/// A metric that is a time.
pub type Seconds = Gauge<f64, AtomicU64>;
