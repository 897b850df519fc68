//! Unsafe code says why it is sound.
//!
//! A block, an implementation and a foreign block need a `// SAFETY:` above them; a function and a
//! trait may instead document what their callers owe under `# Safety`. The comment stands at most
//! six lines of code higher. Types of function pointers claim nothing and need nothing.

/// How many lines that are not comments may stand between the explanation and the keyword.
const REACH: usize = 6;

/// The uses of `unsafe` that nothing explains.
pub(crate) fn unexplained(path: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut problems = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        for used in uses(line) {
            let explanations: &[&str] = match used {
                Use::Claim => &["// SAFETY:"],
                Use::Contract => &["// SAFETY:", "# Safety"],
            };
            if !is_explained(&lines[..index], explanations) {
                problems.push(format!(
                    "{path}:{}: `{}` needs {} above it",
                    index + 1,
                    line.trim(),
                    explanations.join(" or ")
                ));
            }
        }
    }
    problems
}

/// What a use of the keyword stands for.
enum Use {
    /// The author vouches: a block, an implementation, a foreign block.
    Claim,
    /// The caller or implementor has to vouch: a function, a trait.
    Contract,
}

fn uses(line: &str) -> impl Iterator<Item = Use> {
    let code = line.split("//").next().unwrap_or_default();
    code.match_indices("unsafe").filter_map(|(at, keyword)| {
        let is_part_of_a_word = |c: char| c.is_alphanumeric() || c == '_';
        let rest = &code[at + keyword.len()..];
        if code[..at].ends_with(is_part_of_a_word) || rest.starts_with(is_part_of_a_word) {
            return None;
        }
        let mut rest = rest.trim_start();
        if let Some(foreign) = rest.strip_prefix("extern") {
            // `extern "C" fn`, `extern "C" {`
            rest = foreign
                .trim_start()
                .trim_start_matches(|c: char| c == '"' || c == '-' || c.is_alphanumeric());
            rest = rest.trim_start();
            if rest.is_empty() {
                return Some(Use::Claim);
            }
        }
        if rest.starts_with('{') || rest.starts_with("impl") {
            Some(Use::Claim)
        } else if rest.starts_with("fn ") || rest.starts_with("trait ") {
            Some(Use::Contract)
        } else {
            None
        }
    })
}

fn is_explained(above: &[&str], explanations: &[&str]) -> bool {
    let mut code_lines = 0;
    for line in above.iter().rev().map(|line| line.trim_start()) {
        if line.starts_with("//") {
            if explanations.iter().any(|explanation| line.contains(explanation)) {
                return true;
            }
        } else {
            code_lines += 1;
            if code_lines == REACH {
                return false;
            }
        }
    }
    false
}

#[test]
fn unexplained_uses_are_found() {
    for code in [
        "unsafe { read(at) }",
        "let byte = unsafe { *at };",
        "unsafe impl Send for Handle {}",
        "unsafe impl<T> Sync for Handle<T> {}",
        "pub unsafe fn map(&self) {}",
        "pub unsafe trait Machine {}",
        "unsafe extern \"C\" {",
        "unsafe extern \"C\" fn on_free(at: u64) {",
        "unsafe extern \"C-unwind\" fn on_free(at: u64) {",
        "let a = unsafe { f() } + b; // SAFETY: too late",
    ] {
        let alone = format!("//! Docs.\n\n{code}\n");
        let problems = unexplained("map.rs", &alone);
        assert!(
            matches!(&problems[..], [problem] if problem.starts_with("map.rs:3: ")),
            "{code}: {problems:?}"
        );
        let explained = format!("//! Docs.\n\n// SAFETY: the range is ours, see rule 2.\n{code}\n");
        assert!(unexplained("map.rs", &explained).is_empty(), "{code}");
    }
}

#[test]
fn documented_contracts_explain_functions_but_not_blocks() {
    let docs = "/// Maps.\n///\n/// # Safety\n/// `at` must be reserved.\n#[inline]\n";
    assert!(unexplained("map.rs", &format!("{docs}pub unsafe fn map(at: u64) {{}}")).is_empty());
    assert_eq!(unexplained("map.rs", &format!("{docs}fn map(at: u64) {{ unsafe {{ f(at) }} }}")).len(), 1);
}

#[test]
fn an_explanation_reaches_six_lines() {
    let source =
        |between: usize| format!("// SAFETY: ours.\n{}unsafe {{ f() }}\n", "let x = 1;\n".repeat(between));
    assert!(unexplained("map.rs", &source(REACH - 1)).is_empty());
    assert_eq!(unexplained("map.rs", &source(REACH)).len(), 1);
    let long = format!("// SAFETY: ours,\n{}unsafe {{ f() }}\n", "// and so on\n".repeat(20));
    assert!(unexplained("map.rs", &long).is_empty());
}

#[test]
fn words_that_only_look_like_it_are_not_found() {
    for code in [
        "#![allow(unsafe_code)]",
        "/// An `unsafe { block }` in prose.",
        "let not_unsafe = 1;",
        "#[unsafe(no_mangle)]",
        "    on_free: unsafe extern \"C\" fn(u64) -> i32,",
        "type Free = unsafe fn(u64);",
    ] {
        assert!(unexplained("map.rs", code).is_empty(), "{code}");
    }
}
