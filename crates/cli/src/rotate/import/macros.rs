//! llama-swap's macros, replaced. What results is text in this configuration's own words.
//!
//! A variable stays a `${env.NAME}`, so that no secret is written down. The port stays `${PORT}` where it is that of the
//! url.

use super::super::draft::literal;
use super::yaml::{Entry, LineColumn, Mistake, Node, Yaml};

const ENV: &str = "env.";

/// Macros that hold for a model, or for the whole file.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope<'y> {
    /// Later ones hide earlier ones.
    macros: Vec<&'y Entry>,
    model: Option<&'y str>,
    /// What `${PORT}` becomes.
    port: Option<String>,
}

/// A replaced text, and whether it may be a number.
struct Replaced {
    text: String,
    is_plain: bool,
}

impl<'y> Scope<'y> {
    pub(super) fn of_file(file: &'y Node) -> Result<Self, Mistake> {
        let mut scope = Self::default();
        scope.add(file.get("macros"))?;
        Ok(scope)
    }

    /// The model's own macros come before those of the file.
    pub(super) fn of_model(&self, name: &'y str, model: &'y Node) -> Result<Self, Mistake> {
        let mut scope = Self { model: Some(name), ..self.clone() };
        scope.add(model.get("macros"))?;
        Ok(scope)
    }

    /// What `${PORT}` stands for.
    pub(super) fn set_port(&mut self, port: Option<String>) {
        self.port = port;
    }

    pub(super) fn has_port(&self) -> bool {
        self.port.is_some()
    }

    fn add(&mut self, table: Option<&'y Node>) -> Result<(), Mistake> {
        let Some(table) = table.filter(|table| !table.is_null()) else { return Ok(()) };
        let Yaml::Map(entries) = &table.yaml else {
            return Mistake::at(table.place, "macros are a mapping of names to texts");
        };
        for entry in entries {
            if ["PID", "PORT", "MODEL_ID"].contains(&entry.key.as_str()) {
                return Mistake::at(entry.place, format!("the name `{}` is none for a macro", entry.key));
            }
            if !matches!(entry.value.yaml, Yaml::Scalar { .. }) {
                return Mistake::at(
                    entry.place,
                    format!("the macro `{}` is neither a text nor a number", entry.key),
                );
            }
            self.macros.push(entry);
        }
        Ok(())
    }

    /// With all macros replaced. Keys of mappings are none.
    pub(super) fn node(&self, node: &Node) -> Result<Node, Mistake> {
        let yaml = match &node.yaml {
            Yaml::Scalar { text, is_plain } => {
                let replaced = self.replaced(text, *is_plain, node.place, &mut Vec::new())?;
                Yaml::Scalar { text: replaced.text, is_plain: replaced.is_plain }
            }
            Yaml::List(items) => {
                Yaml::List(items.iter().map(|item| self.node(item)).collect::<Result<_, _>>()?)
            }
            Yaml::Map(entries) => {
                let entry = |entry: &Entry| Ok(Entry { value: self.node(&entry.value)?, ..entry.clone() });
                Yaml::Map(entries.iter().map(entry).collect::<Result<_, _>>()?)
            }
        };
        Ok(Node { place: node.place, yaml })
    }

    pub(super) fn text(&self, text: &str, place: LineColumn) -> Result<String, Mistake> {
        self.replaced(text, false, place, &mut Vec::new()).map(|replaced| replaced.text)
    }

    fn replaced(
        &self,
        text: &str,
        is_plain: bool,
        place: LineColumn,
        within: &mut Vec<String>,
    ) -> Result<Replaced, Mistake> {
        let (mut replaced, mut rest) = (String::new(), text);
        while let Some(at) = rest.find("${") {
            replaced += &rest[..at];
            rest = &rest[at..];
            let name = rest[2..].split_once('}').map(|(name, _)| name).filter(|name| is_name(name));
            let Some(name) = name else {
                replaced += &literal("${");
                rest = &rest[2..];
                continue;
            };
            let value = self.value(name, place, within)?;
            rest = &rest[name.len() + 3..];
            // Alone, it keeps its type.
            if replaced.is_empty() && rest.is_empty() {
                return Ok(value);
            }
            replaced += &value.text;
        }
        Ok(Replaced { text: replaced + rest, is_plain })
    }

    fn value(&self, name: &str, place: LineColumn, within: &mut Vec<String>) -> Result<Replaced, Mistake> {
        let written = |text: String, is_plain: bool| Ok(Replaced { text, is_plain });
        match (name, self.model, &self.port) {
            ("MODEL_ID", Some(model), _) => return written(literal(model), false),
            ("PORT", _, Some(port)) => return written(port.clone(), true),
            // It stays: the process is known when it ends.
            ("PID", ..) => return written("${PID}".to_owned(), false),
            _ => {}
        }
        if name.starts_with(ENV) {
            return written(format!("${{{name}}}"), true);
        }
        let Some(found) = self.macros.iter().rev().find(|entry| entry.key == name) else {
            let reason = match name {
                "PORT" => "`${PORT}` is for models whose cmd has it".to_owned(),
                _ => format!("there is no macro `{name}`; define it under macros"),
            };
            return Mistake::at(place, reason);
        };
        if within.iter().any(|outer| outer == name) {
            return Mistake::at(
                found.place,
                format!("the macro `{name}` contains itself, by {}", within.join(", ")),
            );
        }
        let Yaml::Scalar { text, is_plain } = &found.value.yaml else { return written(String::new(), false) };
        within.push(name.to_owned());
        let replaced = self.replaced(text, *is_plain, place, within);
        within.pop();
        replaced
    }

    /// Whether a text mentions `name`, itself or by its macros.
    pub(super) fn mentions(&self, text: &str, name: &str) -> bool {
        self.mentions_within(text, name, self.macros.len() + 1)
    }

    fn mentions_within(&self, text: &str, name: &str, depth: usize) -> bool {
        text.contains(&format!("${{{name}}}"))
            || depth > 0
                && self.macros.iter().any(|entry| {
                    text.contains(&format!("${{{}}}", entry.key))
                        && entry.value.text().is_some_and(|text| self.mentions_within(text, name, depth - 1))
                })
    }
}

fn is_name(text: &str) -> bool {
    let name = text.strip_prefix(ENV).unwrap_or(text);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::super::yaml::parsed;
    use super::*;

    fn replaced(macros: &str, text: &str) -> Result<String, String> {
        let file = parsed(&format!("macros: {{{macros}}}\n")).unwrap();
        let mut scope = Scope::of_file(&file).map_err(|mistake| mistake.text)?;
        (scope.model, scope.port) = (Some("m"), Some("1".to_owned()));
        scope.text(text, file.place).map_err(|mistake| mistake.text)
    }

    #[test]
    fn macros_are_replaced_in_macros() {
        for (macros, text, expected) in [
            ("a: 1, b: 'x ${a}'", "${b} ${a}", "x 1 1"),
            // They need not be in order.
            ("b: 'x ${a}', a: 1", "${b}", "x 1"),
            ("a: '${PORT} ${MODEL_ID}'", "${a}", "1 m"),
            ("a: '${env.HOME}'", "${a}/x ${env.B}", "${env.HOME}/x ${env.B}"),
            ("a: 1", "$${b:-${a}} $x {a} ${", "$$${b:-1} $x {a} $${"),
        ] {
            assert_eq!(replaced(macros, text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn mistakes_name_the_macro() {
        for (macros, text, words) in [
            ("", "${gone}", "there is no macro `gone`"),
            ("a: '${b}', b: '${a}'", "${a}", "the macro `a` contains itself, by a, b"),
            ("a: '${a}'", "${a}", "the macro `a` contains itself, by a"),
            ("PORT: 1", "", "the name `PORT` is none"),
            ("a: [1]", "", "the macro `a` is neither"),
        ] {
            let error = replaced(macros, text).expect_err(text);
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn mentions_are_found_in_macros() {
        let file = parsed("macros: {a: '${b}', b: '${PORT}', c: '${c}'}").unwrap();
        let scope = Scope::of_file(&file).unwrap();
        assert!(scope.mentions("x ${a}", "PORT") && scope.mentions("${PORT}", "PORT"));
        assert!(!scope.mentions("${c} PORT", "PORT"));
    }
}
