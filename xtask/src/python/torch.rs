//! PyTorch, in a folder below cargo's target folder, for tests that need the real one.
//!
//! It is fetched once, and pip caches it. It is installed without its dependencies: the requirements name all that is
//! needed without a GPU. A seal in the folder names the requirements, and the Python and machine that its libraries
//! were compiled for.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

use super::environment::Environment;
use crate::steps::{Failure, workspace_root};

const FOLDER: &str = "python-torch";

const REQUIREMENTS: &str = "crates/python/requirements-torch.txt";

/// Puts stubs in place of CUDA libraries that the tests never call.
const STUBS: &str = "crates/python/tests/cuda_stubs.py";

/// Prints what compiled modules are made for.
const TELL: &str = "import platform, sys; print(sys.implementation.cache_tag, platform.machine())";

/// The folder for Python's path; made again if it is missing or outdated.
pub(crate) fn ready(environment: &Environment) -> Result<PathBuf, Failure> {
    let folder = environment.beside(FOLDER);
    let seal = folder.join("poorwill-torch.txt");
    let mut wanted: Vec<u8> = [REQUIREMENTS, STUBS]
        .iter()
        .map(|file| workspace_root().join(file))
        .map(|path| fs::read(&path).map_err(|cause| Failure::File { path, cause }))
        .collect::<Result<Vec<_>, _>>()?
        .concat();
    wanted.extend(environment.python(["-c", TELL]).output()?.into_bytes());
    if fs::read(&seal).is_ok_and(|has| has == wanted) {
        return Ok(folder);
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|cause| Failure::File { path: folder.clone(), cause })?;
    }
    let plainly = ["--no-deps", "--only-binary", ":all:", "--timeout", "60", "--retries", "2"];
    let from = ["--requirement", REQUIREMENTS, "--target"];
    let all = plainly.into_iter().chain(from).map(OsStr::new).chain([folder.as_os_str()]);
    environment.pip(all).run().map_err(|cause| Failure::Fetch {
        what: "PyTorch, with CUDA's libraries some 0.9 GB,".to_owned(),
        cause: Box::new(cause),
    })?;
    environment.python([STUBS]).env("PYTHONPATH", &folder.to_string_lossy()).run()?;
    fs::write(&seal, wanted).map_err(|cause| Failure::File { path: seal, cause })?;
    Ok(folder)
}
