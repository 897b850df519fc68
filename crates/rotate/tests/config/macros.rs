//! Macros of a configuration.

use poorwill_rotate::config::{Config, MemorySource};

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
    assert_eq!(config.memory, MemorySource::Processes { gpu_bytes: 8 << 30, folder: None });
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
