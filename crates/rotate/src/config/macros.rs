//! `${NAME}` in the texts of the file: its own macros, variables of the environment, a model's name and port.
//!
//! Texts are replaced after parsing. No value can become syntax, and places of mistakes stay those of the file. `$${`
//! stands for `${`, and what cannot be a name, such as `${A:-b}`, stays as it is.

use std::borrow::Cow;
use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::raw::Secret;
use super::{ConfigError, Place, values};

/// The table of macros.
const TABLE: &str = "macros";
/// The name of the model that a text belongs to.
const MODEL: &str = "MODEL";
/// The port of its url.
const PORT: &str = "PORT";
/// The process that a command ends, which is known only then: it stays as it is.
const PID: &str = "PID";
/// Before the name of a variable.
const VARIABLE: &str = "env.";

/// Parses a file and replaces its macros. `secret` resolves variables, by `env:NAME`.
pub(super) fn parsed<'t>(text: &'t str, secret: Secret<'_>) -> Result<Spanned<DeTable<'t>>, ConfigError> {
    let mut file = DeTable::parse(text).map_err(|error| values::explained(text, &error))?;
    let macros = Macros { text, secret, all: definitions(text, file.get_ref())? };
    for (key, value) in file.get_mut().iter_mut() {
        match (key.get_ref().as_ref(), value.get_mut()) {
            (TABLE, _) => {}
            ("model", DeValue::Array(models)) => {
                models.iter_mut().try_for_each(|model| macros.replace_in_model(model))?;
            }
            _ => macros.replace(value, &Scope::default())?,
        }
    }
    Ok(file)
}

struct Macros<'m> {
    text: &'m str,
    secret: Secret<'m>,
    all: BTreeMap<String, String>,
}

/// What a text belongs to.
#[derive(Default)]
struct Scope {
    model: Option<String>,
    port: Option<u16>,
}

fn definitions(text: &str, file: &DeTable<'_>) -> Result<BTreeMap<String, String>, ConfigError> {
    let mut all = BTreeMap::new();
    let table = file.get(TABLE).and_then(|table| table.get_ref().as_table());
    for (key, value) in table.into_iter().flat_map(|table| table.iter()) {
        let name = key.get_ref().as_ref();
        let is_free = is_name(name) && !name.contains('.') && ![MODEL, PORT, PID].contains(&name);
        if !is_free {
            let reason = format!(
                "`{name}` cannot be the name of a macro: it has letters, digits, - and _, begins with a letter, and is \
                 none of {MODEL}, {PORT} and {PID}"
            );
            return Err(mistake(text, &key.span(), reason));
        }
        let written = match value.get_ref() {
            DeValue::String(value) => value.as_ref().to_owned(),
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => {
                text.get(value.span()).unwrap_or_default().to_owned()
            }
            _ => {
                let reason = format!("the macro `{name}` is neither a text nor a number");
                return Err(mistake(text, &value.span(), reason));
            }
        };
        all.insert(name.to_owned(), written);
    }
    Ok(all)
}

impl Macros<'_> {
    /// The name and the url come first: the other values may mention them.
    fn replace_in_model(&self, model: &mut Spanned<DeValue<'_>>) -> Result<(), ConfigError> {
        let mut scope = Scope::default();
        if let DeValue::Table(table) = model.get_mut() {
            if let Some(name) = table.get_mut("name") {
                self.replace(name, &scope)?;
                scope.model = name.get_ref().as_str().map(str::to_owned);
            }
            if let Some(url) = table.get_mut("url") {
                self.replace(url, &scope)?;
                scope.port = url.get_ref().as_str().and_then(port_of);
            }
            let mut rest =
                table.iter_mut().filter(|(key, _)| !["name", "url"].contains(&key.get_ref().as_ref()));
            return rest.try_for_each(|(_, value)| self.replace(value, &scope));
        }
        self.replace(model, &scope)
    }

    /// In a value, and in all values that it contains.
    fn replace(&self, value: &mut Spanned<DeValue<'_>>, scope: &Scope) -> Result<(), ConfigError> {
        let span = value.span();
        match value.get_mut() {
            DeValue::String(text) if text.contains("${") => {
                let replaced = self.replaced(text, scope, &mut Vec::new());
                *text = Cow::Owned(replaced.map_err(|reason| mistake(self.text, &span, reason))?);
                Ok(())
            }
            DeValue::Array(values) => values.iter_mut().try_for_each(|value| self.replace(value, scope)),
            DeValue::Table(table) => table.iter_mut().try_for_each(|(_, value)| self.replace(value, scope)),
            _ => Ok(()),
        }
    }

    /// `within` are the macros whose texts this one is in.
    fn replaced(&self, text: &str, scope: &Scope, within: &mut Vec<String>) -> Result<String, String> {
        let (mut replaced, mut rest) = (String::new(), text);
        while let Some(at) = rest.find('$') {
            replaced.push_str(&rest[..at]);
            rest = &rest[at..];
            let name = rest.strip_prefix("${").and_then(|rest| rest.split_once('}')).map(|(name, _)| name);
            if let Some(name) = name.filter(|name| is_name(name)) {
                replaced.push_str(&self.value(name, scope, within)?);
                rest = &rest[name.len() + 3..];
            } else if let Some(after) = rest.strip_prefix("$${") {
                replaced.push_str("${");
                rest = after;
            } else {
                replaced.push('$');
                rest = &rest[1..];
            }
        }
        Ok(replaced + rest)
    }

    fn value(&self, name: &str, scope: &Scope, within: &mut Vec<String>) -> Result<String, String> {
        let of_model = |value: Option<String>, what: &str| {
            value.ok_or_else(|| format!("`${{{name}}}` is {what}, and there is none here; write it out"))
        };
        match name {
            PID => return Ok(format!("${{{PID}}}")),
            MODEL => return of_model(scope.model.clone(), "the name of its [[model]]"),
            PORT => {
                return of_model(
                    scope.port.map(|port| port.to_string()),
                    "the port in the url of its [[model]]",
                );
            }
            _ => {}
        }
        if let Some(variable) = name.strip_prefix(VARIABLE) {
            return (self.secret)(&format!("env:{variable}"))
                .map_err(|reason| format!("`${{{name}}}`: {reason}"));
        }
        let Some(text) = self.all.get(name) else {
            return Err(format!(
                "`${{{name}}}` is no macro; say {name} = \"…\" under [macros], `${{env.{name}}}` for a variable of the \
                 environment, or `$${{{name}}}` to keep it as it is"
            ));
        };
        if within.iter().any(|outer| outer == name) {
            return Err(format!("the macro `{name}` contains itself, by {}", within.join(", ")));
        }
        within.push(name.to_owned());
        let replaced = self.replaced(text, scope, within);
        within.pop();
        replaced
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && text.chars().all(is_part)
}

fn port_of(url: &str) -> Option<u16> {
    url.trim_end_matches('/').rsplit_once(':')?.1.parse().ok()
}

fn mistake(text: &str, span: &std::ops::Range<usize>, reason: String) -> ConfigError {
    ConfigError::Syntax { text: reason, place: Some(Place::new(text, span)) }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, MemorySource};

    fn variable(source: &str) -> Result<String, String> {
        match source {
            "env:HOME" => Ok("/home/a".to_owned()),
            "env:ODD" => Ok("\"]\nname = \"${sizes}\" $${".to_owned()),
            other => Err(format!("there is no {other}")),
        }
    }

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, &variable).map_err(|error| error.to_string())
    }

    const MODEL: &str = "[[model]]\nname = \"one\"\nurl = \"http://127.0.0.1:8001/\"\n";

    fn command(lines: &str, text: &str) -> Result<String, String> {
        let config = parse(&format!("{lines}\n{MODEL}command = [\"x\", {text:?}]\n"))?;
        Ok(config.models[0].start.as_ref().unwrap().command[1].clone())
    }

    #[test]
    fn names_are_replaced_wherever_there_is_text() {
        let text = r#"
            state = "${root}/state"
            [macros]
            root = "${env.HOME}/rotate"
            size = 8
            part = 0.5
            program = "${env.HOME}/bin/vllm"
            same = "--served-model-name ${MODEL} --port ${PORT}"
            [memory]
            measure = "processes"
            gpu = "${size}GiB"
            [[model]]
            name = "m-${size}"
            aliases = ["${MODEL}-alias"]
            url = "http://127.0.0.1:800${size}"
            command = ["${program}", "${same}", "${part}${size}"]
            environment = { FILE = "${root}/${MODEL}" }
            [model.rules]
            wait_max = "${size}s"
            [model.canary]
            prompt = "Who is ${MODEL}?"
            [[model]]
            name = "other"
            url = "http://127.0.0.1:9000"
            command = ["x", "${same}"]
        "#;
        let config = parse(text).unwrap();
        assert_eq!(config.state.as_deref(), Some(std::path::Path::new("/home/a/rotate/state")));
        assert_eq!(config.memory, MemorySource::Processes { gpu_bytes: 8 << 30 });
        let model = &config.models[0];
        assert_eq!((model.name.as_str(), &model.aliases[..]), ("m-8", &["m-8-alias".to_owned()][..]));
        let start = model.start.as_ref().unwrap();
        assert_eq!(start.command, ["/home/a/bin/vllm", "--served-model-name m-8 --port 8008", "0.58"]);
        assert_eq!(start.environment["FILE"], "/home/a/rotate/m-8");
        assert_eq!((model.rules.wait_max.as_secs(), model.canary.prompt.as_str()), (8, "Who is m-8?"));
        let other = config.models[1].start.as_ref().unwrap();
        assert_eq!(other.command[1], "--served-model-name other --port 9000");
    }

    #[test]
    fn what_is_no_name_stays_as_it_is() {
        for (text, expected) in [
            ("a $ b $$ $x {y} $", "a $ b $$ $x {y} $"),
            ("${X:-1} ${#X} ${} ${1} ${X", "${X:-1} ${#X} ${} ${1} ${X"),
            ("$${X} $$${X} $${MODEL}", "${X} $${X} ${MODEL}"),
            ("${MODEL}${PORT}", "one8001"),
            ("kill ${PID}", "kill ${PID}"),
            // A variable's text is not looked at again, and is no TOML.
            ("${env.ODD}", "\"]\nname = \"${sizes}\" $${"),
        ] {
            assert_eq!(command("", text).as_deref(), Ok(expected), "{text}");
        }
        // Nor a key.
        let file = format!("{MODEL}command = [\"x\"]\nenvironment = {{ \"${{A}}\" = \"\" }}\n");
        assert!(parse(&file).unwrap().models[0].start.as_ref().unwrap().environment.contains_key("${A}"));
    }

    #[test]
    fn mistakes_have_their_place_and_say_what_helps() {
        for (macros, text, place, words) in [
            ("", "a ${gone}", (6, 17), "`${gone}` is no macro; say gone = \"…\" under [macros]"),
            ("", "a ${gone}", (6, 17), "or `$${gone}` to keep it"),
            ("", "${env.NOT_SET}", (6, 17), "`${env.NOT_SET}`: there is no env:NOT_SET"),
            ("a = \"${a}\"", "${a}", (6, 17), "the macro `a` contains itself, by a"),
            ("a = \"${b}\"\nb = \"${a}\"", "${b}", (7, 17), "the macro `b` contains itself, by b, a"),
            ("MODEL = \"x\"", "", (2, 1), "`MODEL` cannot be the name of a macro"),
            ("\"env.A\" = \"x\"", "", (2, 1), "`env.A` cannot be the name of a macro"),
            ("a = [1]", "", (2, 5), "the macro `a` is neither a text nor a number"),
        ] {
            let file = format!("[macros]\n{macros}\n{MODEL}command = [\"x\", {text:?}]\n");
            let error = Config::parse(&file, &variable).expect_err(&file);
            let at = error.place().map(|place| (place.line, place.column));
            assert_eq!(at, Some(place), "{file}{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        for (file, words) in [
            ("state = \"${MODEL}\"\n", "`${MODEL}` is the name of its [[model]], and there is none here"),
            ("[[model]]\nname = \"${MODEL}\"\n", "`${MODEL}` is the name of its [[model]]"),
            ("[[model]]\nurl = \"http://127.0.0.1:${PORT}\"\n", "`${PORT}` is the port in the url"),
            ("macros = 1\n[[model]]\nname = \"${a}\"\n", "`${a}` is no macro"),
        ] {
            assert!(parse(file).unwrap_err().contains(words), "{file}: {:?}", parse(file));
        }
    }

    /// The check after parsing has the place, too, where names are made up of macros.
    #[test]
    fn later_mistakes_have_their_place() {
        let file = "[macros]\na = \"x\"\n[[model]]\nname = \"m${a}\"\nurl = \"http://127.0.0.1\"\n";
        let error = parse(file).unwrap_err();
        assert!(error.starts_with("line 5, column 1: model `mx`: url is"), "{error}");
        let error = parse(&file.replace("url =", "level = 3\nurl =")).unwrap_err();
        assert!(error.starts_with("line 5, column 1: model `mx`: level is 3"), "{error}");
        let error = parse(&file.replace("url =", "urls =")).unwrap_err();
        assert!(error.starts_with("line 5, column 1: unknown field `urls`"), "{error}");
    }
}
