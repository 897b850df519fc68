//! Modules: PTX, of which only the kernels' names are read.

use std::collections::BTreeSet;

use crate::abi::{CallResult, Code};
use crate::handle::Handle;

#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) context: Handle,
    pub(crate) entries: BTreeSet<String>,
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) context: Handle,
    pub(crate) module: Handle,
    pub(crate) name: String,
}

/// Requires `.version` first, like the assembler, and `.target` and `.address_size 64`.
pub(crate) fn entries(ptx: &str) -> CallResult<BTreeSet<String>> {
    if ptx.starts_with('\u{7f}') {
        return Err(Code::INVALID_IMAGE);
    }
    let code: String = ptx.lines().map(|line| line.split("//").next().unwrap_or_default()).fold(
        String::with_capacity(ptx.len()),
        |mut code, line| {
            code.push_str(line);
            code.push('\n');
            code
        },
    );
    let words: Vec<&str> = code.split_whitespace().collect();
    let says = |pair: &[&str]| words.windows(2).any(|words| words == pair);
    if words.first() != Some(&".version") || !words.contains(&".target") || !says(&[".address_size", "64"]) {
        return Err(Code::INVALID_PTX);
    }
    let named = words.windows(3).filter(|words| words[..2] == [".visible", ".entry"]).map(|words| words[2]);
    Ok(named.map(|name| name.split('(').next().unwrap_or(name).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "// A module.\n.version 7.0\n.target sm_70\n.address_size 64\n";

    fn names(ptx: &str) -> Vec<String> {
        entries(ptx).unwrap().into_iter().collect()
    }

    #[test]
    fn kernels_are_found_by_their_entries() {
        assert_eq!(names(crate::TEST_FILL_PTX), ["poorwill_test_fill"]);
        let ptx = format!(
            "{HEAD}.visible .entry a(\n.param .u64 x\n)\n{{ ret; }}\n.visible\n.entry b() {{ ret; }}\n\
             // .visible .entry c()\n.entry hidden() {{ ret; }}\n.visible .func f() {{ ret; }}\n.visible .entry d ()"
        );
        assert_eq!(names(&ptx), ["a", "b", "d"]);
        assert_eq!(names(HEAD), Vec::<String>::new());
    }

    #[test]
    fn other_text_than_ptx_is_refused() {
        assert_eq!(entries("\u{7f}ELF"), Err(Code::INVALID_IMAGE));
        for text in ["", "int main() {}", ".version 7.0", ".version 7.0\n.target sm_70\n.address_size 32"] {
            assert_eq!(entries(text), Err(Code::INVALID_PTX), "{text}");
        }
    }
}
