//! Requests that wait at a node which does not come to them.
//!
//! A router chooses once, by what it knows then. The model may fall asleep behind that, and others have their turns, while
//! it is awake on another node. Then the request is taken back and sent there: its node withdraws what its client leaves.

use std::sync::Arc;
use std::time::Duration;

use poorwill_fleet::name::ModelName;
use poorwill_fleet::records::Stage;
use tokio::sync::watch;
use tokio::time::sleep;

use super::choose::ready_in_ms;
use super::table::{Copy, RouteTable};

/// A request waits for so many times what its model should have taken.
const WAIT_FACTOR: u64 = 2;
/// At least so long, since what nodes publish is late.
const WAIT_MIN_MS: u64 = 1_000;
const WAIT_MAX_MS: u64 = 60_000;

/// A request at a node.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) model: ModelName,
    /// Its name in the request: other nodes may not know that.
    pub(super) served_as: String,
    pub(super) url: String,
    /// Where it was sent before.
    pub(super) tried: Vec<String>,
}

/// Waits until a request that goes to this node now has waited for long. Its model has no request that runs there, is not
/// awake there, and is awake on a node that it was not sent to.
pub(super) async fn stand_still(mut table: watch::Receiver<Arc<RouteTable>>, sent: Sent) {
    let ready_ms = {
        let table = table.borrow();
        sent.here(&table).map_or(0, |copy| ready_in_ms(copy.record.stage, copy.record.costs))
    };
    let wait_ms = ready_ms.saturating_mul(WAIT_FACTOR).clamp(WAIT_MIN_MS, WAIT_MAX_MS);
    // Many may wait there, and not all are to leave at once.
    sleep(Duration::from_millis(wait_ms + fastrand::u64(..=wait_ms / 2))).await;
    if table.wait_for(|table| sent.is_better_elsewhere(table)).await.is_err() {
        // The router ends, and its requests with it.
        std::future::pending::<()>().await;
    }
}

impl Sent {
    fn here<'t>(&self, table: &'t RouteTable) -> Option<&'t Copy> {
        table.copies(&self.model).iter().find(|copy| copy.url == self.url)
    }

    fn is_better_elsewhere(&self, table: &RouteTable) -> bool {
        // One that is withdrawn finishes what runs, and gives back what waits.
        let Some(here) = self.here(table) else { return false };
        let is_open = |copy: &Copy| {
            let is_other = copy.url != self.url && !self.tried.contains(&copy.url);
            is_other && copy.record.stage == Stage::Awake && copy.is_named(&self.model, &self.served_as)
        };
        let waits = here.record.stage != Stage::Awake && here.record.requests.running == 0;
        waits && table.copies(&self.model).iter().any(is_open)
    }
}

#[cfg(test)]
mod tests {
    use poorwill_fleet::records::{Costs, ModelRecord};
    use tokio::time::{Instant, timeout};

    use super::*;

    fn table(stages: [Stage; 2]) -> Arc<RouteTable> {
        let copy = |(at, stage): (usize, Stage)| {
            let mut record = ModelRecord::new(stage, vec![0]);
            record.costs = Costs { wake_ms: Some(2_000), sleep_ms: Some(1_000), ..Costs::default() };
            Copy { node: format!("n{at}").parse().unwrap(), url: format!("http://n{at}"), record }
        };
        Arc::new(RouteTable::of_copies("m", stages.into_iter().enumerate().map(copy).collect()))
    }

    fn waiting(
        table: &watch::Receiver<Arc<RouteTable>>,
        sent: Sent,
    ) -> impl Future<Output = ()> + Send + use<> {
        stand_still(table.clone(), sent)
    }

    fn sent() -> Sent {
        let (model, url) = ("m".parse().unwrap(), "http://n0".to_owned());
        Sent { model, served_as: "m".to_owned(), url, tried: Vec::new() }
    }

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn a_request_goes_on_once_its_model_is_awake_elsewhere_only() {
        for (at_first, then, after_ms) in [
            // Twice a wake. It falls asleep here, and is awake there.
            ([Stage::Asleep; 2], [Stage::Asleep, Stage::Awake], Some(4_000)),
            ([Stage::Sleeping, Stage::Asleep], [Stage::Asleep, Stage::Awake], Some(6_000)),
            ([Stage::Awake, Stage::Awake], [Stage::Sleeping, Stage::Awake], Some(WAIT_MIN_MS)),
            ([Stage::Stopped; 2], [Stage::Starting, Stage::Awake], Some(WAIT_MAX_MS)),
            // It is awake here, or nowhere.
            ([Stage::Asleep; 2], [Stage::Awake, Stage::Awake], None),
            ([Stage::Asleep; 2], [Stage::Asleep, Stage::Waking], None),
        ] {
            let (sender, receiver) = watch::channel(table(at_first));
            let (waiting, began) = (tokio::spawn(waiting(&receiver, sent())), Instant::now());
            tokio::task::yield_now().await;
            sender.send_replace(table(then));
            let ended = timeout(LONG, waiting).await.is_ok();
            let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
            match after_ms {
                Some(after_ms) => {
                    assert!(
                        ended && (after_ms..=after_ms * 3 / 2 + 1).contains(&took_ms),
                        "{then:?}: {took_ms}"
                    );
                }
                None => assert!(!ended, "{then:?}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_runs_stays_and_so_does_what_no_other_node_takes() {
        let ready = || watch::channel(table([Stage::Asleep, Stage::Awake]));
        let (_sender, receiver) = ready();
        assert!(timeout(LONG, waiting(&receiver, sent())).await.is_ok());
        let tried = Sent { tried: vec!["http://n1".to_owned()], ..sent() };
        assert!(timeout(LONG, waiting(&receiver, tried)).await.is_err());
        // An adapter of this node's.
        let adapter = Sent { served_as: "lora".to_owned(), ..sent() };
        assert!(timeout(LONG, waiting(&receiver, adapter)).await.is_err());
        // It may be one of these. Or its copy is withdrawn, and its node says so itself.
        for (running, url) in [(1, "http://n0"), (0, "http://n2")] {
            let (sender, receiver) = ready();
            let mut copies = sender.borrow().copies(&sent().model).to_vec();
            copies[0].record.requests.running = running;
            sender.send_replace(Arc::new(RouteTable::of_copies("m", copies)));
            let sent = Sent { url: url.to_owned(), ..sent() };
            assert!(timeout(LONG, waiting(&receiver, sent)).await.is_err(), "{running}, {url}");
        }
    }
}
