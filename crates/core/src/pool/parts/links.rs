//! Streams over other devices' links, for wakes.
//!
//! To make one takes a while, and holds up other calls to the driver meanwhile: a wake that did so took longer than one
//! without. So the first sleep that stores much has them made behind it, and they stay until the pool closes.
//!
//! Promise: without them a wake does the same. A link that fails, or is found not to pay, is not used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::driver::{Driver, DriverErrorKind, StreamId};

/// Wakes in a row that are not faster with links, after which these are given up.
const MISSES_MAX: usize = 3;

/// Doublings of the sleeps between two tries.
const REFUSALS_MAX: u32 = 8;

#[derive(Debug, Default)]
pub(in crate::pool) struct Links(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    is_closed: bool,
    /// Whether wakes are faster with them, once that is known.
    pay: Option<bool>,
    /// Wakes in a row that were not.
    misses: usize,
    /// How often a device had no memory for one, and for how many sleeps it is not asked again.
    refusals: u32,
    sleeps_left: u32,
    links: Vec<Link>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Link {
    #[default]
    Closed,
    Opening,
    Open(StreamId),
    /// Not to be used again; its stream, while it is there.
    Lost(Option<StreamId>),
}

impl Links {
    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.0)
    }

    /// Where copies may be in flight.
    pub(in crate::pool) fn streams(&self) -> Vec<StreamId> {
        self.table().links.iter().filter_map(Link::stream).collect()
    }

    /// Numbers of those that are open, or will be.
    pub(in crate::pool) fn usable(&self) -> Vec<usize> {
        let table = self.table();
        let is_usable = |link: &Link| matches!(link, Link::Open(_) | Link::Opening);
        (0..table.links.len()).filter(|nth| is_usable(&table.links[*nth])).collect()
    }

    /// That for copies, while it is open.
    pub(in crate::pool) fn stream(&self, nth: usize) -> Option<StreamId> {
        match self.table().links.get(nth) {
            Some(Link::Open(stream)) => Some(*stream),
            _ => None,
        }
    }

    pub(in crate::pool) fn lose(&self, nth: usize) {
        if let Some(link) = self.table().links.get_mut(nth) {
            *link = Link::Lost(link.stream());
        }
    }

    /// Whether it is still to be found out if they pay.
    pub(in crate::pool) fn are_unknown(&self) -> bool {
        self.table().pay.is_none()
    }

    /// What a wake has found. Those that do not pay several times are lost: once may be a busy machine.
    pub(in crate::pool) fn judge(&self, pays: bool) {
        let mut table = self.table();
        table.misses = if pays { 0 } else { table.misses + 1 };
        if pays || table.misses == MISSES_MAX {
            table.pay = Some(pays);
        }
        if table.pay == Some(false) {
            table.links.iter_mut().for_each(|link| *link = Link::Lost(link.stream()));
        }
    }

    /// Opens those of `count` that are closed. Returns at once.
    pub(in crate::pool) fn open_all(&self, count: usize, driver: &Arc<dyn Driver>) {
        let mut table = self.table();
        // Each try takes memory of the other device for a moment.
        table.sleeps_left = table.sleeps_left.saturating_sub(1);
        if table.sleeps_left > 0 || table.pay == Some(false) {
            return;
        }
        table.links.resize(count, Link::Closed);
        let closed: Vec<usize> = (0..count).filter(|nth| table.links[*nth] == Link::Closed).collect();
        closed.iter().for_each(|nth| table.links[*nth] = Link::Opening);
        drop(table);
        closed.into_iter().for_each(|nth| self.open(nth, driver));
    }

    /// None is opened from now on.
    pub(in crate::pool) fn begin_close(&self) {
        self.table().is_closed = true;
    }

    /// Nothing may be in flight there.
    pub(in crate::pool) fn close(&self, driver: &dyn Driver) {
        let mut table = self.table();
        table.is_closed = true;
        let streams: Vec<StreamId> = table.links.iter().filter_map(Link::stream).collect();
        table.links.iter_mut().for_each(|link| *link = Link::Lost(None));
        drop(table);
        streams.into_iter().for_each(|stream| destroy(driver, stream));
    }

    fn open(&self, nth: usize, driver: &Arc<dyn Driver>) {
        let (table, driver) = (Arc::clone(&self.0), Arc::clone(driver));
        let work = move || {
            let made = driver.stream_create_over_link(nth);
            let mut table = lock(&table);
            // It may have been given up meanwhile.
            let is_wanted = !table.is_closed && table.links[nth] == Link::Opening;
            let (link, unwanted) = match made {
                Ok(stream) if !is_wanted => (table.links[nth], Some(stream)),
                Ok(stream) => (Link::Open(stream), None),
                // It may have memory another time.
                Err(error) if matches!(error.kind, DriverErrorKind::Unsupported { .. }) => {
                    table.refusals += 1;
                    table.sleeps_left = 1 << table.refusals.min(REFUSALS_MAX);
                    (Link::Closed, None)
                }
                Err(_) => (Link::Lost(None), None),
            };
            table.links[nth] = link;
            drop(table);
            unwanted.into_iter().for_each(|stream| destroy(&*driver, stream));
        };
        if thread::Builder::new().name("poorwill-link".into()).spawn(work).is_err() {
            self.table().links[nth] = Link::Closed; // No thread can be started.
        }
    }
}

impl Link {
    fn stream(&self) -> Option<StreamId> {
        match self {
            Self::Open(stream) | Self::Lost(Some(stream)) => Some(*stream),
            Self::Closed | Self::Opening | Self::Lost(None) => None,
        }
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream that cannot be destroyed ends with the driver.
fn destroy(driver: &dyn Driver, stream: StreamId) {
    let _ = driver.stream_destroy(stream);
}
