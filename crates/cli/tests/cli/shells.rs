//! Completions for shells, and man pages.

use std::collections::BTreeSet;
use std::fs;

use crate::support::{Folder, assert_clean, run};

#[test]
fn every_shell_has_completions() {
    let folder = Folder::new();
    for (shell, word) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef poorwill"),
        ("fish", "complete -c poorwill"),
        ("elvish", "edit:completion"),
        ("powershell", "Register-ArgumentCompleter"),
    ] {
        let script = run(&folder, &["completions", shell]).succeeded();
        for word in [word, "verify", "churn", "budget", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        // Values are completed where the shell's generator supports them.
        assert!(script.contains("swizzle") || ["elvish", "powershell"].contains(&shell), "{shell}");
        for hidden in ["mock-engine", "reference"] {
            let is_word = |line: &str| {
                line.split(|c: char| !(c.is_alphanumeric() || c == '-')).any(|word| word == hidden)
            };
            assert!(!script.lines().any(is_word), "{shell}: {hidden}");
        }
    }
}

#[test]
fn a_shell_that_is_not_known_is_wrong_usage() {
    let folder = Folder::new();
    for args in [&["completions"][..], &["completions", "tcsh"], &["completions", "bash", "zsh"]] {
        let ran = run(&folder, args);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
        let word = if args.len() == 1 { "<SHELL>" } else { args[args.len() - 1] };
        assert!(ran.stderr.contains(word), "{ran:?}");
    }
    let ran = run(&folder, &["completions", "tcsh"]);
    assert!(["bash", "zsh", "fish", "elvish", "powershell"].iter().all(|shell| ran.stderr.contains(shell)));
}

#[test]
fn the_main_man_page_is_on_standard_output() {
    let page = run(&Folder::new(), &["man"]).succeeded();
    assert!(page.contains(".TH poorwill 1"), "{page}");
    for word in ["verify", "doctor", "completions", "SUBCOMMANDS"] {
        assert!(page.contains(word), "{word}: {page}");
    }
    assert!(!page.contains("reference") && !page.contains("mock"), "{page}");
}

#[test]
fn every_command_has_a_man_page() {
    let folder = Folder::new();
    // The folder is created, and pages are replaced.
    for _ in 0..2 {
        let output = run(&folder, &["man", "share/man1"]).succeeded();
        assert_clean(&output);
        let pages: BTreeSet<String> = fs::read_dir(folder.join("share/man1"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(output, format!("{} man pages written to share/man1\n", pages.len()));
        for page in ["poorwill", "poorwill-verify", "poorwill-bench", "poorwill-bench-churn", "poorwill-man"]
        {
            assert!(pages.contains(&format!("{page}.1")), "{pages:?}");
        }
        assert!(pages.contains("poorwill-rotate-validate.1"), "{pages:?}");
        assert!(
            pages.iter().all(|page| !["mock", "reference", "help"].iter().any(|word| page.contains(word)))
        );
    }
    let page = fs::read_to_string(folder.join("share/man1/poorwill-bench-churn.1")).unwrap();
    for word in [".TH poorwill-bench-churn 1", "poorwill bench churn", "rounds", "swizzle"] {
        assert!(page.contains(word), "{word}: {page}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = Folder::new();
    folder.write("a file", "");
    run(&folder, &["man", "a file"]).failed(&["\"a file\"", "cannot create", "choose a folder"]);
    run(&folder, &["man", "a file/below"]).failed(&["a file/below", "cannot create"]);
    fs::create_dir_all(folder.join("man/poorwill-verify.1")).unwrap();
    run(&folder, &["man", "man"]).failed(&["poorwill-verify.1", "cannot write"]);
    let ran = run(&folder, &["man", "one", "two"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
}

#[test]
fn help_lists_completions_and_man_pages() {
    let help = run(&Folder::new(), &["--help"]).succeeded();
    for word in ["completions", "man", "verify"] {
        assert!(
            help.lines().any(|line| line.trim_start().starts_with(&format!("{word} "))),
            "{word}: {help}"
        );
    }
    assert!(!help.contains("mock-engine") && !help.contains("reference"), "{help}");
}
