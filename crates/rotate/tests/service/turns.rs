//! The service with mock engines: real tasks in virtual time, no processes. The clock advances when all tasks wait, so
//! no step is late on a slow machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use poorwill_rotate::config::{Config, Lend, MemorySource};
use poorwill_rotate::measure::{Held, Measured, Meter};
use poorwill_rotate::service::{
    EventKind, ModelCommand, ModelNow, PromiseNow, Service, ServiceError, Snapshot, SwapPath,
};
use poorwill_rotation_policy::{Gpu, Refusal, StageName};
use tokio::time::{Instant, timeout};

use super::mock::{Fault, Machine};

/// Longer than any test takes.
const TIMEOUT: Duration = Duration::from_secs(60);

const GIB: u64 = 1 << 30;

/// Models on one GPU, with rules that suit a test.
fn config(names: &[&str], wait_max: &str) -> Config {
    let mut text = format!(
        "[every_model]\nresidence_min = \"0s\"\nturn_max = \"50ms\"\npause_min = \"50ms\"\npause_max = \"200ms\"\n\
         drain_max = \"300ms\"\nwait_max = \"{wait_max}\"\n"
    );
    for step in ["sleep", "release", "wake", "canary"] {
        text += &format!("{step}_max = \"300ms\"\n");
    }
    for (nth, name) in names.iter().enumerate() {
        text += &format!(
            "\n[[model]]\nname = \"{name}\"\naliases = [\"{name}-alias\"]\nurl = \"http://127.0.0.1:{}\"\n",
            9000 + nth
        );
    }
    Config::parse(&text, &|_| Err("no secrets here".to_owned())).unwrap()
}

fn start(machine: &Arc<Machine>, config: Config) -> Service {
    let connect = machine.connect();
    Service::start_with(config, machine.meter(), &*connect).unwrap()
}

async fn until(service: &Service, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let probing = async {
        loop {
            let snapshot = service.snapshot().await;
            if is_so(&snapshot) {
                return snapshot;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    match timeout(TIMEOUT, probing).await {
        Ok(snapshot) => snapshot,
        Err(_) => panic!("never {what}: {:#?}", service.snapshot().await),
    }
}

fn is_ready(snapshot: &Snapshot, name: &str) -> bool {
    snapshot.models.iter().any(|model| model.name == name && model.is_ready)
}

async fn complete(service: &Service, machine: &Machine, name: &str) -> Result<(), Refusal> {
    let (id, model) = service.find(name).unwrap();
    let admission = service.admit(id).await.map_err(|refused| refused.refusal)?;
    assert!(machine.is_right(&model.url), "a request went to {name}, which is not well");
    tokio::time::sleep(Duration::from_millis(2)).await;
    drop(admission);
    Ok(())
}

/// Retries until it is served, as a client does.
async fn served_at_last(service: &Service, machine: &Machine, name: &str) {
    let asking = async {
        while complete(service, machine, name).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if timeout(TIMEOUT, asking).await.is_err() {
        panic!("{name} is never served: {:#?}", service.snapshot().await.models);
    }
}

/// Admitted requests, and all requests.
async fn requests_so_far(service: &Service) -> (u64, u64) {
    let models = service.snapshot().await.models;
    let admitted = models.iter().map(|model| model.admitted).sum();
    (admitted, admitted + models.iter().map(|model| model.refused).sum::<u64>())
}

#[tokio::test(start_paused = true)]
async fn models_take_turns_and_only_one_is_awake_where_one_fits() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b", "c"], "20s"));
    for round in 0..4 {
        for name in ["a", "b-alias", "c"] {
            let served = timeout(TIMEOUT, complete(&service, &machine, name)).await.unwrap();
            assert_eq!(served, Ok(()), "round {round}, {name}");
        }
    }
    let snapshot = service.snapshot().await;
    assert_eq!(snapshot.models.iter().map(|model| model.admitted).sum::<u64>(), 12);
    assert!(
        snapshot.swaps.iter().filter(|swap| swap.path == SwapPath::Hot).count() >= 8,
        "{:#?}",
        snapshot.swaps
    );
    assert_eq!(snapshot.gpus[0].total_bytes, Some(10 * GIB));
    let awake = PromiseNow { model: "c".to_owned(), bytes: 6 * GIB };
    assert_eq!(snapshot.gpus[0].models, [awake], "the last one has the memory");
    assert!(snapshot.models.iter().all(|model| model.held_bytes == Some(vec![6 * GIB])));
    assert_eq!(machine.awake_at_most(), 1);
    assert!(!machine.was_overcommitted());
}

#[tokio::test(start_paused = true)]
async fn a_swap_counts_those_that_left_for_it_and_the_wait() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b"], "20s"));
    complete(&service, &machine, "a").await.unwrap();
    let asked = Instant::now();
    complete(&service, &machine, "b").await.unwrap();
    let swap = service.snapshot().await.swaps[0].clone();
    assert_eq!(swap.model, "b");
    let [left] = &swap.left[..] else { panic!("{swap:#?}") };
    assert_eq!(left.model, "a");
    let of_leaving: Vec<StageName> = left.phases.iter().map(|(stage, _)| *stage).collect();
    assert!(of_leaving.ends_with(&[StageName::FallingAsleep, StageName::ReleasingMemory]), "{swap:#?}");
    let waited_s = swap.waited_s.unwrap();
    // Sums of seconds are rounded.
    assert!(swap.whole_s > swap.total_s && waited_s + 1e-6 >= swap.whole_s, "{swap:#?}");
    assert!(waited_s <= asked.elapsed().as_secs_f64(), "{swap:#?}");
    let idled = ModelCommand::Sleep;
    assert!(service.command("b", idled));
    until(&service, "asleep", |now| now.models[1].stage == StageName::Asleep).await;
    complete(&service, &machine, "a").await.unwrap();
    let swap = service.snapshot().await.swaps[0].clone();
    assert_eq!((swap.model.as_str(), swap.left.len()), ("a", 0), "b left before");
}

#[tokio::test(start_paused = true)]
async fn the_status_has_the_oldest_wait_and_what_swaps_take() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b"], "20s"));
    let costs = |model: &ModelNow| (model.wake_s, model.start_s, model.leave_s);
    for model in &service.snapshot().await.models {
        assert_eq!((model.oldest_wait_s, costs(model)), (None, (None, None, None)));
    }
    complete(&service, &machine, "a").await.unwrap();
    let running = service.admit(service.find("a").unwrap().0).await.unwrap();
    let mut waiting = std::pin::pin!(complete(&service, &machine, "b"));
    assert!(timeout(Duration::from_millis(30), waiting.as_mut()).await.is_err());
    let [a, b] = &service.snapshot().await.models[..] else { panic!("two models") };
    assert_eq!(a.oldest_wait_s, None);
    assert!((b.oldest_wait_s.unwrap() - 0.03).abs() < 0.002, "{b:#?}");
    drop(running);
    waiting.await.unwrap();
    let now = service.snapshot().await;
    let [a, b] = &now.models[..] else { panic!("two models") };
    assert_eq!(b.oldest_wait_s, None);
    let total_s = |name: &str| now.swaps.iter().find(|swap| swap.model == name).unwrap().total_s;
    for (model, wake_s) in [(a, total_s("a")), (b, total_s("b"))] {
        assert!((model.wake_s.unwrap() - wake_s).abs() < 0.002, "{model:#?} took {wake_s}");
    }
    let left_s: f64 = now.swaps[0].left[0].phases.iter().map(|(_, seconds)| seconds).sum();
    assert!(a.leave_s.unwrap() > 0.0 && a.leave_s.unwrap() <= left_s + 0.002, "{a:#?}");
    assert_eq!((b.leave_s, b.start_s), (None, None));
}

#[tokio::test(start_paused = true)]
async fn several_are_awake_where_they_fit() {
    let machine = Machine::new(20 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b", "c"], "20s"));
    for _ in 0..2 {
        for name in ["a", "b", "c"] {
            assert_eq!(timeout(TIMEOUT, complete(&service, &machine, name)).await.unwrap(), Ok(()));
        }
    }
    assert!(machine.awake_at_most() <= 3);
}

#[tokio::test(start_paused = true)]
async fn many_clients_at_once_all_get_an_answer() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b", "c"], "20s"));
    let clients = (0..200).map(|nth| {
        let (service, machine) = (service.clone(), Arc::clone(&machine));
        tokio::spawn(async move { complete(&service, &machine, ["a", "b", "c"][nth % 3]).await })
    });
    let served = timeout(TIMEOUT, futures_util::future::join_all(clients)).await.unwrap();
    assert!(served.into_iter().all(|one| one.unwrap() == Ok(())));
    // Far fewer swaps than requests: each turn serves all waiting requests.
    assert!(service.snapshot().await.swaps.len() < 100);
}

#[tokio::test(start_paused = true)]
async fn no_fault_lets_a_request_through_to_an_unhealthy_engine() {
    for set_fault in Fault::ALL {
        let machine = Machine::new(10 * GIB, 6 * GIB);
        let service = start(&machine, config(&["a", "b"], "1s"));
        for name in ["a", "b"] {
            assert_eq!(complete(&service, &machine, name).await, Ok(()), "{set_fault:?}");
        }
        machine.set_fault("http://127.0.0.1:9000", set_fault);
        // Served by a healthy engine, or refused with a known reason: `complete` asserts the first.
        for name in ["a", "b", "a"] {
            let _served_or_refused = timeout(TIMEOUT, complete(&service, &machine, name)).await.unwrap();
        }
        machine.clear_faults("http://127.0.0.1:9000");
        for name in ["a", "b"] {
            served_at_last(&service, &machine, name).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_requests_with_random_faults_end_right_or_are_refused() {
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
    let machine = Machine::new(14 * GIB, 6 * GIB);
    // Their need is configured. Otherwise a faulty engine could hide how much memory is free.
    let mut config = config(&NAMES, "1s");
    config.models.iter_mut().for_each(|model| model.rules.need_bytes = Some(6 * GIB));
    let service = start(&machine, config);
    // Their first answer is the reference: an engine that is wrong from the start cannot be detected.
    for name in NAMES {
        assert_eq!(complete(&service, &machine, name).await, Ok(()));
    }
    let (admitted_before, asked_before) = requests_so_far(&service).await;
    let liars = tokio::spawn({
        let machine = Arc::clone(&machine);
        async move {
            for turn in 0_usize.. {
                let url = format!("http://127.0.0.1:{}", 9000 + turn % 3);
                machine.set_fault(&url, Fault::ALL[turn * 5 % Fault::ALL.len()]);
                tokio::time::sleep(Duration::from_millis(40)).await;
                machine.clear_faults(&url);
            }
        }
    });
    let clients = (0..20).map(|nth| {
        let (service, machine) = (service.clone(), Arc::clone(&machine));
        tokio::spawn(async move {
            let mut served = 0;
            for turn in 0..50 {
                let name = NAMES[(nth * 7 + turn / 3) % NAMES.len()];
                // `complete` asserts that no request reaches an unhealthy engine.
                served += usize::from(complete(&service, &machine, name).await.is_ok());
            }
            served
        })
    });
    let all = timeout(TIMEOUT * 5, futures_util::future::join_all(clients)).await.unwrap();
    let served: usize = all.into_iter().map(|one| one.unwrap()).sum();
    liars.abort();
    assert!(served > 500, "only {served} were served");
    assert!(!machine.was_overcommitted(), "an engine woke without enough free memory");
    let (admitted, complete) = requests_so_far(&service).await;
    assert_eq!((admitted - admitted_before, complete - asked_before), (served as u64, 1000));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_gives_up_leaves_the_queue() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    machine.set_fault("http://127.0.0.1:9000", Fault::HangsInWake);
    let service = start(&machine, config(&["a"], "20s"));
    let (a, _) = service.find("a").unwrap();
    let waiting = tokio::spawn({
        let service = service.clone();
        async move { service.admit(a).await.map(drop) }
    });
    until(&service, "waits", |snapshot| snapshot.models[0].queued == 1).await;
    waiting.abort();
    until(&service, "gone", |snapshot| snapshot.models[0].queued == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_long_request_is_aborted_when_another_model_is_due() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b"], "20s"));
    let (a, _) = service.find("a").unwrap();
    let admission = service.admit(a).await.unwrap();
    let other = tokio::spawn({
        let (service, machine) = (service.clone(), Arc::clone(&machine));
        async move { complete(&service, &machine, "b").await }
    });
    timeout(TIMEOUT, admission.aborted.cancelled()).await.unwrap();
    assert!(!other.is_finished());
    drop(admission);
    assert_eq!(timeout(TIMEOUT, other).await.unwrap().unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn commands_events_and_the_state_at_the_start() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    machine.wake("http://127.0.0.1:9000");
    let service = start(&machine, config(&["a", "b"], "20s"));
    let mut events = service.events();
    until(&service, "a ready", |snapshot| is_ready(snapshot, "a")).await;
    assert!(service.command("b-alias", ModelCommand::Wake));
    assert!(!service.command("unknown", ModelCommand::Wake));
    until(&service, "b ready", |snapshot| is_ready(snapshot, "b") && !is_ready(snapshot, "a")).await;
    // A hot model gives way to a request, and a pinned one does not.
    assert!(service.command("b", ModelCommand::Hot(true)));
    assert_eq!(complete(&service, &machine, "a").await, Ok(()));
    until(&service, "a ready", |snapshot| is_ready(snapshot, "a") && !is_ready(snapshot, "b")).await;
    assert!(service.command("a", ModelCommand::Sleep));
    until(&service, "b comes back", |snapshot| is_ready(snapshot, "b")).await;
    assert!(service.command("b", ModelCommand::Hold(true)));
    let pinned = until(&service, "b pinned", |snapshot| snapshot.models[1].is_pinned).await;
    assert!(!pinned.models[0].is_pinned);
    assert!(service.command("b", ModelCommand::Sleep));
    until(&service, "b asleep", |snapshot| snapshot.models[1].stage == StageName::Asleep).await;
    let (mut seen, mut last) = (Vec::new(), None);
    while let Ok(event) = events.try_recv() {
        assert!(last.is_none_or(|last| event.seq == last + 1));
        last = Some(event.seq);
        if let EventKind::Ready { swap } = &event.what {
            assert!((swap.total_s - swap.phases.iter().map(|(_, s)| s).sum::<f64>()).abs() < 1e-9);
            seen.push((event.model.clone(), swap.path));
        }
    }
    assert!(seen.contains(&("b".to_owned(), SwapPath::Hot)), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_configuration_is_taken_over_while_requests_run() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b"], "20s"));
    let (a, _) = service.find("a").unwrap();
    let admission = service.admit(a).await.unwrap();
    // One model is added, one removed, one renamed.
    let mut changed = config(&["a", "b", "c"], "20s");
    changed.models.remove(1);
    changed.models[0].aliases = vec!["other".to_owned()];
    service.reload_with(changed.clone(), machine.connect().into()).await.unwrap();
    assert!(service.find("b").is_none() && service.find("a-alias").is_none());
    assert_eq!(service.find("other").unwrap().0, a);
    assert!(!admission.aborted.is_cancelled());
    drop(admission);
    assert_eq!(timeout(TIMEOUT, complete(&service, &machine, "c")).await.unwrap(), Ok(()));
    let names: Vec<String> = service.snapshot().await.models.into_iter().map(|model| model.name).collect();
    assert_eq!(names, ["a", "c"]);
    // A forbidden change changes nothing.
    let mut wrong = changed.clone();
    wrong.models[0].url = "http://127.0.0.1:1".to_owned();
    let error = service.reload_with(wrong, machine.connect().into()).await.unwrap_err();
    assert!(matches!(&error, ServiceError::Changed { what: "url", .. }), "{error}");
    for what in ["state", "memory", "lend", "traces", "front.listen", "control.listen"] {
        let mut wrong = changed.clone();
        let elsewhere = "127.0.0.1:9".parse().unwrap();
        match what {
            "state" => wrong.state = Some("/elsewhere".into()),
            "memory" => wrong.memory = MemorySource::Processes { gpu_bytes: GIB, folder: None },
            "lend" => wrong.lend = Some(Lend::default()),
            "traces" => {
                let text = "[traces]\nendpoint = \"http://127.0.0.1:4318/v1/traces\"\n\
                            [[model]]\nname = \"a\"\nurl = \"http://127.0.0.1:9000\"";
                wrong.traces = Config::parse(text, &|_| Err(String::new())).unwrap().traces;
            }
            "front.listen" => Arc::make_mut(&mut wrong.front).listen = elsewhere,
            _ => Arc::make_mut(&mut wrong.control).listen = elsewhere,
        }
        let error = service.reload_with(wrong, machine.connect().into()).await.unwrap_err();
        assert!(error.to_string().starts_with(&format!("{what} cannot change")), "{error}");
    }
    assert_eq!(service.find("other").unwrap().0, a);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_another_program_puts_to_sleep_is_noticed_and_woken() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let mut config = config(&["a", "b"], "20s");
    config.models.iter_mut().for_each(|model| model.rules.look_every = Duration::from_millis(10));
    let service = start(&machine, config);
    let (a, _) = service.find("a").unwrap();
    let admission = service.admit(a).await.unwrap();
    machine.fall_asleep("http://127.0.0.1:9000");
    // Its answer would never come.
    timeout(TIMEOUT, admission.aborted.cancelled()).await.unwrap();
    drop(admission);
    let snapshot = until(&service, "asleep", |snapshot| snapshot.models[0].stage == StageName::Asleep).await;
    assert!(snapshot.models[0].last_failure.as_deref().unwrap().contains("without a command from here"));
    assert_eq!(snapshot.models[0].starts, 0);
    for name in ["b", "a"] {
        assert_eq!(timeout(TIMEOUT, complete(&service, &machine, name)).await.unwrap(), Ok(()));
    }
    assert!(!machine.was_overcommitted());
}

/// With usual rules, requests are aborted or refused within 20 s of the trouble.
#[tokio::test(start_paused = true)]
async fn an_engine_that_is_hung_or_unwell_is_given_up_and_its_requests_are_answered() {
    for (fault, reason) in [
        (Fault::Silent, "ready: 3 looks in sequence failed: it did not answer in time"),
        (Fault::Unwell, "ready: 3 looks in sequence failed: http://127.0.0.1:9000: it answered 500: no"),
    ] {
        let machine = Machine::new(10 * GIB, 6 * GIB);
        let file =
            "[[model]]\nname = \"a\"\nurl = \"http://127.0.0.1:9000\"\n[model.rules]\nrunning_max = 1\n";
        let config = Config::parse(file, &|_| Err("no secrets here".to_owned())).unwrap();
        let service = start(&machine, config);
        let (a, _) = service.find("a").unwrap();
        let admission = service.admit(a).await.unwrap();
        let waiting = tokio::spawn({
            let service = service.clone();
            async move { service.admit(a).await.map(drop).map_err(|refused| refused.refusal) }
        });
        // Looks of a healthy engine are answered.
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!admission.aborted.is_cancelled());
        let mut events = service.events();
        machine.set_fault("http://127.0.0.1:9000", fault);
        let trouble = Instant::now();
        timeout(TIMEOUT, admission.aborted.cancelled()).await.unwrap();
        drop(admission);
        // It has no command, so it is quarantined.
        let refusal = timeout(TIMEOUT, waiting).await.unwrap().unwrap().unwrap_err();
        assert!(matches!(refusal, Refusal::Quarantined { .. }), "{refusal:?}");
        assert!(trouble.elapsed() <= Duration::from_secs(14), "{fault:?}: {:?}", trouble.elapsed());
        let now = service.snapshot().await;
        assert_eq!(now.models[0].last_failure.as_deref(), Some(reason));
        let mut failed = Vec::new();
        while let Ok(event) = events.try_recv() {
            if let EventKind::LookFailed { failed: nth, .. } = &event.what {
                failed.push(*nth);
            }
        }
        assert_eq!(failed, [1, 2, 3], "{fault:?}");
        machine.clear_faults("http://127.0.0.1:9000");
        served_at_last(&service, &machine, "a").await;
    }
}

/// A call that is not answered is asked for at its limit: one that was done goes on.
#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_too_late_or_never_restarts_no_healthy_engine() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a", "b"], "20s"));
    for name in ["a", "b"] {
        assert_eq!(complete(&service, &machine, name).await, Ok(()));
    }
    for url in ["http://127.0.0.1:9000", "http://127.0.0.1:9001"] {
        machine.set_fault(url, Fault::AnswersNoMove);
    }
    for nth in 0..50 {
        let name = ["a", "b"][nth % 2];
        assert_eq!(timeout(TIMEOUT, complete(&service, &machine, name)).await.unwrap(), Ok(()), "{nth}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_running_requests_and_refuses_the_others() {
    let machine = Machine::new(10 * GIB, 6 * GIB);
    let service = start(&machine, config(&["a"], "20s"));
    let (a, _) = service.find("a").unwrap();
    let admission = service.admit(a).await.unwrap();
    let ending = tokio::spawn({
        let service = service.clone();
        async move { service.shut_down(TIMEOUT, true).await }
    });
    until(&service, "ending", |snapshot| snapshot.is_ending).await;
    assert_eq!(service.admit(a).await.unwrap_err().refusal, Refusal::ShuttingDown);
    assert!(!ending.is_finished());
    drop(admission);
    timeout(TIMEOUT, ending).await.unwrap().unwrap();
    assert!(service.snapshot().await.models.is_empty());
    assert_eq!(service.admit(a).await.unwrap_err().refusal, Refusal::ShuttingDown);
}

/// A GPU on which each engine's processes hold as much as a test says.
#[derive(Debug)]
struct ByProcess {
    memory: Arc<dyn Meter>,
    held_bytes: AtomicU64,
}

impl Meter for ByProcess {
    fn measure<'a>(&'a self, gpus: &'a [Gpu]) -> Measured<'a> {
        self.memory.measure(gpus)
    }

    fn held<'a>(&'a self, gpus: &'a [Gpu], _: Vec<u32>) -> Held<'a> {
        let held_bytes = self.held_bytes.load(Ordering::Relaxed);
        Box::pin(async move { Some(vec![held_bytes; gpus.len()]) })
    }
}

#[tokio::test(start_paused = true)]
async fn looks_teach_what_engines_need_until_the_operator_says_otherwise() {
    let machine = Machine::new(10 * GIB, 3 * GIB);
    let meter = Arc::new(ByProcess { memory: machine.meter(), held_bytes: AtomicU64::new(3 * GIB) });
    let with_need = |need: u64| {
        let mut config = config(&["a", "b"], "20s");
        config.models.iter_mut().for_each(|model| model.rules.need_bytes = Some(need * GIB));
        config
    };
    let service = Service::start_with(with_need(4), meter.clone(), &*machine.connect()).unwrap();
    let mut events = service.events();
    for name in ["a", "b"] {
        assert_eq!(complete(&service, &machine, name).await, Ok(()));
    }
    let known = |snapshot: &Snapshot| snapshot.models[0].known_need_bytes.clone();
    assert_eq!(known(&service.snapshot().await), Some(vec![4 * GIB]));
    // Both grow, and one of them leaves.
    meter.held_bytes.store(6 * GIB, Ordering::Relaxed);
    let has_left = |snapshot: &Snapshot| snapshot.models.iter().filter(|model| model.is_ready).count() == 1;
    let snapshot = until(&service, "one alone", has_left).await;
    let grew = EventKind::Grew { before_bytes: vec![4 * GIB], need_bytes: vec![6 * GIB] };
    let mut seen = Vec::new();
    while let Ok(event) = events.try_recv() {
        seen.extend((event.what == grew).then(|| event.model.clone()));
    }
    assert!(!seen.is_empty(), "{snapshot:#?}");
    // Looks go on, and what they find is less.
    meter.held_bytes.store(GIB, Ordering::Relaxed);
    for name in ["a", "b", "a"] {
        assert_eq!(complete(&service, &machine, name).await, Ok(()));
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    assert_eq!(known(&service.snapshot().await), Some(vec![6 * GIB]));
    service.reload_with(with_need(4), machine.connect().into()).await.unwrap();
    assert_eq!(known(&service.snapshot().await), Some(vec![6 * GIB]));
    service.reload_with(with_need(2), machine.connect().into()).await.unwrap();
    assert!(known(&service.snapshot().await).unwrap()[0] <= 3 * GIB);
}
