//! The synthetic mixture-of-experts checkpoint is as described, for every reader.
#![cfg(unix)]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // Helpers are test code, too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use poorwill::checkpoint::{Checkpoint, Dtype, Tensor};
use poorwill_bench::synthetic::{SyntheticError, SyntheticMoe};
use safetensors::SafeTensors;
use tempfile::TempDir;

fn tiny() -> SyntheticMoe {
    SyntheticMoe { layers: 2, experts: 3, hidden: 256, moe_intermediate: 136, vocab: 500, shards: 4, seed: 7 }
}

fn new_folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn written(model: &SyntheticMoe) -> TempDir {
    let folder = new_folder();
    model.write(folder.path(), |_| {}).unwrap();
    folder
}

fn open(path: impl Into<PathBuf>) -> Checkpoint {
    Checkpoint::open(&[path.into()]).unwrap()
}

fn read(checkpoint: &Checkpoint, tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap()];
    checkpoint.read_exact_at(tensor, 0, &mut bytes).unwrap();
    bytes
}

/// All tensors' bytes by name.
fn contents(folder: &TempDir) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = open(folder.path());
    checkpoint.tensors().iter().map(|tensor| (tensor.name.clone(), read(&checkpoint, tensor))).collect()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn both_readers_read_the_synthetic_checkpoint() {
    let folder = new_folder();
    let mut reported = vec![];
    let inner = folder.path().join("new/folder");
    tiny().write(&inner, |bytes| reported.push(bytes)).unwrap();
    assert!(reported.is_sorted());
    assert_eq!(reported.last(), Some(&tiny().total_bytes()));

    let checkpoint = open(&inner);
    assert_eq!(checkpoint.bytes(), tiny().total_bytes());
    assert_eq!(checkpoint.files().len(), 4);
    let mut names = BTreeSet::new();
    for shard in checkpoint.files() {
        let bytes = fs::read(&shard.path).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        let ours = open(&shard.path);
        assert_eq!(ours.tensors().len(), theirs.len());
        for tensor in ours.tensors() {
            let view = theirs.tensor(&tensor.name).unwrap();
            let shape: Vec<u64> = view.shape().iter().map(|dim| *dim as u64).collect();
            assert_eq!((tensor.dtype.to_string(), &tensor.shape), (view.dtype().to_string(), &shape));
            assert_eq!(read(&ours, tensor), view.data());
        }
        names.extend(theirs.names().into_iter().map(str::to_owned));
    }
    assert_eq!(names.len(), checkpoint.tensors().len());
    for tensor in checkpoint.tensors() {
        assert!(names.contains(&tensor.name));
        let element_bytes = tensor.dtype.bits() / 8;
        assert!(tensor.offset.is_multiple_of(element_bytes), "{} is not aligned", tensor.name);
    }

    let index = json(&inner.join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], tiny().total_bytes());
    assert_eq!(index["weight_map"].as_object().unwrap().len(), names.len());
    assert_eq!(index["weight_map"]["model.embed_tokens.weight"], "model-00001-of-00004.safetensors");
    assert_eq!(json(&inner.join("config.json"))["num_experts"], 3);
}

#[test]
fn the_synthetic_checkpoint_has_the_tensors_of_such_a_model() {
    let folder = written(&tiny());
    let checkpoint = open(folder.path());
    let tensors: BTreeMap<_, _> =
        checkpoint.tensors().iter().map(|t| (t.name.as_str(), (t.dtype, t.shape.as_slice()))).collect();
    let expected: [(&str, Dtype, &[u64]); 13] = [
        ("model.embed_tokens.weight", Dtype::BF16, &[500, 256]),
        ("model.layers.0.input_layernorm.weight", Dtype::BF16, &[256]),
        ("model.layers.1.self_attn.q_proj.weight", Dtype::BF16, &[256, 256]),
        ("model.layers.1.self_attn.q_norm.weight", Dtype::BF16, &[128]),
        ("model.layers.1.self_attn.k_scale", Dtype::F32, &[]),
        ("model.layers.1.self_attn.v_scale", Dtype::F32, &[]),
        ("model.layers.1.post_attention_layernorm.weight", Dtype::BF16, &[256]),
        ("model.layers.1.mlp.gate.weight", Dtype::F32, &[3, 256]),
        ("model.layers.1.mlp.experts.2.gate_proj.weight", Dtype::F8_E4M3, &[136, 256]),
        ("model.layers.1.mlp.experts.2.gate_proj.weight_scale_inv", Dtype::F32, &[2, 2]),
        ("model.layers.1.mlp.experts.2.down_proj.weight", Dtype::F8_E4M3, &[256, 136]),
        ("model.norm.weight", Dtype::BF16, &[256]),
        ("lm_head.weight", Dtype::BF16, &[500, 256]),
    ];
    for (name, dtype, shape) in expected {
        assert_eq!(tensors[name], (dtype, shape), "{name}");
    }
    assert_eq!(tensors.len(), 1 + 2 * (11 + 3 * 6) + 2);
}

#[test]
fn the_synthetic_numbers_are_finite() {
    let folder = written(&tiny());
    let checkpoint = open(folder.path());
    for tensor in checkpoint.tensors() {
        let bytes = read(&checkpoint, tensor);
        let finite = match tensor.dtype {
            Dtype::BF16 => {
                bytes.as_chunks().0.iter().all(|[a, b]| f32::from_le_bytes([0, 0, *a, *b]).is_finite())
            }
            Dtype::F32 => bytes.as_chunks().0.iter().all(|b| f32::from_le_bytes(*b).is_finite()),
            Dtype::F8_E4M3 => bytes.iter().all(|byte| byte & 0x7f != 0x7f),
            other => panic!("{other:?}"),
        };
        assert!(finite, "{}", tensor.name);
    }
}

#[test]
fn the_seed_decides_the_values_and_the_shards_do_not() {
    let (one, same) = (written(&tiny()), written(&tiny()));
    for entry in fs::read_dir(one.path()).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(fs::read(one.path().join(&name)).unwrap(), fs::read(same.path().join(&name)).unwrap());
    }
    let expected = contents(&one);
    assert_eq!(contents(&written(&SyntheticMoe { shards: 1, ..tiny() })), expected);
    let different = contents(&written(&SyntheticMoe { seed: 8, ..tiny() }));
    assert!(different.iter().all(|(name, bytes)| expected[name] != *bytes));
    let distinct: BTreeSet<_> = expected.values().collect();
    assert_eq!(distinct.len(), expected.len());
}

#[test]
fn nothing_is_overwritten_and_nothing_half_written_is_left() {
    let folder = new_folder();
    fs::write(folder.path().join("config.json"), "precious").unwrap();
    let error = tiny().write(folder.path(), |_| panic!("wrote")).unwrap_err();
    assert!(matches!(error, SyntheticError::Exists { path } if path == folder.path().join("config.json")));
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"precious");

    let folder = new_folder();
    fs::write(folder.path().join("model-00003-of-00004.safetensors"), "precious").unwrap();
    let error = tiny().write(folder.path(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("model-00003-of-00004.safetensors"), "{error}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["model-00003-of-00004.safetensors"]);
    assert_eq!(fs::read(folder.path().join("model-00003-of-00004.safetensors")).unwrap(), b"precious");

    let blocked = folder.path().join("a file");
    fs::write(&blocked, "").unwrap();
    assert!(matches!(
        tiny().write(&blocked, |_| {}),
        Err(SyntheticError::Exists { .. } | SyntheticError::Io { .. })
    ));
    let refused = SyntheticMoe { experts: 0, ..tiny() }.write(&folder.path().join("never"), |_| {});
    assert!(matches!(refused, Err(SyntheticError::OutOfBounds { dimension: "experts", .. })));
    assert!(!folder.path().join("never").exists());
}
