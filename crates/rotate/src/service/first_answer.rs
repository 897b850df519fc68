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
use crate::engine::{Answer, EngineError};

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
        };
        own.remember(first);
        own
    }

    /// Takes over what was answered to the same question.
    pub(super) fn inherit(&mut self, before: &Self) {
        if self.first.is_none() && self.asked == before.asked {
            self.remember(before.first.clone());
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

    use crate::engine::Content;

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
}
