//! The service over engines that lend what they hold while they sleep: real tasks in virtual time.

use std::sync::Arc;
use std::time::Duration;

use poorwill_rotate::config::Config;
use poorwill_rotate::service::{ModelCommand, Service, Snapshot, SwapPath};
use poorwill_rotation_policy::StageName;
use tokio::time::{sleep, timeout};

use super::mock::Machine;

/// After this time a test has failed.
const STUCK: Duration = Duration::from_secs(60);
const GIB: u64 = 1 << 30;

fn start(machine: &Arc<Machine>) -> Service {
    let mut text = "[lend]\n[every_model]\nresidence_min = \"0s\"\nturn_max = \"50ms\"\nwait_max = \"20s\"\n\
                    release_max = \"300ms\"\n"
        .to_owned();
    for (nth, name) in ["a", "b", "c"].iter().enumerate() {
        text += &format!(
            "[[model]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{}\"\nneed = \"6GiB\"\n",
            9000 + nth
        );
    }
    let config = Config::parse(&text, &|_| Err("no secrets here".to_owned())).unwrap();
    Service::start_with(config, machine.lending_meter(), &*machine.connect()).unwrap()
}

async fn serve(service: &Service, machine: &Machine, name: &str) {
    let (id, model) = service.find(name).unwrap();
    let admission = timeout(STUCK, service.admit(id)).await.unwrap().unwrap();
    assert!(machine.is_right(&model.url), "a request went to {name}, which is not well");
    drop(admission);
}

async fn asleep(service: &Service, name: &str) -> Snapshot {
    assert!(service.command(name, ModelCommand::Sleep));
    let sleeping = async {
        loop {
            let now = service.snapshot().await;
            let is_one = |stage| now.models.iter().any(|one| one.name == name && one.stage == stage);
            if is_one(StageName::Asleep) {
                return now;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(STUCK, sleeping).await.unwrap()
}

fn failures(now: &Snapshot) -> Vec<Option<String>> {
    now.models.iter().map(|model| model.last_failure.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_sleep_that_lends_is_one_and_others_come_where_it_was() {
    let machine = Machine::new(14 * GIB, 6 * GIB);
    let service = start(&machine);
    for _ in 0..3 {
        for name in ["a", "b", "c"] {
            serve(&service, &machine, name).await;
        }
    }
    let now = asleep(&service, "c").await;
    assert_eq!(failures(&now), [None, None, None]);
    assert!(!machine.was_overcommitted(), "what others lent was given up before each wake");
    assert!(now.swaps.iter().all(|swap| swap.path != SwapPath::Cold));
    let gpu = &now.gpus[0];
    // Two of the three fit beside each other, and nothing but them is in use.
    let lent = gpu.reclaimable_bytes.unwrap();
    assert!(lent >= 6 * GIB, "{lent}");
    assert_eq!(gpu.free_bytes.unwrap() + lent + gpu.promised_bytes, 14 * GIB);
    let totals = machine.lent_totals();
    assert!(totals.taken_bytes > 0);
    assert_eq!(now.lending, Some(totals));
}

#[tokio::test(start_paused = true)]
async fn no_more_is_given_up_than_a_wake_needs() {
    let machine = Machine::new(24 * GIB, 6 * GIB);
    let service = start(&machine);
    // What a first wake takes is not known, so all others give up what they lend.
    for (name, taken) in [("a", 0), ("b", 6), ("c", 12), ("a", 12), ("b", 12), ("c", 12)] {
        serve(&service, &machine, name).await;
        asleep(&service, name).await;
        assert_eq!(machine.lent_totals().taken_bytes, taken * GIB, "{name}");
    }
    // There is space for one of them beside what all three lend.
    let now = service.snapshot().await;
    assert_eq!(now.gpus[0].reclaimable_bytes, Some(18 * GIB));
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_of_the_broker_models_take_turns_as_ever() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine);
    serve(&service, &machine, "a").await;
    asleep(&service, "a").await;
    machine.end_broker();
    for name in ["b", "c", "a", "b"] {
        serve(&service, &machine, name).await;
    }
    let now = asleep(&service, "b").await;
    assert_eq!(failures(&now), [None, None, None]);
    let gpu = &now.gpus[0];
    assert_eq!((gpu.free_bytes, gpu.reclaimable_bytes), (Some(10 * GIB), Some(0)));
    assert_eq!(now.lending, None);
    assert!(!machine.was_overcommitted());
}
