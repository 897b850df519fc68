//! What was not carried over, or changes, with its place in the YAML.

use super::yaml::{Entry, LineColumn};

/// What was not carried over, or changes.
#[derive(Debug, Default)]
pub(super) struct Warnings(Vec<(LineColumn, String)>);

impl Warnings {
    pub(super) fn add(&mut self, place: LineColumn, text: &str) {
        self.0.push((place, text.to_owned()));
    }

    /// In the order of the YAML.
    pub(super) fn texts(mut self) -> Vec<String> {
        self.0.sort_by_key(|(place, _)| *place);
        self.0.iter().map(|(place, text)| format!("{place}: {text}")).collect()
    }

    pub(super) fn lacks_counterpart(&mut self, entry: &Entry, reason: &str) {
        self.add(entry.place, &format!("{} is not carried over: {reason}", entry.key));
    }
}
