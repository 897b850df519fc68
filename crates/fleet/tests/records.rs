//! Records and keys: round trips, what is hostile, and versions that are older or newer.

use poorwill_fleet::keys::{Key, KeyProblem};
use poorwill_fleet::name::{ModelName, NameError, NodeName};
use poorwill_fleet::records::{
    Costs, Drain, FORMAT, Goal, GpuRecord, ModelRecord, NodeRecord, Pin, Placement, Rate, Reading, Record,
    RecordProblem, Requests, Stage, read, write,
};
use poorwill_testkit::effort::Effort;
use proptest::prelude::*;

fn config() -> ProptestConfig {
    let cases = Effort::of_this_run().cases(200);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn node_name() -> impl Strategy<Value = NodeName> {
    "[a-z0-9%._-]{1,12}".prop_map(|text| text.parse().unwrap())
}

fn model_name() -> impl Strategy<Value = ModelName> {
    "[a-zA-Z0-9/%:é ]{0,12}[a-z%/]".prop_filter_map("blanks around it", |text| text.parse().ok())
}

fn stage() -> impl Strategy<Value = Stage> {
    prop::sample::select(vec![
        Stage::Awake,
        Stage::Waking,
        Stage::Sleeping,
        Stage::Asleep,
        Stage::Hibernating,
        Stage::OnDisk,
        Stage::Stopped,
        Stage::Starting,
        Stage::Failed,
    ])
}

prop_compose! {
    fn node_record()(
        instance in "[a-z0-9]{1,8}",
        domain in ".*",
        gpus in prop::collection::vec((any::<u64>(), any::<u64>()), 0..9),
        host_free_bytes in any::<u64>(),
        is_draining in any::<bool>(),
        version in ".*",
    ) -> NodeRecord {
        let gpu = |(one, other): (u64, u64)| GpuRecord { total_bytes: one.max(other), budget_bytes: one.min(other) };
        let gpus = gpus.into_iter().map(gpu).collect();
        NodeRecord { domain, gpus, host_free_bytes, is_draining, version, ..NodeRecord::new(&instance) }
    }
}

prop_compose! {
    fn model_record()(
        stage in stage(),
        gpus in prop::collection::btree_set(any::<usize>(), 0..9),
        need in prop::option::of(any::<u64>()),
        host_bytes in any::<u64>(),
        (running, queued) in any::<(u32, u32)>(),
        rate in any::<u64>(),
        costs in prop::array::uniform5(prop::option::of(any::<u64>())),
        pinned in any::<bool>(),
    ) -> ModelRecord {
        let gpus: Vec<usize> = gpus.into_iter().collect();
        let [wake_ms, sleep_ms, resume_ms, reload_ms, start_ms] = costs;
        ModelRecord {
            need_bytes: need.map(|need| vec![need; gpus.len()]),
            host_bytes,
            requests: Requests { running, queued },
            rate: Rate::from_micros(rate),
            costs: Costs { wake_ms, sleep_ms, resume_ms, reload_ms, start_ms },
            pinned,
            ..ModelRecord::new(stage, gpus)
        }
    }
}

fn goes_round<T: Record + PartialEq + std::fmt::Debug>(record: T) {
    let key = Key::Drain("n".parse().unwrap());
    let json = write(&key, &record).unwrap();
    assert_eq!(read::<T>(&key, json.as_bytes()).unwrap(), Reading::Known(record));
}

/// Reads it as each kind. It may fail, and does not panic.
fn read_as_all(json: &[u8]) -> [Result<bool, String>; 5] {
    fn one<T: Record>(json: &[u8]) -> Result<bool, String> {
        let read = read::<T>(&Key::Election, json).map_err(|error| error.to_string())?;
        Ok(read.known().is_some())
    }
    [
        one::<NodeRecord>(json),
        one::<ModelRecord>(json),
        one::<Placement>(json),
        one::<Drain>(json),
        one::<Pin>(json),
    ]
}

/// Any JSON, with the fields that records have among others.
fn json() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::{Value, json};
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        ".{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["hot", "awake", "levitating"]).prop_map(Value::from),
    ];
    let field = prop::sample::select(vec![
        "format",
        "stage",
        "gpus",
        "need_bytes",
        "rate",
        "costs",
        "requests",
        "goal",
        "fence",
        "changed_at_ms",
        "instance",
        "copies",
        "nodes",
        "wake_ms",
        "running",
        "budget_bytes",
        "total_bytes",
        "other",
    ]);
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((field.clone(), inner), 0..10).prop_map(|fields| fields
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn records_go_round(node in node_record(), model in model_record(), fence in 1_u64.., at in any::<u64>(),
        why in ".*", copies in 1_u32.., nodes in prop::collection::vec(node_name(), 0..4))
    {
        goes_round(node);
        goes_round(model);
        for goal in [Goal::Hot, Goal::Warm, Goal::None] {
            let placement = Placement::new(fence, goal, at, &why);
            goes_round(Placement { pinned: Some(goal == Goal::Hot), ..placement.clone() });
            goes_round(placement);
        }
        goes_round(Drain::new(&why));
        goes_round(Pin { nodes, ..Pin::new(copies) });
    }

    #[test]
    fn keys_go_round(fleet in "[a-z]{1,6}", node in node_name(), model in model_name()) {
        let fleet = fleet.parse().unwrap();
        for key in [
            Key::Node(node.clone()),
            Key::Model { node: node.clone(), model: model.clone() },
            Key::Placement { model: model.clone(), node: node.clone() },
            Key::Drain(node),
            Key::Pin(model),
            Key::Election,
        ] {
            prop_assert_eq!(Key::parse(&fleet, &key.in_fleet(&fleet)).unwrap(), key);
        }
    }

    #[test]
    fn hostile_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), key in ".*") {
        let _ = read_as_all(&bytes);
        let _ = Key::parse(&"prod".parse().unwrap(), &key);
        let _ = Key::parse(&"prod".parse().unwrap(), &format!("/poorwill/prod/{key}"));
    }

    #[test]
    fn hostile_json_does_not_panic(json in json(), format in 0_u32..3) {
        let mut json = json;
        if let Some(object) = json.as_object_mut() {
            object.insert("format".to_owned(), format.into());
        }
        for read in read_as_all(json.to_string().as_bytes()) {
            match read {
                Ok(is_known) => prop_assert_eq!(is_known, format <= FORMAT),
                Err(error) => prop_assert!(error.starts_with("record `election`: "), "{}", error),
            }
        }
    }

    #[test]
    fn a_newer_version_adds_what_it_likes(model in model_record(), added in json()) {
        let key = Key::Election;
        let mut newer: serde_json::Value = serde_json::from_str(&write(&key, &model).unwrap()).unwrap();
        newer["mood"] = added.clone();
        newer["costs"]["yawn_ms"] = added;
        let read = read::<ModelRecord>(&key, newer.to_string().as_bytes()).unwrap();
        prop_assert_eq!(read, Reading::Known(model));
        newer["format"] = (FORMAT + 1).into();
        newer["stage"] = 7.into();
        let read = poorwill_fleet::records::read::<ModelRecord>(&key, newer.to_string().as_bytes()).unwrap();
        prop_assert_eq!(read, Reading::Newer { format: FORMAT + 1 });
    }
}

#[test]
fn an_older_version_left_fields_out() {
    let key = Key::Election;
    let node = read::<NodeRecord>(&key, br#"{"format": 1, "instance": "a"}"#).unwrap();
    assert_eq!(node, Reading::Known(NodeRecord::new("a")));
    let model = read::<ModelRecord>(&key, br#"{"format": 1, "stage": "asleep", "gpus": []}"#).unwrap();
    assert_eq!(model, Reading::Known(ModelRecord::new(Stage::Asleep, Vec::new())));
    let pin = read::<Pin>(&key, br#"{"format": 1}"#).unwrap();
    assert_eq!(pin, Reading::Known(Pin::new(1)));
}

#[test]
fn errors_say_where_and_what() {
    let key = Key::Model { node: "gpu-17".parse().unwrap(), model: "a/b".parse().unwrap() };
    let message = |json: &str| read::<ModelRecord>(&key, json.as_bytes()).unwrap_err().to_string();
    for (json, expected) in [
        (r#"{"stage": "asleep", "gpus": []}"#, "missing field `format`"),
        (r#"{"format": 1, "stage": "asleep", "gpus": [1, 1]}"#, "gpus has one twice: [1, 1]"),
        (
            r#"{"format": 1, "stage": "asleep", "gpus": [0], "need_bytes": []}"#,
            "need_bytes has 0 entries for 1 GPUs",
        ),
        (r#"{"format": 1, "stage": "asleep", "gpus": [0], "rate": -2.0}"#, "a rate of -2 is none"),
    ] {
        let message = message(json);
        assert!(message.starts_with("record `nodes/gpu-17/models/a%2Fb`: "), "{message}");
        assert!(message.contains(expected), "{message}");
    }
    let long = vec![b' '; (1 << 20) + 1];
    let error = read::<ModelRecord>(&key, &long).unwrap_err();
    assert!(matches!(error.problem, RecordProblem::TooLong { bytes } if bytes == long.len()));
    let error = write(&key, &Pin::new(0)).unwrap_err();
    assert!(error.to_string().ends_with("copies is 0; remove the pin instead"), "{error}");
}

#[test]
fn names_and_keys_that_are_none_are_refused() {
    assert_eq!("a/b".parse::<NodeName>(), Err(NameError::Slash));
    assert_eq!("a\nb".parse::<ModelName>(), Err(NameError::Odd));
    assert_eq!("x".repeat(256).parse::<ModelName>(), Err(NameError::TooLong { bytes: 256 }));
    let problem = |key: &str| Key::parse(&"prod".parse().unwrap(), key).unwrap_err().problem;
    assert_eq!(problem("/poorwill/test/nodes/a"), KeyProblem::Foreign);
    assert_eq!(problem("/poorwill/prod/nodes/a/models"), KeyProblem::Kind);
    assert_eq!(problem("/poorwill/prod/nodes/"), KeyProblem::Name(NameError::Empty));
    assert_eq!(problem("/poorwill/prod/wishes/pins/a%2fb"), KeyProblem::Escape);
}
