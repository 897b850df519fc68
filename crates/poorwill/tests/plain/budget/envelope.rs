//! Both options, in every spelling, on a slice of a larger card: HAMi's 23 GiB of 24.

use poorwill::budget::Caps;
use poorwill::doctor::examine;
use poorwill::{Arena, Cap, ClaimError, Config, OpenError, PoolConfig, Tag};

use super::scene::{GIB, Scene, assert_allocatable, cap, gpu, in_scene, open, plan_with_time};

/// An engine's claims before its key-value cache.
const CLAIMS: [(&str, u64); 3] =
    [("weights", 16 * GIB), ("activations", 7 * GIB / 2), ("cudagraph", GIB * 153 / 100)];

fn slice() -> Scene {
    Scene::with("24GiB")
        .playing("0:hami=23GiB")
        .variable("CUDA_DEVICE_MEMORY_LIMIT_0", "23g")
        .known_as("GPU", ":total=24GiB")
}

fn claims() -> Vec<(Tag, u64)> {
    CLAIMS.map(|(name, bytes)| (name.parse().unwrap(), bytes)).to_vec()
}

/// What is left after the claims, in bytes.
fn left(share: &str) -> Result<u64, ClaimError> {
    let (_, envelope) = open().envelope(Some(cap(share))).unwrap();
    let mut held = Vec::new();
    for (name, bytes) in claims() {
        held.push(envelope.claim(name, bytes)?);
    }
    Ok(envelope.unclaimed_bytes())
}

/// As people read it.
fn gib(bytes: u64) -> String {
    #[allow(clippy::cast_precision_loss)]
    let gib = bytes as f64 / GIB as f64;
    format!("{gib:.2} GiB")
}

#[test]
fn a_share_too_small_is_refused_before_anything_is_lost() {
    if !in_scene(&slice()) {
        return;
    }
    assert_eq!(gib(left("0.95").unwrap()), "0.82 GiB");
    assert_eq!(gib(left("0.92").unwrap()), "0.13 GiB");
    let refused = left("0.88").unwrap_err();
    assert_eq!(refused.name.to_string(), "cudagraph");
    assert_eq!(refused.basis.budget_bytes, cap("0.88").of(23 * GIB));
    let words = refused.to_string();
    for word in
        ["`cudagraph`", "`weights` has 16 GiB", "`activations` has 3.5 GiB", "raise the budget to", "0.92)"]
    {
        assert!(words.contains(word), "`{word}`: {words}");
    }
    assert!(left("0.92").is_ok(), "what the sentence says helps");
    // An engine's pool stands beside the claims, and gets what they leave.
    let device = open();
    let (_, envelope) = device.envelope(Some(cap("0.92"))).unwrap();
    let held: Vec<_> =
        claims().into_iter().map(|(name, bytes)| envelope.claim(name, bytes).unwrap()).collect();
    let pool = PoolConfig::default().limited_to(GIB);
    let Err(OpenError::Claim(refused)) = Arena::open_within(&device, &envelope, pool) else {
        panic!("it does not fit")
    };
    assert_eq!(refused.fits_bytes, envelope.unclaimed_bytes());
    let arena = Arena::open_within(&device, &envelope, PoolConfig::default()).unwrap();
    assert_eq!(gib(arena.limit_bytes()), "0.13 GiB");
    assert_allocatable(&arena, arena.limit_bytes());
    drop(held);
}

#[test]
fn the_doctor_says_the_same() {
    if !in_scene(&slice()) {
        return;
    }
    for (share, utilization) in [("0.95", 0.95), ("0.92", 0.92), ("0.88", 0.88)] {
        let plan = plan_with_time().on(gpu()).budgeted(cap(share).into()).claiming(claims());
        let report = examine(&plan).unwrap();
        let engine = &report.devices[0].engine;
        assert_eq!(engine.gpu_memory_utilization, Some(utilization));
        match left(share) {
            Ok(bytes) => {
                assert_eq!((engine.kv_cache_bytes, &engine.refused), (Some(bytes), &None), "{share}");
                assert!(report.devices[1].engine.refused.is_none());
            }
            Err(refused) => {
                assert_eq!(engine.kv_cache_bytes, None);
                assert_eq!(report.refused(), Some(("cuda:0", refused.to_string().as_str())));
            }
        }
    }
}

#[test]
fn every_spelling_is_one_budget_at_every_entry_point() {
    if !in_scene(&slice()) {
        return;
    }
    let entry_points = |text: &str| {
        let cap: Cap = text.parse().unwrap();
        let arena = Arena::open(Config::on(gpu()).within(Some(cap))).unwrap().limit_bytes();
        let (_, envelope) = open().envelope(Some(cap)).unwrap();
        let by_device: Caps = format!("cuda:0={text},cuda:9=1GiB").parse().unwrap();
        let plan = |caps: Caps| plan_with_time().on(gpu()).budgeted(caps).claiming(claims());
        let [report, named] = [cap.into(), by_device].map(|caps| examine(&plan(caps)).unwrap());
        assert_eq!(report.devices[0].engine, named.devices[0].engine, "{text}");
        let memory = &report.devices[0].memory;
        assert_eq!(memory.budget_bytes, Some(arena));
        assert_eq!(report.devices[0].engine.memory_bytes, Some(arena), "nothing is in use");
        [arena, envelope.budget_bytes()]
    };
    let of_the_slice = 22_720_376_995; // And not of the card.
    for (spellings, bytes) in [
        (&["22GiB", "22g", "22528m", "22 GiB", "23622320128"][..], 22 * GIB),
        (&["0.92", ".92", "92%"], of_the_slice),
    ] {
        for text in spellings {
            assert_eq!(cap(text), cap(spellings[0]), "{text}");
            let caps = |text: &str| format!("cuda:0={text},cuda:9=1GiB").parse::<Caps>().unwrap();
            assert_eq!(caps(text), caps(spellings[0]), "{text}");
        }
        assert_eq!(entry_points(spellings[0]), [bytes; 2]);
    }
}
