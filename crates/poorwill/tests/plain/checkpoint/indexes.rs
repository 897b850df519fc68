//! What an index decides, and indexes that cannot be followed.

use std::fs::File;
use std::os::unix::fs::symlink;

use poorwill::checkpoint::{Checkpoint, CheckpointError, IndexError};

use super::files::{Folder, index_error_of, listing, named, open, read};

#[test]
fn an_index_names_the_shards() {
    let folder = Folder::new();
    folder.write("b.safetensors", named(&["b1", "b2"]));
    folder.write("a.safetensors", named(&["a"]));
    folder.write("not-mentioned.safetensors", "not even a safetensors file");
    let index = folder.index(&[("b2", "b.safetensors"), ("a", "a.safetensors"), ("b1", "b.safetensors")]);
    let expected = ["a@a.safetensors", "b1@b.safetensors", "b2@b.safetensors"];
    assert_eq!(listing(&open(folder.path()).unwrap()), expected);
    assert_eq!(listing(&open(index).unwrap()), expected);
}

#[test]
fn the_index_decides_where_a_tensor_comes_from() {
    let folder = Folder::new();
    folder.write("a.safetensors", named(&["x", "y", "unlisted"]));
    folder.write("b.safetensors", named(&["y", "z"]));
    folder.index(&[("x", "a.safetensors"), ("y", "b.safetensors"), ("z", "b.safetensors")]);
    let checkpoint = open(folder.path()).unwrap();
    let expected = ["x@a.safetensors", "unlisted@a.safetensors", "y@b.safetensors", "z@b.safetensors"];
    assert_eq!(listing(&checkpoint), expected);
    assert_eq!(checkpoint.bytes(), 11);
    for tensor in checkpoint.tensors() {
        assert_eq!(read(&checkpoint, tensor), tensor.name.as_bytes());
    }
}

#[test]
fn an_unlisted_tensor_in_two_shards_is_refused() {
    let folder = Folder::new();
    folder.write("a.safetensors", named(&["x", "unlisted"]));
    folder.write("b.safetensors", named(&["y", "unlisted"]));
    folder.index(&[("x", "a.safetensors"), ("y", "b.safetensors")]);
    assert!(matches!(
        open(folder.path()),
        Err(CheckpointError::DuplicateTensor { tensor, .. }) if tensor == "unlisted"
    ));
}

#[test]
fn shards_of_an_index_may_be_links_even_to_one_file() {
    let (folder, blobs) = (Folder::new(), Folder::new());
    let blob = blobs.write("5a7ed1e6", named(&["x", "y"]));
    symlink(&blob, folder.join("a.safetensors")).unwrap();
    symlink(&blob, folder.join("b.safetensors")).unwrap();
    folder.index(&[("x", "a.safetensors"), ("y", "b.safetensors")]);
    assert_eq!(listing(&open(folder.path()).unwrap()), ["x@a.safetensors", "y@a.safetensors"]);
}

#[test]
fn a_file_given_before_its_index_still_counts_as_a_shard() {
    let folder = Folder::new();
    let a = folder.write("a.safetensors", named(&["x", "y"]));
    folder.write("b.safetensors", named(&["y", "z"]));
    folder.index(&[("x", "a.safetensors"), ("y", "b.safetensors"), ("z", "b.safetensors")]);
    let expected = ["x@a.safetensors", "y@a.safetensors", "y@b.safetensors", "z@b.safetensors"];
    assert_eq!(listing(&Checkpoint::open(&[a, folder.path()]).unwrap()), expected);
}

#[test]
fn indexes_that_cannot_be_followed() {
    let folder = Folder::new();
    folder.write("a.safetensors", named(&["a"]));

    folder.index(&[("a", "a.safetensors"), ("q", "gone.safetensors")]);
    let (shown, error) = index_error_of(&folder);
    assert!(shown.contains("\"gone.safetensors\"") && shown.contains("\"q\""), "{shown}");
    assert!(
        matches!(error, IndexError::ShardMissing { shard, tensor } if shard == "gone.safetensors" && tensor == "q")
    );

    folder.index(&[("a", "a.safetensors"), ("q", "a.safetensors")]);
    let (shown, error) = index_error_of(&folder);
    assert!(shown.contains("\"a.safetensors\"") && shown.contains("\"q\""), "{shown}");
    assert!(
        matches!(error, IndexError::TensorMissing { tensor, shard } if tensor == "q" && shard == "a.safetensors")
    );

    for outside in ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ""] {
        folder.index(&[("a", outside)]);
        let (_, error) = index_error_of(&folder);
        assert!(matches!(error, IndexError::ShardOutsideFolder { shard, .. } if shard == outside));
    }

    folder.index(&[]);
    assert_eq!(index_error_of(&folder).1, IndexError::Empty);
    for malformed in
        ["", "[]", "{}", "{\"weight_map\":7}", "\u{0}", "{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}"]
    {
        folder.write("model.safetensors.index.json", malformed);
        assert!(matches!(index_error_of(&folder).1, IndexError::Malformed { .. }), "{malformed:?}");
    }
    let index = File::create(folder.join("model.safetensors.index.json")).unwrap();
    index.set_len(100_000_001).unwrap();
    assert!(matches!(index_error_of(&folder).1, IndexError::TooLarge { index_bytes: 100_000_001, .. }));
}

#[test]
fn of_several_indexes_the_usual_one_counts() {
    let folder = Folder::new();
    folder.write("a.safetensors", named(&["a"]));
    let fp16 = folder.write("model.fp16.safetensors.index.json", r#"{"weight_map":{"a":"a.safetensors"}}"#);
    folder.write("other.safetensors.index.json", "{}");
    let error = open(folder.path()).unwrap_err();
    assert!(error.to_string().contains("\"other.safetensors.index.json\""), "{error}");
    match error {
        CheckpointError::SeveralIndexes { indexes, .. } => {
            assert_eq!(indexes, ["model.fp16.safetensors.index.json", "other.safetensors.index.json"]);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(open(fp16).unwrap().tensors().len(), 1);
    folder.index(&[("a", "a.safetensors")]);
    assert_eq!(open(folder.path()).unwrap().tensors().len(), 1);
}
