//! The fleet's records, of which only those are read again that have changed.

use std::collections::BTreeMap;

use bytes::Bytes;
use poorwill_fleet::mirror::Contents;
use poorwill_fleet::name::FleetName;
use poorwill_fleet::policy::View;

/// What was read of each entry, by its key, and its value then.
#[derive(Debug, Default)]
pub(super) struct Reader(BTreeMap<String, (Bytes, View)>);

impl Reader {
    /// All of them together. What is not understood is left out.
    pub(super) fn read(&mut self, fleet: &FleetName, contents: &Contents) -> View {
        let entries = contents.entries();
        self.0.retain(|key, (value, _)| entries.get(key).is_some_and(|entry| entry.value == *value));
        for (key, entry) in entries {
            if !self.0.contains_key(key) {
                let (view, _) = View::read(fleet, [(key.as_str(), &*entry.value)]);
                self.0.insert(key.clone(), (entry.value.clone(), view));
            }
        }
        let mut all = View::default();
        self.0.values().for_each(|(_, of_entry)| add(&mut all, of_entry));
        all
    }
}

/// Adds what one entry says.
fn add(all: &mut View, of_entry: &View) {
    for (node, one) in &of_entry.nodes {
        let of_node = all.nodes.entry(node.clone()).or_default();
        if one.models.is_empty() {
            of_node.record.clone_from(&one.record);
        }
        of_node.models.extend(one.models.clone());
    }
    for (model, on) in &of_entry.placements {
        all.placements.entry(model.clone()).or_default().extend(on.clone());
    }
    all.drains.extend(of_entry.drains.iter().cloned());
    all.pins.extend(of_entry.pins.clone());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As [`Reader::read`] does it, and as all together.
    fn both(entries: &[(&str, &str)]) -> (View, View) {
        let fleet: FleetName = "prod".parse().unwrap();
        let paths: Vec<String> = entries.iter().map(|(key, _)| format!("/poorwill/prod/{key}")).collect();
        let all = || paths.iter().zip(entries).map(|(path, (_, json))| (path.as_str(), json.as_bytes()));
        let mut added = View::default();
        all().for_each(|entry| add(&mut added, &View::read(&fleet, [entry]).0));
        (added, View::read(&fleet, all()).0)
    }

    #[test]
    fn entries_say_the_same_one_by_one_and_together() {
        let node = r#"{"format": 1, "instance": "i"}"#;
        let model = r#"{"format": 1, "stage": "awake", "gpus": [0]}"#;
        let mut entries = vec![
            ("nodes/a", node),
            ("nodes/a/models/m", model),
            ("nodes/a/models/wrong", "{"),
            ("nodes/b", "{"),
            ("nodes/b/models/m", model),
            ("nodes/c/models/newer", r#"{"format": 999}"#),
            ("placements/m/a", r#"{"format": 1, "goal": "hot", "fence": 3, "why": "w"}"#),
            ("placements/m/b", "{"),
            ("wishes/drains/a", "{"),
            ("strange", "{}"),
        ];
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..50 {
            rng.shuffle(&mut entries);
            let (added, together) = both(&entries);
            assert_eq!(added, together);
            assert_eq!((added.nodes.len(), added.drains.len()), (3, 1));
        }
    }
}
