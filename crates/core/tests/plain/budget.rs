//! Budgets over generated sources and claims: whatever the others report, one truthful source is enough, and what is
//! granted never exceeds the budget.

use poorwill_core::budget::{
    Budget, Cap, ClaimError, Envelope, Figure, PLAUSIBLE_BYTES_MAX, Reading, SourceName,
};
use poorwill_core::{ByteSize, Tag};
use poorwill_testkit::effort::Effort;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

const TOTALS: [SourceName; 7] = [
    SourceName::Capacity,
    SourceName::CudaTotal,
    SourceName::DeviceProperties,
    SourceName::NvmlTotal,
    SourceName::MemoryLimit,
    SourceName::MpsLimit,
    SourceName::CgroupDmem,
];

const FREE: [SourceName; 5] = [
    SourceName::CapacityFree,
    SourceName::CudaFree,
    SourceName::NvmlFree,
    SourceName::CgroupDmemFree,
    SourceName::SystemAvailable,
];

/// Answers that drivers have been seen to give, and any others.
fn any_answer() -> impl Strategy<Value = Figure> {
    prop_oneof![
        Just(Figure::Bytes(0)),
        Just(Figure::Bytes(u64::MAX)),
        (1u64..64 * GIB).prop_map(|over| Figure::Bytes(0u64.wrapping_sub(over))),
        Just(Figure::Bytes(PLAUSIBLE_BYTES_MAX)),
        (0u64..200 * GIB).prop_map(Figure::Bytes),
        any::<u64>().prop_map(Figure::Bytes),
        Just(Figure::None("not set".into())),
        Just(Figure::OverLimit("CUDA_ERROR_INVALID_VALUE".into())),
    ]
}

fn any_cap() -> impl Strategy<Value = Option<Cap>> {
    prop_oneof![
        Just(None),
        (1u64..).prop_map(|bytes| Some(Cap::Bytes(bytes))),
        (1u64..=1_000_000).prop_map(|ppm| {
            let text = format!("{}.{:06}", ppm / 1_000_000, ppm % 1_000_000);
            Some(text.parse().unwrap())
        }),
    ]
}

/// Facts from every source in any order, one of which tells the true total.
fn any_facts(true_bytes: u64) -> impl Strategy<Value = Vec<Reading>> {
    let answers = proptest::collection::vec(any_answer(), TOTALS.len() + FREE.len());
    (answers, 0..TOTALS.len()).prop_flat_map(move |(answers, truthful)| {
        let facts = TOTALS.into_iter().chain(FREE).zip(answers);
        let facts: Vec<Reading> = facts
            .map(|(source, answer)| {
                let answer = if source == TOTALS[truthful] { Figure::Bytes(true_bytes) } else { answer };
                Reading::new(source, answer)
            })
            .collect();
        Just(facts).prop_shuffle()
    })
}

/// What must hold whatever the others report, where one of the totals is `true_bytes`.
fn check_decision(
    true_bytes: u64,
    facts: &[Reading],
    used_bytes: Option<u64>,
    cap: Option<Cap>,
) -> Result<(), TestCaseError> {
    let budget = Budget::decide(facts, used_bytes, cap);
    let (total, bytes) = (budget.total_bytes.unwrap(), budget.budget_bytes.unwrap());
    prop_assert!(bytes <= total && total <= true_bytes, "{budget:?}");
    prop_assert!(cap.is_none_or(|cap| bytes <= cap.of(total)), "{budget:?}");
    prop_assert!(budget.headroom_bytes.is_none_or(|headroom| headroom <= bytes), "{budget:?}");
    // The winner is the one with that figure, and every source is in the report.
    let winner = budget.source(budget.winner.unwrap()).unwrap();
    prop_assert_eq!(winner.bytes, Some(bytes));
    prop_assert_eq!(budget.sources.len(), facts.len() + usize::from(cap.is_some()));
    // No figure vanishes silently: an absent or odd one has a note.
    for source in &budget.sources {
        prop_assert!(
            source.bytes.is_some_and(|bytes| 0 < bytes && bytes < PLAUSIBLE_BYTES_MAX)
            || source.note.is_some() || (source.bytes == Some(0) && source.name.is_about_free())
            || [SourceName::User, SourceName::SystemAvailable].contains(&source.name)
            // The host device has the capacity it was opened with.
            || (source.name == SourceName::Capacity && source.bytes != Some(0)),
            "{source:?}"
        );
    }
    // The order of the queries makes no difference to the figures.
    let mut reversed = facts.to_vec();
    reversed.reverse();
    let again = Budget::decide(&reversed, used_bytes, cap);
    prop_assert_eq!(
        (again.total_bytes, again.budget_bytes, again.headroom_bytes),
        (budget.total_bytes, budget.budget_bytes, budget.headroom_bytes)
    );
    Ok(())
}

/// Failures are printed in full; CI would leave a file of seeds in the tree.
fn cases(usual: u32) -> ProptestConfig {
    let cases = Effort::of_this_run().cases(usual);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// A past defect: a free figure beyond all plausible ones beside a single total that is not 0.
#[test]
fn a_single_total_between_zeros_is_right() {
    let true_bytes = 5_116_776_210;
    let facts: Vec<Reading> = TOTALS
        .into_iter()
        .chain(FREE)
        .map(|source| match source {
            SourceName::NvmlTotal => Reading::bytes(source, true_bytes),
            SourceName::SystemAvailable => Reading::bytes(source, 2_224_084_894_374_309),
            _ => Reading::bytes(source, 0),
        })
        .collect();
    check_decision(true_bytes, &facts, None, Some(Cap::Bytes(4_477_148_259_555_487_059))).unwrap();
}

proptest! {
    #![proptest_config(cases(8_000))]

    #[test]
    fn a_wrong_source_never_raises_the_budget(
        (true_bytes, facts) in (1u64..200 * GIB).prop_flat_map(|bytes| (Just(bytes), any_facts(bytes))),
        used_bytes in proptest::option::of(any::<u64>()),
        cap in any_cap(),
    ) {
        check_decision(true_bytes, &facts, used_bytes, cap)?;
    }
    #[test]
    fn with_truthful_sources_alone_the_headroom_is_what_can_be_had(
        total_bytes in GIB..200 * GIB,
        others_share in 0u64..=100,
        used_share in 0u64..=100,
        cap in any_cap(),
    ) {
        // Others and this process share the device.
        let others_bytes = total_bytes / 100 * others_share;
        let used_bytes = (total_bytes - others_bytes) / 100 * used_share;
        let free_bytes = total_bytes - others_bytes - used_bytes;
        let facts = [
            Reading::bytes(SourceName::CudaTotal, total_bytes),
            Reading::bytes(SourceName::NvmlTotal, total_bytes),
            Reading::bytes(SourceName::CudaFree, free_bytes),
            Reading::bytes(SourceName::NvmlFree, free_bytes),
        ];
        let budget = Budget::decide(&facts, Some(used_bytes), cap);
        let allowed_bytes = cap.map_or(total_bytes, |cap| cap.of(total_bytes)).saturating_sub(used_bytes);
        prop_assert_eq!(budget.headroom_bytes, Some(free_bytes.min(allowed_bytes)));
    }
}

/// What a test does to an envelope.
#[derive(Debug, Clone)]
enum Action {
    Claim(u64),
    Rest,
    Resize(usize, u64),
    Measure(usize, u64),
    Release(usize),
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (0u64..40).prop_map(Action::Claim),
        any::<u64>().prop_map(Action::Claim),
        Just(Action::Rest),
        (any::<usize>(), 0u64..40).prop_map(|(at, bytes)| Action::Resize(at, bytes)),
        (any::<usize>(), any::<u64>()).prop_map(|(at, bytes)| Action::Resize(at, bytes)),
        (any::<usize>(), 0u64..200).prop_map(|(at, bytes)| Action::Measure(at, bytes)),
        any::<usize>().prop_map(Action::Release),
    ]
}

proptest! {
    #![proptest_config(cases(2_000))]

    #[test]
    fn an_envelope_is_never_overdrawn(
        budget_bytes in prop_oneof![0u64..100, Just(u64::MAX)],
        actions in proptest::collection::vec(any_action(), 0..40),
    ) {
        let envelope = Envelope::new(budget_bytes, budget_bytes);
        let mut claims = Vec::new();
        let mut model: Vec<(u64, Option<u64>)> = Vec::new();
        let sum = |model: &[(u64, Option<u64>)]| model.iter().map(|(bytes, _)| u128::from(*bytes)).sum::<u128>();
        for action in actions {
            let rest = u64::try_from(u128::from(budget_bytes) - sum(&model)).unwrap();
            let pick = |at: usize| (!model.is_empty()).then(|| at % model.len());
            match action {
                Action::Claim(bytes) => match envelope.claim(Tag::weights(), bytes) {
                    Ok(claim) => {
                        prop_assert!(bytes <= rest);
                        claims.push(claim);
                        model.push((bytes, None));
                    }
                    Err(error) => {
                        prop_assert!(bytes > rest && error.fits_bytes == rest && error.asked_bytes == bytes);
                        prop_assert_eq!(error.claims, envelope.claims());
                    }
                },
                Action::Rest => {
                    claims.push(envelope.claim_rest(Tag::kv_cache()));
                    model.push((rest, None));
                }
                Action::Resize(at, bytes) => if let Some(at) = pick(at) {
                    let most = rest + model[at].0;
                    prop_assert_eq!(claims[at].resize(bytes).is_ok(), bytes <= most);
                    if bytes <= most {
                        model[at].0 = bytes;
                    }
                },
                Action::Measure(at, bytes) => if let Some(at) = pick(at) {
                    claims[at].measured(bytes);
                    model[at].1 = model[at].1.max(Some(bytes));
                },
                Action::Release(at) => if let Some(at) = pick(at) {
                    claims.remove(at).release();
                    model.remove(at);
                },
            }
            let rest = u64::try_from(u128::from(budget_bytes) - sum(&model)).unwrap();
            prop_assert_eq!(envelope.unclaimed_bytes(), rest);
            let book: Vec<_> = envelope.claims().iter().map(|claimed| (claimed.bytes, claimed.peak_bytes)).collect();
            prop_assert_eq!(&book, &model);
        }
        drop(claims);
        prop_assert_eq!(envelope.unclaimed_bytes(), budget_bytes);
    }
}

#[test]
fn the_slice_of_the_report() {
    let facts = [
        Reading::bytes(SourceName::DeviceProperties, 24 * GIB),
        Reading::bytes(SourceName::CudaTotal, 23 * GIB),
        Reading::bytes(SourceName::CudaFree, 23 * GIB),
        Reading::bytes(SourceName::NvmlTotal, 24 * GIB),
    ];
    let weights = 16 * GIB;
    let activations = 7 * GIB / 2;
    let graphs = "1.53GiB".parse::<ByteSize>().unwrap().0;
    let kv_cache_bytes = |cap: &str| -> Result<String, ClaimError> {
        let budget = Budget::decide(&facts, Some(0), Some(cap.parse().unwrap()));
        let envelope = Envelope::new(budget.budget_bytes.unwrap(), budget.total_bytes.unwrap());
        let _weights = envelope.claim(Tag::weights(), weights).unwrap();
        let _activations = envelope.claim("activations".parse().unwrap(), activations).unwrap();
        let _graphs = envelope.claim(Tag::cudagraph(), graphs)?;
        Ok(ByteSize(envelope.unclaimed_bytes()).to_string())
    };
    assert_eq!(kv_cache_bytes("0.95"), Ok("839.68 MiB".into()), "0.82 GiB");
    assert_eq!(kv_cache_bytes("0.92"), Ok("133.12 MiB".into()), "0.13 GiB");
    assert_eq!(kv_cache_bytes("22GiB"), Ok("993.28 MiB".into()));
    assert_eq!(kv_cache_bytes("22528m"), kv_cache_bytes("22g"));
    let refused = kv_cache_bytes("0.88").unwrap_err();
    assert_eq!(refused.name, Tag::cudagraph());
    let words = refused.to_string();
    for word in
        ["1.53 GiB", "`weights` has 16 GiB", "`activations` has 3.5 GiB", "21.03 GiB", "a share of 0.92"]
    {
        assert!(words.contains(word), "`{word}` is not in: {words}");
    }
}
