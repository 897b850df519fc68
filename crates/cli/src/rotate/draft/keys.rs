//! Which keys the configuration has: those that are not there yet are not written, and named as missing.

use poorwill_rotate::config::Config;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Keys {
    /// `engine = "http"`, and `[model.http]`.
    pub(in super::super) http: bool,
    pub(in super::super) stop_command: bool,
    /// `parameters`, `strip` and `variants`.
    pub(in super::super) parameters: bool,
    /// `display_name`, `description`, `metadata` and `listed`.
    pub(in super::super) names: bool,
    pub(in super::super) selectors: bool,
    pub(in super::super) profiles: bool,
    pub(in super::super) priority: bool,
}

impl Keys {
    /// By what the configuration accepts.
    pub(in super::super) fn known() -> Self {
        let is_known = |lines: &str| {
            let text = format!(
                "[[model]]\nname = \"a\"\nurl = \"http://127.0.0.1:1\"\ncommand = [\"a\"]\n{lines}\n"
            );
            Config::parse(&text, &|_| Ok("key".to_owned())).is_ok()
        };
        Self {
            http: is_known("engine = \"http\"\n[model.http]\nhealth = \"/health\""),
            stop_command: is_known("stop_command = [\"a\"]"),
            parameters: is_known("parameters = { a = 1 }\nstrip = [\"b\"]\n[model.variants.\"c\"]\na = 2"),
            names: is_known(
                "display_name = \"a\"\ndescription = \"b\"\nlisted = false\nmetadata = { a = 1 }",
            ),
            selectors: is_known("[[selector]]\nname = \"b\"\ntargets = [\"a\"]"),
            profiles: is_known("[profile.b]\nc = \"a\""),
            priority: is_known("[model.rules]\npriority = 1"),
        }
    }
}
