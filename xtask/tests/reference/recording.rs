//! The page of the recordings that `poorwill replay` reads: the module's documentation, and an example.

use super::head;
use crate::tidy::tree::{File, file};

const SOURCE: &str = "crates/replay/src/read/recorded.rs";

const TITLE: &str = "# Recordings\n\n";

/// Behind it. `poorwill replay` reads the block in a test.
const EXAMPLE: &str = r#"- `allocator` begins with its kind. Behind `pytorch` follow its settings, as in `PYTORCH_ALLOC_CONF`.
- `card` has all memory of the card, and what other programs hold of it.
- `b` and `d` are bytes. `s` and `p` are numbers of a stream and a pool: 0 where they are missing.

[`poorwill replay`](../replay.md) reads it, whatever program wrote it. A block of 2 MiB is freed, and one of 4 MiB stays:

```json
{"poorwill_record":1,"device":0,"allocator":"pytorch","card":{"total_bytes":1073741824,"taken_bytes":0}}
{"t":"p","n":"load"}
{"t":"a","k":1,"b":2097152,"f":["load.py:7 read","load.py:2 main"]}
{"t":"a","k":2,"b":4194304,"s":1,"f":0}
{"t":"m","b":23068672}
{"t":"f","k":1}
{"t":"e"}
```
"#;

pub(super) fn page(files: &[File]) -> String {
    let lines = file(files, SOURCE).text.lines();
    let docs =
        lines.map_while(|line| line.strip_prefix("//!")).map(|line| line.strip_prefix(' ').unwrap_or(line));
    // What the module promises its callers is not about the form.
    let docs: Vec<&str> = docs.take_while(|line| !line.starts_with("Promises:")).collect();
    assert!(docs.iter().any(|line| line.starts_with("| `t` |")), "{SOURCE} says what its lines are");
    head("recording_reference") + TITLE + docs.join("\n").trim_end() + "\n" + EXAMPLE
}
