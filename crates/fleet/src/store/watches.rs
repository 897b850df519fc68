//! The answer of a watch: a line for each revision that changed something, as long as the client reads.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::calls::{KeySpan, WatchedSpan};
use super::gateway::{event_json, header, lean, number};
use super::state::Store;

/// Where a watch is.
#[derive(Debug)]
pub(super) struct WatchState {
    span: KeySpan,
    from: u64,
    cluster: u64,
}

impl WatchState {
    /// From the next revision on, where the call names none. Returns the line that says that it has begun.
    pub(super) fn begin(store: &Store, call: WatchedSpan) -> (Self, Bytes) {
        let WatchedSpan { key, range_end, start_revision } = call;
        let from = if start_revision == 0 { store.revision() + 1 } else { start_revision };
        let created = json!({ "header": header(store), "created": true });
        (Self { span: KeySpan { key, range_end }, from, cluster: store.cluster() }, line(&created))
    }

    /// The next changes, if there are any, and whether it goes on behind them.
    pub(super) fn next(&mut self, store: &Store) -> (Option<Bytes>, bool) {
        if store.cluster() != self.cluster {
            return (None, false);
        }
        let changes = match store.changes(&self.span, self.from) {
            Ok(changes) => changes,
            Err(compacted) => {
                let compacted = number(compacted);
                let ended =
                    json!({ "header": header(store), "canceled": true, "compact_revision": compacted });
                return (Some(line(&ended)), false);
            }
        };
        self.from = self.from.max(store.revision() + 1);
        let events: Vec<Value> = changes.into_iter().map(event_json).collect();
        let has_some = !events.is_empty();
        (has_some.then(|| line(&lean([("header", header(store)), ("events", events.into())]))), true)
    }
}

fn line(result: &Value) -> Bytes {
    format!("{}\n", json!({ "result": result })).into()
}

/// The lines, as they come.
#[derive(Debug)]
pub(super) struct WatchBody(pub(super) mpsc::Receiver<Bytes>);

impl Body for WatchBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}
