//! The shape of a `verify` report in JSON, and figures in it that must agree.

use std::collections::BTreeSet;

use serde_json::Value;

/// Fields that every consumer may rely on, and others.
const VERIFY: &[&str] = &["device", "files", "tensors", "bytes", "load_s", "cycles", "verified"];
const VERIFY_OPTIONAL: &[&str] = &["kv_cache_bytes", "loaded"];
const CYCLE: &[&str] = &["sleep", "wake", "verified"];
const CYCLE_BESIDES: &[&str] = &["asleep", "awake"];
const SLEEP: &[&str] = &[
    "level",
    "tags",
    "seconds",
    "planned_release_bytes",
    "released_bytes",
    "release",
    "copied_bytes",
    "stored_bytes",
    "unchanged_bytes",
    "discarded_bytes",
    "kept_bytes",
    "lent_bytes",
    "resident_bytes",
    "lend_refused",
    "unaccounted_bytes",
    "device_free_before_bytes",
    "device_free_after_bytes",
    "phases",
];
const SLEEP_BESIDES: &[&str] = &[
    "already_asleep_tags",
    "unchecked_bytes",
    "peer_bytes",
    "peer_refused",
    "unused_bytes",
    "fast_digests",
    "shared_backup_bytes",
];
const PREPARED: &[&str] =
    &["tags", "end", "seconds", "copied_bytes", "stored_bytes", "unchanged_bytes", "held"];
const WAKE: &[&str] = &[
    "tags",
    "seconds",
    "mapped_bytes",
    "copied_bytes",
    "returned_bytes",
    "read_bytes",
    "disk_read_bytes",
    "linked_bytes",
    "peer_bytes",
    "zeroed_bytes",
    "verified_bytes",
    "undefined_tags",
    "lost",
    "phases",
];
const WAKE_BESIDES: &[&str] = &["already_awake_tags"];

/// The arguments, and the checkpoint.
pub(crate) struct Expected {
    pub(crate) device: &'static str,
    pub(crate) capacity_bytes: u64,
    pub(crate) files: usize,
    pub(crate) tensors: usize,
    pub(crate) bytes: u64,
    pub(crate) kv_cache_bytes: u64,
    pub(crate) level: u64,
    pub(crate) cycles: usize,
    pub(crate) prepare: bool,
}

impl Expected {
    /// Holds a report against what was asked, and its figures against each other.
    pub(crate) fn check(&self, report: &Value) {
        assert_fields(report, &[VERIFY, VERIFY_OPTIONAL, if self.prepare { &["prepared"] } else { &[] }]);
        assert_eq!(report["device"], self.device);
        let counts = [int(report, "files"), int(report, "tensors")];
        assert_eq!(counts, [self.files as u64, self.tensors as u64]);
        assert_eq!(int(report, "bytes"), self.bytes);
        assert_eq!(int(report, "kv_cache_bytes"), self.kv_cache_bytes);
        assert_seconds(&report["load_s"]);
        assert_eq!(report["verified"], true);
        assert_holding(&report["loaded"], int(&report["loaded"], "device_bytes"), 0);
        assert!(int(&report["loaded"], "device_bytes") >= self.bytes + self.kv_cache_bytes);
        if self.prepare {
            self.check_prepared(&report["prepared"], int(&report["loaded"], "device_bytes"));
        }
        let cycles = report["cycles"].as_array().unwrap();
        assert_eq!(cycles.len(), self.cycles);
        for (number, cycle) in cycles.iter().enumerate() {
            self.check_cycle(number, cycle, int(&report["loaded"], "device_bytes"));
        }
    }

    /// What was backed up before the first sleep; at level 2 nothing is.
    fn check_prepared(&self, prepared: &Value, loaded_bytes: u64) {
        assert_fields(prepared, &[PREPARED]);
        assert_seconds(&prepared["seconds"]);
        assert_eq!((&prepared["end"], &prepared["unchanged_bytes"]), (&"finished".into(), &0.into()));
        let (tags, backed_up): (&[&str], bool) =
            if self.level == 2 { (&[], false) } else { (&["weights"], true) };
        assert_eq!(prepared["tags"], Value::from(tags));
        let copied = int(prepared, "copied_bytes");
        assert!(if backed_up { copied >= self.bytes } else { copied == 0 });
        assert_holding(&prepared["held"], loaded_bytes, copied);
    }

    fn check_cycle(&self, number: usize, cycle: &Value, loaded_bytes: u64) {
        let reload: &[&str] = if self.level == 2 { &["reload_s"] } else { &[] };
        assert_fields(cycle, &[CYCLE, CYCLE_BESIDES, reload]);
        if self.level == 2 {
            assert_seconds(&cycle["reload_s"]);
        }
        assert_eq!(cycle["verified"], true);
        let (sleep, wake) = (&cycle["sleep"], &cycle["wake"]);
        self.check_sleep(number, sleep, loaded_bytes);
        let kept_bytes = int(sleep, "copied_bytes") + int(sleep, "unchanged_bytes");
        assert_holding(&cycle["asleep"], 0, kept_bytes);

        assert_fields(wake, &[WAKE, WAKE_BESIDES]);
        assert_phases(wake, &["create_s", "map_s", "copy_s", "verify_s", "wait_s"]);
        assert_eq!(wake["tags"], sleep["tags"]);
        assert!(wake["already_awake_tags"].as_array().unwrap().is_empty());
        assert_eq!(int(wake, "mapped_bytes"), int(sleep, "released_bytes"));
        assert_eq!([int(wake, "copied_bytes"), int(wake, "verified_bytes")], [kept_bytes; 2]);
        let undefined: &[&str] = if self.level == 2 { &["weights"] } else { &[] };
        assert_eq!(wake["undefined_tags"], Value::from(undefined));
        self.assert_kv_cache_bytes(int(wake, "zeroed_bytes"));
        assert_holding(&cycle["awake"], loaded_bytes, kept_bytes);
    }

    fn check_sleep(&self, number: usize, sleep: &Value, loaded_bytes: u64) {
        assert_fields(sleep, &[SLEEP, SLEEP_BESIDES]);
        assert_phases(sleep, &["copy_s", "digest_s", "unmap_s", "release_s"]);
        assert_eq!(int(sleep, "level"), self.level);
        let tags: &[&str] = if self.kv_cache_bytes > 0 { &["kv_cache", "weights"] } else { &["weights"] };
        assert_eq!(sleep["tags"], Value::from(tags));
        assert!(sleep["already_asleep_tags"].as_array().unwrap().is_empty());

        // Everything is given back, and the device's own count says so.
        assert_eq!(sleep["release"], "confirmed");
        let released = int(sleep, "released_bytes");
        assert_eq!([released, int(sleep, "planned_release_bytes")], [loaded_bytes; 2]);
        let (before, after) = (int(sleep, "device_free_before_bytes"), int(sleep, "device_free_after_bytes"));
        assert_eq!((after - before, after), (released, self.capacity_bytes));
        assert_eq!(int(sleep, "unaccounted_bytes"), 0);

        let [copied, unchanged, discarded] =
            ["copied_bytes", "unchanged_bytes", "discarded_bytes"].map(|field| int(sleep, field));
        assert_eq!(copied + unchanged + discarded, released);
        if self.level == 2 {
            assert_eq!(discarded, released);
            return;
        }
        assert!(copied + unchanged >= self.bytes);
        self.assert_kv_cache_bytes(discarded);
        // Only the first sleep copies, or what prepared it: the weights do not change.
        assert_eq!(if number == 0 && !self.prepare { unchanged } else { copied }, 0);
        assert_eq!((int(sleep, "unchecked_bytes"), &sleep["fast_digests"]), (0, &true.into()));
    }

    /// The cache, in whole granules.
    fn assert_kv_cache_bytes(&self, bytes: u64) {
        const GRANULE_BYTES: u64 = 2 << 20;
        assert_eq!(bytes, self.kv_cache_bytes.next_multiple_of(GRANULE_BYTES));
    }
}

/// A field that is a whole number, and none below zero.
fn int(object: &Value, field: &str) -> u64 {
    object[field].as_u64().unwrap_or_else(|| panic!("{field} of {object}"))
}

pub(crate) fn assert_fields(object: &Value, groups: &[&[&str]]) {
    let fields: BTreeSet<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    let expected: BTreeSet<&str> = groups.iter().copied().flatten().copied().collect();
    assert_eq!(fields, expected);
}

pub(crate) fn assert_seconds(value: &Value) {
    let seconds = value.as_f64().unwrap_or_else(|| panic!("{value}"));
    assert!(seconds.is_finite() && seconds >= 0.0, "{seconds}");
}

fn assert_phases(report: &Value, phases: &[&str]) {
    assert_seconds(&report["seconds"]);
    assert_fields(&report["phases"], &[phases]);
    phases.iter().for_each(|phase| assert_seconds(&report["phases"][phase]));
}

fn assert_holding(holding: &Value, device_bytes: u64, host_bytes: u64) {
    assert_eq!(*holding, serde_json::json!({ "device_bytes": device_bytes, "host_bytes": host_bytes }));
}
