//! The meter that knows what is lent, over figures and lenders that a test sets, and over a real broker.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use poorwill::broker::{Client, Hello, LentChunk};
use poorwill_rotate::lending::{
    BrokerLink, LendError, Lender, Lenders, Lent, LentTotals, MemoryNames, ServedBroker,
};
use poorwill_rotate::measure::{GpuMemory, LentAs, Measured, Meter, MeterError, WithLent};
use poorwill_rotation_policy::Gpu;
use poorwill_testkit::watchdog::{TEST_TIMEOUT, watched};

use super::measure::measured;

const TOTAL: u64 = 100;

/// GPUs with this much free.
#[derive(Debug)]
struct Free(Vec<u64>);

impl Meter for Free {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        let memory = |gpu: &Gpu| {
            let free = self.0.get(gpu.0).ok_or(MeterError { gpu: *gpu, reason: "none".to_owned() })?;
            Ok(GpuMemory::new(*free, TOTAL))
        };
        Box::pin(std::future::ready(gpus.iter().map(memory).collect()))
    }
}

/// What processes lend of which GPU, and what they were asked for.
#[derive(Debug, Default)]
struct Scripted {
    lends: Vec<(u32, &'static str, u64)>,
    is_silent: bool,
    asked: Mutex<Vec<(String, u64, Vec<u32>)>>,
}

impl Lenders for Scripted {
    fn lent(&self) -> Result<Lent, LendError> {
        if self.is_silent {
            return Err(LendError("silent".to_owned()));
        }
        let lender = |(pid, memory, bytes): &(u32, &str, u64)| Lender {
            memory: (*memory).to_owned(),
            pid: *pid,
            reclaimable_bytes: *bytes,
        };
        let totals = LentTotals { lent_bytes: 7, ..LentTotals::default() };
        Ok(Lent { lenders: self.lends.iter().map(lender).collect(), totals })
    }

    fn free(&self, memory: &str, bytes: u64, spared: &[u32]) -> Result<u64, LendError> {
        self.asked.lock().unwrap().push((memory.to_owned(), bytes, spared.to_vec()));
        Ok(bytes)
    }
}

/// The first two GPUs have names.
fn names() -> MemoryNames {
    Arc::new(|gpu| ["a", "b"].get(gpu.0).map(|name| (*name).to_owned()))
}

fn meter(free: &[u64], counts: LentAs, lenders: &Arc<Scripted>) -> WithLent {
    WithLent::new(Arc::new(Free(free.to_vec())), counts, Arc::<Scripted>::clone(lenders), names())
}

fn memory(free_bytes: u64, reclaimable_bytes: u64) -> GpuMemory {
    GpuMemory { free_bytes, reclaimable_bytes, total_bytes: TOTAL }
}

#[test]
fn what_is_lent_is_reclaimable_however_the_meter_counts_it() {
    let lends = vec![(1, "a", 30), (2, "a", 10), (2, "b", 5), (3, "c", 50)];
    let lenders = Arc::new(Scripted { lends, ..Scripted::default() });
    let used = meter(&[20, 100, 9], LentAs::Used, &lenders);
    let all = measured(&used, &[1, 0, 2]).unwrap();
    // All of the second one is free, so nothing of it can be lent. The third one has no name.
    assert_eq!(all, [memory(100, 0), memory(20, 40), memory(9, 0)]);
    assert_eq!(all[1].available_bytes(), 60);
    let free = meter(&[60, 3], LentAs::Free, &lenders);
    assert_eq!(measured(&free, &[0, 1]).unwrap(), [memory(20, 40), memory(0, 3)]);
    assert!(measured(&free, &[2]).is_err());
}

#[test]
fn a_silent_broker_lends_nothing() {
    let lends = vec![(1, "a", 30)];
    let lenders = Arc::new(Scripted { lends, is_silent: true, ..Scripted::default() });
    let meter = meter(&[20], LentAs::Used, &lenders);
    assert_eq!(measured(&meter, &[0]).unwrap(), [memory(20, 0)]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runtime.block_on(meter.lent_totals()), None);
    runtime.block_on(meter.clear(&[Gpu(0)], None, Vec::new()));
    assert!(lenders.asked.lock().unwrap().is_empty());
}

/// What is asked for, before processes 1 and 3 take memory of both GPUs.
fn cleared(need: Option<Vec<u64>>) -> Vec<(String, u64, Vec<u32>)> {
    let lends = vec![(1, "a", 30), (2, "a", 40), (3, "b", 20)];
    let lenders = Arc::new(Scripted { lends, ..Scripted::default() });
    let meter = meter(&[10, 80], LentAs::Used, &lenders);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(meter.clear(&[Gpu(0), Gpu(1)], need, vec![1, 3]));
    std::mem::take(&mut *lenders.asked.lock().unwrap())
}

#[test]
fn others_give_up_what_is_lacking_beside_the_own_and_the_free() {
    let of_a = |bytes| vec![("a".to_owned(), bytes, vec![1, 3])];
    assert_eq!(cleared(Some(vec![41, 100])), of_a(1));
    assert_eq!(cleared(Some(vec![40, 100])), []);
    // Others lend nothing of the second GPU.
    assert_eq!(cleared(Some(vec![100, 101])), of_a(60));
    assert_eq!(cleared(None), of_a(u64::MAX));
}

fn lend(path: &Path, memory: &str, bytes: &[u64]) -> Client {
    let hello = Hello { device: memory.to_owned(), name: "engine".to_owned() };
    let client = Client::connect(path, &hello, TEST_TIMEOUT).unwrap();
    let chunk = |(id, bytes): (u64, &u64)| {
        let descriptor: OwnedFd = File::open("/dev/null").unwrap().into();
        LentChunk { id, bytes: *bytes, is_dropped: false, descriptor }
    };
    client.lend((0..).zip(bytes).map(chunk).collect()).unwrap();
    client
}

#[test]
fn a_link_knows_what_a_broker_has_and_finds_the_next_one() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let link = BrokerLink::to(path.clone(), TEST_TIMEOUT);
        assert!(link.lent().unwrap_err().to_string().contains("broker.sock"));
        for _ in 0..2 {
            let broker = ServedBroker::start(&path).unwrap();
            assert!(ServedBroker::start(&path).is_none(), "it is served already");
            let client = lend(&path, "a", &[30, 20, 10]);
            client.on_give_up(|bytes| bytes).unwrap();
            client.announce(40).unwrap();
            let lent = link.lent().unwrap();
            let pid = std::process::id();
            assert_eq!(lent.lenders, [Lender { memory: "a".to_owned(), pid, reclaimable_bytes: 100 }]);
            assert_eq!((lent.totals.lent_bytes, lent.totals.taken_bytes), (60, 0));
            assert_eq!(link.free("a", u64::MAX, &[pid]), Ok(0), "it is spared");
            assert_eq!(link.free("b", u64::MAX, &[]), Ok(0));
            let some = link.free("a", 15, &[]).unwrap();
            assert!((15..60).contains(&some), "{some}");
            assert_eq!(link.free("a", u64::MAX, &[]), Ok(100 - some), "what was announced is given up");
            assert_eq!(link.lent().unwrap().lenders, []);
            assert!(client.take_back(None).unwrap().is_empty());
            broker.end();
            assert!(link.lent().is_err());
        }
    });
}
