//! `[hibernate]`: how engines hibernate.

use poorwill_front::file::{Size, Wait};
use poorwill_front::settings::SectionMistakes;
use serde::Deserialize;

use super::Hibernate;

/// For models whose rules need it.
pub(super) const WITHOUT_HIBERNATE: &str =
    "hibernates and hibernate_after need the table [hibernate], which is missing; add it, or leave them out";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawHibernate {
    pub(super) after: Option<Wait>,
    pub(super) residue_max: Option<Size>,
    host_max: Option<Size>,
    pub(super) wait_max: Option<Wait>,
    #[serde(default)]
    helper: Vec<String>,
}

impl RawHibernate {
    pub(super) fn checked(self, mistakes: &mut SectionMistakes<'_>) -> Hibernate {
        for (what, size) in [("residue_max", self.residue_max), ("host_max", self.host_max)] {
            let is_zero = size.is_some_and(|size| size.0 == 0);
            mistakes.add_if(is_zero, format!("{what} is 0; leave it out or make it larger"));
        }
        mistakes.add_if(
            self.wait_max.is_some_and(|wait| wait.0.is_zero()),
            "wait_max is 0, so no engine could hibernate; leave it out or make it longer",
        );
        mistakes.add_if(
            self.helper.first().is_some_and(String::is_empty)
                || self.helper.iter().any(|word| word.contains('\0')),
            "helper begins with an empty word, or has a NUL in it; begin with a program",
        );
        let usual = Hibernate::default();
        Hibernate {
            helper: self.helper,
            wait_max: self.wait_max.map_or(usual.wait_max, |wait| wait.0),
            host_max_bytes: self.host_max.map(|size| size.0),
        }
    }
}
