//! Reads of parts of tensors: from many threads, out of bounds, and from files that change meanwhile.

use std::fs::{self, File, OpenOptions};

use poorwill::checkpoint::CheckpointError;

use super::files::{Folder, named, open, read};

#[test]
fn any_piece_of_any_tensor() {
    let folder = Folder::new();
    let checkpoint = open(folder.write("x.safetensors", named(&["hello", "world"]))).unwrap();
    let world = &checkpoint.tensors()[1];
    for begin in 0..=5usize {
        for end in begin..=5 {
            let mut piece = vec![0; end - begin];
            checkpoint.read_exact_at(world, begin as u64, &mut piece).unwrap();
            assert_eq!(piece, &b"world"[begin..end]);
        }
    }
}

#[test]
fn a_read_outside_the_tensor_is_refused() {
    let folder = Folder::new();
    let checkpoint = open(folder.write("x.safetensors", named(&["hello", "world"]))).unwrap();
    for (offset, len) in [(0, 6), (5, 1), (6, 0), (u64::MAX, 1), (u64::MAX, 0), (u64::MAX - 1, 5)] {
        let mut buf = vec![7; len];
        let error = checkpoint.read_exact_at(&checkpoint.tensors()[0], offset, &mut buf).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutOfRange { tensor_bytes: 5, offset: o, .. } if o == offset),
            "{error:?}"
        );
        assert!(buf.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn a_foreign_tensor_is_refused() {
    let folder = Folder::new();
    let ours = open(folder.write("ours.safetensors", named(&["hello", "world"]))).unwrap();
    let theirs = open(folder.write("theirs.safetensors", named(&["hullo", "worldly"]))).unwrap();
    let mut altered = ours.tensors()[0].clone();
    altered.file = 9;
    let mut shifted = ours.tensors()[0].clone();
    shifted.offset = u64::MAX;
    for tensor in [&theirs.tensors()[0], &theirs.tensors()[1], &altered, &shifted] {
        let error = ours.read_exact_at(tensor, 0, &mut [0; 5]).unwrap_err();
        assert!(matches!(error, CheckpointError::ForeignTensor { .. }), "{error:?}");
    }
    ours.read_exact_at(&ours.tensors()[0].clone(), 0, &mut [0; 5]).unwrap();
}

#[test]
fn threads_read_side_by_side() {
    let folder = Folder::new();
    let names: Vec<String> = (0..200).map(|n| format!("tensor number {n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    folder.write("a.safetensors", named(&names[..100]));
    folder.write("b.safetensors", named(&names[100..]));
    let checkpoint = open(folder.path()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for tensor in checkpoint.tensors() {
                    assert_eq!(read(&checkpoint, tensor), tensor.name.as_bytes());
                }
            });
        }
    });
}

#[test]
fn a_file_truncated_after_opening_is_an_error() {
    let folder = Folder::new();
    let path = folder.write("x.safetensors", named(&["hello", "world"]));
    let checkpoint = open(&path).unwrap();
    let [hello, world] = checkpoint.tensors() else { panic!("two tensors") };
    OpenOptions::new().write(true).open(&path).unwrap().set_len(world.offset + 2).unwrap();

    assert_eq!(read(&checkpoint, hello), b"hello");
    let error = checkpoint.read_exact_at(world, 0, &mut [0; 5]).unwrap_err();
    let shown = error.to_string();
    assert!(shown.contains("x.safetensors") && shown.contains("\"world\""), "{shown}");
    assert!(shown.contains("wanted 5 bytes") && shown.contains("got 2"), "{shown}");
    assert!(matches!(error, CheckpointError::ShortRead { wanted_bytes: 5, got_bytes: 2, .. }), "{error:?}");

    File::create(&path).unwrap();
    let error = checkpoint.read_exact_at(hello, 1, &mut [0; 3]).unwrap_err();
    assert!(matches!(error, CheckpointError::ShortRead { wanted_bytes: 3, got_bytes: 0, .. }), "{error:?}");
}

#[test]
fn a_file_replaced_after_opening_is_still_the_old_one() {
    let folder = Folder::new();
    let path = folder.write("x.safetensors", named(&["hello"]));
    let checkpoint = open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, named(&["world"])).unwrap();
    assert_eq!(read(&checkpoint, &checkpoint.tensors()[0]), b"hello");
}
