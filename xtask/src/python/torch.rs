//! PyTorch itself, in a folder below cargo's target folder, for the tests that a stand-in cannot hold.
//!
//! It is fetched once (pip keeps what it has fetched) and installed without what it says it depends on: the folder's
//! requirements name all that is needed without a GPU. A seal in it tells which requirements it has, and which Python and
//! machine its libraries were compiled for.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

use super::environment::Environment;
use crate::steps::{Failure, workspace_root};

/// The folder in cargo's target folder.
const FOLDER: &str = "python-torch";

const REQUIREMENTS: &str = "crates/python/requirements-torch.txt";

/// Puts libraries that nobody calls in the places of CUDA's.
const STUBS: &str = "crates/python/tests/cuda_stubs.py";

/// Tells what compiled modules are made for.
const TELL: &str = "import platform, sys; print(sys.implementation.cache_tag, platform.machine())";

/// The folder that Python finds it in; it is made where it is not there or not the one that is wanted.
pub(super) fn ready(environment: &Environment) -> Result<PathBuf, Failure> {
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
        what: "PyTorch, with CUDA's libraries some 0.75 GB,".to_owned(),
        cause: Box::new(cause),
    })?;
    environment.python([STUBS]).env("PYTHONPATH", &folder.to_string_lossy()).run()?;
    fs::write(&seal, wanted).map_err(|cause| Failure::File { path: seal, cause })?;
    Ok(folder)
}
