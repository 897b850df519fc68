//! The mistakes of a configuration, which are reported all at once.

/// All that were found so far.
#[derive(Debug, Default)]
pub struct Mistakes(Vec<Mistake>);

#[derive(Debug)]
pub(crate) struct Mistake {
    pub(crate) section: String,
    pub(crate) reason: String,
}

/// Those of one section.
#[derive(Debug)]
pub struct SectionMistakes<'a> {
    section: String,
    all: &'a mut Mistakes,
}

impl Mistakes {
    /// For those of this section or model.
    pub fn of(&mut self, section: impl Into<String>) -> SectionMistakes<'_> {
        SectionMistakes { section: section.into(), all: self }
    }

    pub(crate) fn all(self) -> Vec<Mistake> {
        self.0
    }
}

impl SectionMistakes<'_> {
    /// Adds one, with what would help.
    pub fn add(&mut self, reason: impl Into<String>) {
        self.all.0.push(Mistake { section: self.section.clone(), reason: reason.into() });
    }

    /// The same, if it is one.
    pub fn add_if(&mut self, is_wrong: bool, reason: impl Into<String>) {
        if is_wrong {
            self.add(reason);
        }
    }

    /// The value, unless it is a mistake, which is added.
    pub fn right<T>(&mut self, checked: Result<T, String>) -> Option<T> {
        checked.map_err(|reason| self.add(reason)).ok()
    }
}
