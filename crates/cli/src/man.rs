//! `poorwill man`: man pages, as section 1 of the manual.

use std::io;
use std::path::{Path, PathBuf};

use clap::Command;
use clap_mangen::Man;

use poorwill_local::failure::Failure;

#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Folder for one page per command, created if missing; without it the main page goes to standard output
    dir: Option<PathBuf>,
}

/// The main page, or a summary after writing all pages to `dir`.
pub(crate) fn run(args: &ManArgs, mut main: Command) -> Result<String, Failure> {
    main.build();
    let Some(dir) = &args.dir else { return page(&main) };
    let cannot = |action: &str, path: &Path, error: &io::Error| {
        Failure::new(format!("cannot {action} {path:?}: {error}; choose a folder that can be written"))
    };
    std::fs::create_dir_all(dir).map_err(|error| cannot("create", dir, &error))?;
    let mut pages = vec![&main];
    let mut written = 0;
    while let Some(command) = pages.pop() {
        pages.extend(command.get_subcommands().filter(|command| command.get_name() != "help"));
        let path = dir.join(Man::new(command.clone()).get_filename());
        std::fs::write(&path, page(command)?).map_err(|error| cannot("write", &path, &error))?;
        written += 1;
    }
    Ok(format!("{written} man pages written to {}\n", dir.to_string_lossy().escape_debug()))
}

fn page(command: &Command) -> Result<String, Failure> {
    let mut page = Vec::new();
    let rendered =
        Man::new(command.clone()).source(concat!("poorwill ", env!("CARGO_PKG_VERSION"))).render(&mut page);
    rendered.map_err(|error| Failure::new(format!("cannot render the man page: {error}")))?;
    String::from_utf8(page).map_err(|error| Failure::new(format!("the man page is not UTF-8: {error}")))
}
