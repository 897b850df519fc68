//! The page of what commands print with `--json`.

use std::collections::BTreeSet;

use super::head;
use super::serialized::{Row, Types, Written};
use super::wording::anchor;
use crate::tidy::tree::{File, file};

const TEXT: &str = "\
# JSON of commands

With `--json` a command writes one object to standard output, in one line. [Commands](commands.md) has the exit codes.
A check that failed (exit code 1, of `replay` also 3) still writes the whole object. Without a result (exit code 1, of
`replay` 2) it is an error:

| key | type | meaning |
|---|---|---|
| `error` | text | What failed, and what to do; several mistakes have a line each. |
| `kind` | text; `hibernate` only | For programs, such as `busy`, `no_such_process`, `out_of_host_memory` or `wrong_state`. |
| `pid` | integer or null; `hibernate` only | The process that failed, where it is one. |
| `left` | list of [LeftProcess](#leftprocess); `hibernate` only | Processes that do not run as before, and are left so. |

Keys and texts may be added. A key that \"may be absent\" is left out where it has no value.

";

/// What is printed.
enum Printed {
    /// A type of a crate.
    Type(&'static str, &'static str),
    /// The same, described once for several commands.
    Linked(&'static str, &'static str),
    /// A variant of a type of a crate.
    Variant(&'static str, &'static str, &'static str),
    /// What is described elsewhere.
    Words(&'static str),
}

use Printed::{Linked, Type, Variant, Words};

const ACCEPTED: Printed = Linked("cli", "CommandReply");

/// Command, what it is given, and what it prints.
const COMMANDS: &[(&str, &str, Printed)] = &[
    ("demo", "", Type("local", "DemoReport")),
    ("verify", "", Type("bench", "VerifyReport")),
    ("hibernate", "", Type("poorwill", "HibernateReport")),
    ("hibernate", "--resume", Type("poorwill", "ResumeReport")),
    ("hibernate", "--state", Type("local", "States")),
    ("hibernate", "--inspect", Type("local", "Inspections")),
    ("hibernate", "--recover", Type("local", "RecoveredSets")),
    ("doctor", "", Type("local", "DoctorOutcome")),
    ("bench churn", "", Type("bench", "ChurnReport")),
    ("bench sleep", "", Type("bench", "SleepBenchReport")),
    ("bench offload", "", Type("bench", "OffloadReport")),
    ("bench load", "", Type("bench", "LoadBenchReport")),
    ("replay", "", Type("cli", "ReplayReport")),
    ("rotate", "--demo", Type("cli", "RotateDemoReport")),
    ("rotate init", "", Type("cli", "InitReport")),
    ("rotate import", "", Type("cli", "ImportReport")),
    ("rotate check", "", Type("cli", "CheckReport")),
    ("rotate status", "", Words("The [status](rotation-api.md#status) of the service.")),
    ("rotate wake", "", ACCEPTED),
    ("rotate sleep", "", ACCEPTED),
    ("rotate sleep", "--all", Words("`models`: all of them, as in the [status](rotation-api.md#status).")),
    ("rotate hibernate", "", ACCEPTED),
    ("rotate restart", "", ACCEPTED),
    ("rotate pin", "", ACCEPTED),
    ("rotate reload", "", Words("`reloaded`: `true`.")),
    ("rotate profile", "", Words("`profile`: the chosen one, or `null`.")),
    ("rotate validate", "", Type("cli", "ValidateOutcome")),
    ("rotate log", "", Type("cli", "LogReply")),
    ("rotate schema", "", Words("A JSON Schema of the configuration.")),
    ("route", "", Words("Nothing: only its log on standard error is JSON.")),
    ("fleet", "--demo", Type("cli", "FleetDemoReport")),
    ("fleet init", "", Variant("cli", "FleetReply", "Init")),
    ("fleet status", "", Type("router", "FleetStatus")),
    ("fleet drain", "", Variant("cli", "FleetReply", "Wish")),
    ("fleet pin", "", Variant("cli", "FleetReply", "Wish")),
    ("broker", "--status", Type("broker", "BrokerStatus")),
    ("broker", "--give-up", Type("cli", "GiveUpReport")),
];

/// The page. A key without a meaning, and a command that is missing, are failures.
pub(super) fn page(files: &[File]) -> String {
    expect_every_command(&file(files, "docs/reference/commands.md").text);
    let types = Types::of(files);
    let mut links = vec![found(&types, "core", "LeftProcess")];
    let mut page = head("json_reference") + TEXT;
    let mut before = "";
    for (command, given, printed) in COMMANDS {
        if before != *command {
            page += &format!("## `poorwill {command}`\n\n");
        }
        before = command;
        if !given.is_empty() {
            page += &format!("With `{given}`:\n\n");
        }
        page += &match printed {
            Words(words) => format!("{words}\n\n"),
            Type(krate, name) => {
                let found = found(&types, krate, name);
                table(found, types.rows(found, &mut links))
            }
            Linked(krate, name) => {
                let found = found(&types, krate, name);
                links.push(found);
                format!("A [{name}](#{}).\n\n", anchor(&found.title(&types)))
            }
            Variant(krate, name, variant) => {
                let found = found(&types, krate, name);
                table(found, types.rows_of_variant(found, variant))
            }
        };
    }
    page += "## Objects and texts\n\n";
    page + objects(&types, links).trim_end() + "\n"
}

/// Each once, by name, with those that it links to.
fn objects<'t>(types: &'t Types, mut links: Vec<&'t Written>) -> String {
    let (mut seen, mut sections) = (BTreeSet::new(), BTreeSet::new());
    while let Some(link) = links.pop() {
        let title = link.title(types);
        if seen.insert(title.clone()) {
            let rows = types.rows(link, &mut links);
            let text = printed_by(link).unwrap_or_else(|| table(link, rows));
            sections.insert((title.clone(), format!("### {title}\n\n{text}")));
        }
    }
    sections.into_iter().map(|(_, section)| section).collect()
}

/// A link to the only command that prints it.
fn printed_by(of: &Written) -> Option<String> {
    let is_it = |printed: &Printed| matches!(printed, Type(krate, name) if (*krate, *name) == (&*of.krate, &*of.name));
    let mut commands = COMMANDS.iter().filter(|(.., printed)| is_it(printed)).map(|(command, ..)| command);
    let (command, None) = (commands.next()?, commands.next()) else { return None };
    Some(format!("As [`poorwill {command}`](#poorwill-{}) prints it.\n\n", command.replace(' ', "-")))
}

fn table(of: &Written, rows: Vec<Row>) -> String {
    assert!(!rows.is_empty(), "{} is empty", of.name);
    let is_text = rows.iter().all(|row| row.kind.is_empty());
    let head =
        if is_text { "| text | meaning |\n|---|---|\n" } else { "| key | type | meaning |\n|---|---|---|\n" };
    let row = |Row { krate, owner, name, kind, meaning }| {
        let meaning =
            meaning.unwrap_or_else(|| panic!("{krate} {owner}: `{name}` has no meaning: give it a comment"));
        if is_text {
            format!("| `{name}` | {meaning} |\n")
        } else {
            format!("| `{name}` | {kind} | {meaning} |\n")
        }
    };
    let rows: String = rows.into_iter().map(row).collect();
    format!("{head}{rows}\n")
}

fn found<'t>(types: &'t Types, krate: &str, name: &str) -> &'t Written {
    types.find(krate, name).unwrap_or_else(|| panic!("there is no {name} in {krate} that serde writes"))
}

/// Those of the page of commands that have `--json`.
fn expect_every_command(commands: &str) {
    let with_json =
        commands.split("\n## `poorwill ").skip(1).filter(|section| section.contains("| `--json` |"));
    let with_json: BTreeSet<&str> = with_json.filter_map(|section| section.split('`').next()).collect();
    let known: BTreeSet<&str> = COMMANDS.iter().map(|(command, ..)| *command).collect();
    assert_eq!(known, with_json);
    assert!(known.len() > 20);
}
