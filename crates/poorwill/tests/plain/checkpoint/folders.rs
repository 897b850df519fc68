//! Resolving paths to files.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use poorwill::checkpoint::{Checkpoint, CheckpointError, Dtype};

use super::files::{Folder, entry, file, listing, named, open, read};

#[test]
fn a_file_alone() {
    let folder = Folder::new();
    let header = format!(
        r#"{{"__metadata__":{{"format":"pt"}},{},{},{},{}}}  "#,
        entry("second", "BF16", &[2, 3], 4, 16),
        entry("scalar", "F32", &[], 0, 4),
        entry("empty", "I64", &[7, 0], 16, 16),
        entry("nibbles", "F4", &[2], 16, 17),
    );
    let payload: Vec<u8> = (0..17).collect();
    let path = folder.write("x.safetensors", file(&header, &payload));
    let checkpoint = open(&path).unwrap();

    let begin = 8 + header.len() as u64;
    let seen: Vec<_> = checkpoint
        .tensors()
        .iter()
        .map(|t| (t.name.as_str(), t.dtype, t.shape.clone(), t.bytes, t.file, t.offset - begin))
        .collect();
    let expected = [
        ("scalar", Dtype::F32, vec![], 4, 0, 0),
        ("second", Dtype::BF16, vec![2, 3], 12, 0, 4),
        ("empty", Dtype::I64, vec![7, 0], 0, 0, 16),
        ("nibbles", Dtype::F4, vec![2], 1, 0, 16),
    ];
    assert_eq!(seen, expected);
    assert_eq!(checkpoint.bytes(), 17);
    assert_eq!(checkpoint.files().len(), 1);
    assert_eq!(checkpoint.files()[0].path, path);
    assert_eq!(checkpoint.files()[0].bytes, begin + 17);
    assert_eq!(read(&checkpoint, &checkpoint.tensors()[1]), payload[4..16]);
    assert_eq!(read(&checkpoint, &checkpoint.tensors()[2]), [0u8; 0]);
}

#[test]
fn a_file_without_tensors_is_a_file() {
    let folder = Folder::new();
    let checkpoint = open(folder.write("x.safetensors", file("{}", b""))).unwrap();
    assert!(checkpoint.tensors().is_empty());
    assert_eq!(checkpoint.bytes(), 0);
}

#[test]
fn paths_that_lead_nowhere() {
    let folder = Folder::new();
    assert!(matches!(Checkpoint::open(&[]), Err(CheckpointError::NothingNamed)));
    let absent = folder.join("absent");
    assert!(matches!(open(&absent), Err(CheckpointError::NotFound { path }) if path == absent));
    folder.write("readme.txt", "");
    fs::create_dir(folder.join("sub.safetensors")).unwrap();
    assert!(matches!(open(folder.path()), Err(CheckpointError::NoShards { path }) if path == folder.path()));
    assert!(matches!(open("/dev/null"), Err(CheckpointError::NotAFile { .. })));
}

#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let folder = Folder::new();
    let pipe = folder.join("x.safetensors");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(matches!(open(&pipe), Err(CheckpointError::NotAFile { path }) if path == pipe));
    assert!(matches!(open(folder.path()), Err(CheckpointError::NotAFile { path }) if path == pipe));
}

#[test]
fn a_folder_without_index_is_all_its_shards_by_name() {
    let folder = Folder::new();
    folder.write("b.safetensors", named(&["b2", "b1"]));
    folder.write("a.safetensors", named(&["a"]));
    folder.write("._a.safetensors", "left by a copying program");
    folder.write("a.safetensors.tmp", "");
    fs::create_dir(folder.join("c.safetensors")).unwrap();
    let checkpoint = open(folder.path()).unwrap();
    assert_eq!(listing(&checkpoint), ["a@a.safetensors", "b2@b.safetensors", "b1@b.safetensors"]);
}

#[test]
fn a_dangling_link_is_a_missing_shard() {
    let folder = Folder::new();
    folder.write("a.safetensors", named(&["a"]));
    symlink("nowhere", folder.join("b.safetensors")).unwrap();
    let link = folder.join("b.safetensors");
    assert!(matches!(open(folder.path()), Err(CheckpointError::NotFound { path }) if path == link));
}

#[test]
fn one_name_in_two_files_of_a_folder_is_refused() {
    let folder = Folder::new();
    let first = folder.write("consolidated.safetensors", named(&["w", "x"]));
    let second = folder.write("model-00001-of-00001.safetensors", named(&["v", "w"]));
    let error = open(folder.path()).unwrap_err();
    let shown = error.to_string();
    assert!(shown.contains("\"w\"") && shown.contains("one by one"), "{shown}");
    assert!(shown.contains("consolidated.safetensors") && shown.contains("model-00001-of-00001"), "{shown}");
    match error {
        CheckpointError::DuplicateTensor { tensor, first: one, second: other } => {
            assert_eq!((tensor.as_str(), &one, &other), ("w", &first, &second));
        }
        other => panic!("{other:?}"),
    }
    // Named one by one they are what the caller wants.
    assert_eq!(Checkpoint::open(&[first, second]).unwrap().tensors().len(), 4);
}

#[test]
fn a_file_named_twice_is_read_once() {
    let folder = Folder::new();
    let other = Folder::new();
    let a = folder.write("a.safetensors", named(&["a"]));
    folder.write("b.safetensors", named(&["b"]));
    symlink(&a, other.join("link.safetensors")).unwrap();
    symlink(folder.path(), other.join("folder")).unwrap();
    let paths = [
        other.join("link.safetensors"),
        a,
        folder.path(),
        other.join("./folder/./a.safetensors"),
        other.join("folder"),
    ];
    let checkpoint = Checkpoint::open(&paths).unwrap();
    assert_eq!(listing(&checkpoint), ["a@link.safetensors", "b@b.safetensors"]);
}

#[test]
fn opening_reads_nothing_of_the_payload() {
    const TIB: u64 = 1 << 40;
    let folder = Folder::new();
    let header = format!("{{{}}}", entry("huge", "U8", &[TIB], 0, usize::try_from(TIB).unwrap()));
    let path = folder.write("x.safetensors", file(&header, b""));
    let sparse = OpenOptions::new().write(true).open(&path).unwrap();
    if sparse.set_len(8 + header.len() as u64 + TIB).is_err() {
        return; // The file system has no files of this size.
    }
    let checkpoint = open(&path).unwrap();
    assert_eq!(checkpoint.bytes(), TIB);
    let mut last = [1; 4];
    checkpoint.read_exact_at(&checkpoint.tensors()[0], TIB - 4, &mut last).unwrap();
    assert_eq!(last, [0; 4]);
}

#[test]
fn too_many_shards_for_the_descriptors_is_an_error() {
    const FOLDER: &str = "POORWILL_TEST_SHARDS";
    if let Some(folder) = std::env::var_os(FOLDER) {
        // The child, with few descriptors.
        let error = open(PathBuf::from(folder)).unwrap_err();
        let shown = error.to_string();
        assert!(shown.contains("ulimit -n"), "{shown}");
        assert!(matches!(error, CheckpointError::TooManyOpenFiles { open_files: 5..64, .. }), "{error:?}");
        return;
    }
    let folder = Folder::new();
    for shard in 0..64 {
        folder.write(&format!("{shard:02}.safetensors"), named(&[&format!("t{shard}")]));
    }
    assert_eq!(open(folder.path()).unwrap().files().len(), 64);
    let child = Command::new("sh")
        .args(["-c", "ulimit -n 32 && exec \"$0\" --exact \"$1\""])
        .arg(std::env::current_exe().unwrap())
        .arg(std::thread::current().name().unwrap())
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}
