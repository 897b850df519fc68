//! The files and crates of the workspace.
//!
//! Git says which files belong to it: those it tracks and new ones that it does not ignore. Without
//! git, as in a source archive, it is every file outside `target` and `.git`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{MetadataCommand, TargetKind};

/// A text file.
#[derive(Debug)]
pub(crate) struct File {
    /// From the root of the workspace, with `/` between the parts.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    pub(crate) fn has_extension(&self, extensions: &[&str]) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.rsplit_once('.').is_some_and(|(_, extension)| extensions.contains(&extension))
    }
}

/// A crate of the workspace; paths as in [`File`].
#[derive(Debug)]
pub(crate) struct Crate {
    pub(crate) manifest: String,
    /// The roots of its library and its programs.
    pub(crate) roots: Vec<String>,
}

/// Where every file is, pictures as well.
pub(crate) fn paths() -> Vec<String> {
    let root = root();
    let mut paths = listed_by_git(&root).unwrap_or_else(|| found_on_disk(&root));
    // A file may be listed and yet deleted; a link is another file's name.
    paths.retain(|path| fs::symlink_metadata(root.join(path)).is_ok_and(|found| found.is_file()));
    paths
}

/// The symbolic links that lead to what not every checkout has: out of this one, or nowhere.
pub(crate) fn stray_links() -> Vec<String> {
    let root = root();
    stray_of(&root, listed_by_git(&root).unwrap_or_default())
}

fn stray_of(root: &Path, mut paths: Vec<String>) -> Vec<String> {
    let leads_inside = |link: &Path| {
        let is_relative = fs::read_link(link).is_ok_and(|target| target.is_relative());
        let ends = (fs::canonicalize(link), fs::canonicalize(root));
        is_relative && matches!(&ends, (Ok(end), Ok(root)) if end.starts_with(root))
    };
    paths.retain(|path| {
        let path = root.join(path);
        fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) && !leads_inside(&path)
    });
    paths
}

/// Every text file. One that holds a zero byte or no UTF-8 is left out.
pub(crate) fn files() -> Vec<File> {
    let root = root();
    let files: Vec<File> = paths().into_iter().filter_map(|path| read(&root, path)).collect();
    assert!(files.iter().any(|file| file.path == "xtask/tests/tidy/tree.rs"), "found {} files", files.len());
    files
}

/// The file at `path`, which must be there.
pub(crate) fn file<'a>(files: &'a [File], path: &str) -> &'a File {
    files.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("there is no {path}"))
}

pub(crate) fn crates() -> Vec<Crate> {
    let metadata = MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .expect("`cargo metadata` reads this workspace");
    let inside = |path: &cargo_metadata::camino::Utf8Path| {
        let path = path.strip_prefix(&metadata.workspace_root).expect("members lie inside the workspace");
        path.as_str().replace('\\', "/")
    };
    let is_program_or_library = |kind: &TargetKind| {
        !matches!(kind, TargetKind::Test | TargetKind::Bench | TargetKind::Example | TargetKind::CustomBuild)
    };
    metadata
        .workspace_packages()
        .iter()
        .map(|package| Crate {
            manifest: inside(&package.manifest_path),
            roots: package
                .targets
                .iter()
                .filter(|target| target.kind.iter().any(is_program_or_library))
                .map(|target| inside(&target.src_path))
                .collect(),
        })
        .collect()
}

/// As cargo says now: checkouts that share a target folder share this test's program.
pub(crate) fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&own).parent().expect("xtask lies in the workspace").to_owned()
}

fn read(root: &Path, path: String) -> Option<File> {
    let text = String::from_utf8(fs::read(root.join(&path)).ok()?).ok()?;
    (!text.contains('\0')).then_some(File { path, text })
}

fn listed_by_git(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .ok()?;
    let list = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    let mut paths: Vec<String> =
        list.split('\0').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    paths.sort();
    paths.dedup();
    // An archive unpacked inside somebody else's repository lists nothing of ours.
    paths.iter().any(|path| path == "Cargo.toml").then_some(paths)
}

fn found_on_disk(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(root.join(&folder)).expect("folders of the workspace can be read");
        for entry in entries {
            let entry = entry.expect("folders of the workspace can be read");
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().expect("a file has a type");
            if kind.is_file() {
                found.push(path.to_string_lossy().replace('\\', "/"));
            } else if kind.is_dir() && !["target", ".git"].iter().any(|skipped| path.ends_with(skipped)) {
                folders.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn both_ways_find_this_file() {
    let root = root();
    let here = "xtask/tests/tidy/tree.rs".to_owned();
    assert!(found_on_disk(&root).contains(&here));
    assert!(
        !found_on_disk(&root).iter().any(|path| path.starts_with(".git/") || path.starts_with("target/"))
    );
    if let Some(listed) = listed_by_git(&root) {
        assert!(listed.contains(&here));
    }
}

#[test]
fn links_may_stay_inside_only() {
    let folder = std::env::temp_dir().join(format!("poorwill-tidy-links-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    for (target, link) in [("file", "inside"), ("nowhere", "dangling"), ("..", "outside"), ("/", "absolute")]
    {
        std::os::unix::fs::symlink(target, folder.join(link)).unwrap();
    }
    let paths = ["file", "inside", "dangling", "outside", "absolute", "missing"].map(str::to_owned).to_vec();
    assert_eq!(stray_of(&folder, paths), ["dangling", "outside", "absolute"]);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn crates_have_manifests_and_roots() {
    let crates = crates();
    let own = crates.iter().find(|krate| krate.manifest == "xtask/Cargo.toml").unwrap();
    assert_eq!(own.roots, ["xtask/src/main.rs"]);
}

#[test]
fn extensions_are_the_last_part_of_the_name() {
    let file = |path: &str| File { path: path.to_owned(), text: String::new() };
    assert!(file("a.b/c.rs").has_extension(&["rs"]));
    assert!(!file("a.rs/run").has_extension(&["rs"]));
}
