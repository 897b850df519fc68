//! Whether a canary's answer is right: as the model's first one, or with an expected text in it.
//!
//! The first answer counts as right, and is kept for the next service. An engine that no longer serves its kind of
//! request fails: an answer of another kind compares with nothing. Only the configuration can ask for another first
//! answer, by another kind, prompt, length or name. An engine whose answers changed on purpose, as by an upgrade, needs
//! that as well, or the removal of the kept one.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize as _;
use serde_json::{Value, json};

use crate::config::{self, CanaryKind};
use crate::engine::{Answer, Content, EngineError};

/// After so many, its canaries run before requests alone.
const FAILED_MAX: u32 = 2;

#[derive(Debug)]
pub(super) struct FirstAnswer {
    /// What the configuration asks by.
    kind: Option<CanaryKind>,
    expect: Option<String>,
    /// The model, the most tokens and the prompt, as one text.
    asked: String,
    /// The kind that was answered last.
    known: Option<CanaryKind>,
    /// The model's first answer.
    first: Option<Answer>,
    /// The file that keeps it for the next service.
    kept_at: Option<PathBuf>,
    /// Whether it may be asked beside requests.
    is_beside: bool,
    /// The beginning of the first answer that batches do not change.
    steady: Option<String>,
    /// Whether that was looked for.
    was_steadied: bool,
    /// How many canaries beside requests were wrong.
    failed_beside: u32,
}

impl FirstAnswer {
    /// With the kept one, if there is one.
    pub(super) fn of(model: &config::Model, kept_at: Option<PathBuf>) -> Self {
        let canary = &model.canary;
        let asked = format!("{}\n{}\n{}", model.served_as, canary.tokens, canary.prompt);
        let first = kept_at.as_deref().and_then(|path| kept(path, &asked));
        let mut own = Self {
            kind: canary.kind,
            expect: canary.expect.clone(),
            asked,
            known: None,
            first: None,
            kept_at,
            is_beside: canary.is_beside,
            steady: None,
            was_steadied: false,
            failed_beside: 0,
        };
        own.remember(first);
        own
    }

    /// Takes over what was answered to the same question.
    pub(super) fn inherit(&mut self, before: &Self) {
        if self.first.is_none() && self.asked == before.asked {
            self.remember(before.first.clone());
            if self.first.is_some() {
                (self.steady, self.was_steadied) = (before.steady.clone(), before.was_steadied);
                self.failed_beside = before.failed_beside;
            }
        }
    }

    fn remember(&mut self, first: Option<Answer>) {
        let is_wanted =
            |first: &Answer| self.expect.is_none() && self.kind.is_none_or(|kind| kind == first.kind);
        self.first = first.filter(is_wanted);
        self.known = self.first.as_ref().map(|first| first.kind);
    }

    /// The kind to ask by, unless that is to be found.
    pub(super) fn known(&self) -> Option<CanaryKind> {
        self.known
    }

    /// What a canary beside requests is asked by, and the text that it begins with.
    pub(super) fn steady(&self) -> Option<(CanaryKind, String)> {
        let steady = self.steady.clone().filter(|_| self.is_beside);
        self.first.as_ref().zip(steady).map(|(first, text)| (first.kind, text))
    }

    /// Whether a canary beside other requests is judged as well as alone: texts may differ in a batch.
    pub(super) fn is_sure_in_batch(&self) -> bool {
        let is_no_text = self.first.as_ref().is_some_and(|first| !first.kind.is_generation());
        self.expect.is_some() || is_no_text || self.steady().is_some()
    }

    /// The kind to ask by, to find out how much of the first answer stays the same beside requests. `None` where that is
    /// known, or not needed.
    pub(super) fn to_be_steadied(&self) -> Option<CanaryKind> {
        let is_due = self.is_beside && !self.was_steadied && self.failed_beside < FAILED_MAX;
        let first = self.first.as_ref().filter(|_| is_due)?;
        first.kind.is_generation().then_some(first.kind)
    }

    /// Before these answers are asked for, so that it is tried once.
    pub(super) fn is_being_steadied(&mut self) {
        self.was_steadied = true;
    }

    /// A canary beside requests was wrong: how much can be relied on is found out anew, if this is not usual.
    pub(super) fn failed_beside(&mut self) {
        (self.steady, self.was_steadied) = (None, false);
        self.failed_beside = self.failed_beside.saturating_add(1);
    }

    /// These answers came in one batch: what they begin with alike is what can be relied on there.
    pub(super) fn steadied_by(&mut self, answers: &[Answer]) {
        let Some(Content::Text(first)) = self.first.as_ref().map(|first| &first.content) else { return };
        let mut steady = first.as_str();
        for answer in answers {
            let Content::Text(text) = &answer.content else { return };
            let same = steady.char_indices().zip(text.chars()).find(|((_, one), other)| one != other);
            let end = same.map_or(steady.len().min(text.len()), |((at, _), _)| at);
            steady = &steady[..end];
        }
        self.steady = Some(steady.to_owned()).filter(|steady| !steady.trim().is_empty());
    }

    /// After the engine refused the known kind. Other kinds may be asked if there is nothing to compare with.
    ///
    /// # Errors
    /// Why that is a failure.
    pub(super) fn on_unserved(&mut self, error: &EngineError) -> Result<(), String> {
        if self.first.is_none() {
            self.known = None;
            return Ok(());
        }
        Err(format!(
            "it no longer serves the kind of request of its first answer: {error}; {}",
            self.next_step()
        ))
    }

    /// Returns what is to be written where.
    ///
    /// # Errors
    /// How the answer differs.
    pub(super) fn judge(&mut self, answer: Answer) -> Result<Option<(PathBuf, Value)>, String> {
        self.known = Some(answer.kind);
        if let Some(expected) = &self.expect {
            return answer.contains(expected).map(|()| None);
        }
        if let Some(first) = &self.first {
            let differs = |reason: String| format!("{reason}; {}", self.next_step());
            return answer.agrees_with(first).map(|()| None).map_err(differs);
        }
        let kept = self.kept_at.clone().map(|path| {
            (path, json!({ "asked": self.asked, "kind": answer.kind, "said": answer.to_json() }))
        });
        self.first = Some(answer);
        Ok(kept)
    }

    /// What is wrong with an answer beside requests that says something else.
    pub(super) fn differs(&self, text: &str) -> String {
        let said = Answer { kind: CanaryKind::Completion, content: Content::Text(text.to_owned()) };
        let reason = self.first.as_ref().and_then(|first| said.agrees_with(first).err()).unwrap_or_default();
        format!("{reason}; {}", self.next_step())
    }

    fn next_step(&self) -> String {
        let remove = match &self.kept_at {
            Some(path) => format!("remove {} and start the service again", path.display()),
            None => "start the service again".to_owned(),
        };
        format!(
            "if the engine was changed on purpose, {remove}, or change kind or prompt under [model.canary]"
        )
    }
}

/// Replaces the file atomically.
pub(super) async fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        tokio::fs::create_dir_all(folder).await?;
    }
    let whole = path.with_extension("new");
    tokio::fs::write(&whole, text).await?;
    tokio::fs::rename(&whole, path).await
}

/// The first answer, if the file has one to the same prompt. Without a kind, it is of a completion.
fn kept(path: &Path, asked: &str) -> Option<Answer> {
    let text = std::fs::read_to_string(path).ok()?;
    let kept: Value = serde_json::from_str(&text).ok()?;
    if kept.get("asked")?.as_str()? != asked {
        return None;
    }
    let kind = match kept.get("kind") {
        None => CanaryKind::Completion,
        Some(kind) => CanaryKind::deserialize(kind).ok()?,
    };
    Answer::of_json(kind, kept.get("said")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(canary: &str) -> config::Model {
        let text =
            format!("[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:1\"\n[model.canary]\n{canary}");
        config::Config::parse(&text, &|_| Ok(String::new())).unwrap().models.remove(0)
    }

    fn vector(numbers: [f64; 2]) -> Answer {
        Answer { kind: CanaryKind::Embedding, content: Content::Vector(numbers.to_vec()) }
    }

    fn chat() -> Answer {
        Answer { kind: CanaryKind::Chat, content: Content::Text("three".to_owned()) }
    }

    fn unserved() -> EngineError {
        let request_line = "POST http://127.0.0.1:1/v1/embeddings".to_owned();
        EngineError::Refused { request_line, status: 404, message: "Not Found".to_owned() }
    }

    /// The folder is removed with the test.
    fn kept_in() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one.first-answer");
        (folder, path)
    }

    #[test]
    fn an_answer_is_compared_with_the_first() {
        let (_folder, path) = kept_in();
        let mut first = FirstAnswer::of(&model(""), Some(path.clone()));
        let (_, written) = first.judge(vector([1.0, 2.0])).unwrap().expect("the first is kept");
        assert_eq!(first.judge(vector([1.01, 2.0])), Ok(None));
        let error = first.judge(vector([2.0, -1.0])).unwrap_err();
        assert!(error.contains("cosine") && error.contains("one.first-answer"), "{error}");
        assert_eq!(first.known(), Some(CanaryKind::Embedding));

        std::fs::write(&path, written.to_string()).unwrap();
        let mut next = FirstAnswer::of(&model(""), Some(path.clone()));
        assert_eq!(next.known(), Some(CanaryKind::Embedding));
        assert!(next.judge(vector([2.0, -1.0])).is_err());
        let other = FirstAnswer::of(&model("prompt = \"x\""), Some(path.clone()));
        assert_eq!(other.known(), None, "it was asked something else");
        // As written before kinds.
        let asked = &next.asked;
        std::fs::write(&path, json!({ "asked": asked, "said": " three" }).to_string()).unwrap();
        assert_eq!(FirstAnswer::of(&model(""), Some(path)).known(), Some(CanaryKind::Completion));
    }

    #[test]
    fn a_first_answer_of_a_kind_that_is_no_longer_served_is_a_failure() {
        let (_folder, path) = kept_in();
        let mut first = FirstAnswer::of(&model(""), Some(path));
        first.judge(vector([1.0, 2.0])).unwrap();
        let error = first.on_unserved(&unserved()).unwrap_err();
        for part in
            ["/v1/embeddings: it answered 404", "one.first-answer", "kind or prompt under [model.canary]"]
        {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(first.known(), Some(CanaryKind::Embedding), "no other kind is asked");
        assert!(first.judge(chat()).is_err());
    }

    #[test]
    fn another_kind_may_be_asked_if_nothing_is_compared() {
        let mut expecting = FirstAnswer::of(&model("expect = \"three\""), None);
        expecting.judge(chat()).unwrap();
        assert_eq!(expecting.known(), Some(CanaryKind::Chat));
        assert_eq!(expecting.on_unserved(&unserved()), Ok(()));
        assert_eq!(expecting.known(), None);
    }

    #[test]
    fn the_configuration_may_ask_for_another_first_answer() {
        let mut before = FirstAnswer::of(&model(""), None);
        before.judge(vector([1.0, 2.0])).unwrap();
        for (canary, is_inherited) in [
            ("", true),
            ("kind = \"embedding\"", true),
            ("kind = \"chat\"", false),
            ("prompt = \"x\"", false),
            ("expect = \"three\"", false),
        ] {
            let mut after = FirstAnswer::of(&model(canary), None);
            after.inherit(&before);
            assert_eq!(after.known() == Some(CanaryKind::Embedding), is_inherited, "{canary}");
        }
    }

    fn text(said: &str) -> Answer {
        Answer { kind: CanaryKind::Completion, content: Content::Text(said.to_owned()) }
    }

    #[test]
    fn what_batches_change_is_not_compared() {
        let mut first = FirstAnswer::of(&model("when = \"beside\""), None);
        assert_eq!(first.to_be_steadied(), None, "there is no first answer");
        first.judge(text(" 7, 8, \u{e4}a")).unwrap();
        assert_eq!((first.to_be_steadied(), first.steady()), (Some(CanaryKind::Completion), None));
        first.is_being_steadied();
        assert_eq!(first.to_be_steadied(), None, "it is tried once");
        first.steadied_by(&[text(" 7, 8, \u{e4}a"), text(" 7, 8, \u{e4}"), text(" 7, 8, \u{fc}b")]);
        assert_eq!(first.steady(), Some((CanaryKind::Completion, " 7, 8, ".to_owned())));
        for _ in 0..FAILED_MAX {
            first.failed_beside();
        }
        assert_eq!((first.to_be_steadied(), first.steady()), (None, None));
        // Nothing in common is nothing to compare with.
        let mut other = FirstAnswer::of(&model("when = \"beside\""), None);
        other.judge(text(" one")).unwrap();
        other.steadied_by(&[text(" two")]);
        assert_eq!(other.steady(), None);
        // Another configuration has it before.
        let mut before = FirstAnswer::of(&model("when = \"before\""), None);
        before.inherit(&first);
        assert_eq!((before.to_be_steadied(), before.steady()), (None, None));
    }
}
