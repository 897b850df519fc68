//! The synthetic mixture-of-experts checkpoint is what it says, whoever reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use poorwill::checkpoint::{Dtype, SyntheticError, SyntheticMoe};
use safetensors::SafeTensors;

use super::differential::assert_same;
use super::files::{Folder, open, read};

fn tiny() -> SyntheticMoe {
    SyntheticMoe { layers: 2, experts: 3, hidden: 256, moe_intermediate: 136, vocab: 500, shards: 4, seed: 7 }
}

fn written(model: &SyntheticMoe) -> Folder {
    let folder = Folder::new();
    model.write(&folder.path(), |_| {}).unwrap();
    folder
}

/// All tensors' bytes by name.
fn contents(folder: &Folder) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = open(folder.path()).unwrap();
    checkpoint.tensors().iter().map(|tensor| (tensor.name.clone(), read(&checkpoint, tensor))).collect()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn both_readers_read_the_synthetic_checkpoint() {
    let folder = Folder::new();
    let mut reported = vec![];
    tiny().write(&folder.join("new/folder"), |bytes| reported.push(bytes)).unwrap();
    assert!(reported.is_sorted());
    assert_eq!(reported.last(), Some(&tiny().total_bytes()));

    let folder = folder.join("new/folder");
    let checkpoint = open(&folder).unwrap();
    assert_eq!(checkpoint.bytes(), tiny().total_bytes());
    assert_eq!(checkpoint.files().len(), 4);
    let mut names = BTreeSet::new();
    for shard in checkpoint.files() {
        let bytes = fs::read(&shard.path).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        assert_same(&open(&shard.path).unwrap(), &theirs);
        names.extend(theirs.names().into_iter().map(str::to_owned));
    }
    assert_eq!(names.len(), checkpoint.tensors().len());
    for tensor in checkpoint.tensors() {
        assert!(names.contains(&tensor.name));
        let element_bytes = tensor.dtype.bitsize() as u64 / 8;
        assert!(tensor.offset.is_multiple_of(element_bytes), "{} is not aligned", tensor.name);
    }

    let index = json(&folder.join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], tiny().total_bytes());
    assert_eq!(index["weight_map"].as_object().unwrap().len(), names.len());
    assert_eq!(index["weight_map"]["model.embed_tokens.weight"], "model-00001-of-00004.safetensors");
    assert_eq!(json(&folder.join("config.json"))["num_experts"], 3);
}

#[test]
fn the_synthetic_checkpoint_has_the_tensors_of_such_a_model() {
    let folder = written(&tiny());
    let checkpoint = open(folder.path()).unwrap();
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
    let checkpoint = open(folder.path()).unwrap();
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
    let folder = Folder::new();
    folder.write("config.json", "precious");
    let error = tiny().write(&folder.path(), |_| panic!("wrote")).unwrap_err();
    assert!(matches!(error, SyntheticError::Exists { path } if path == folder.join("config.json")));
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), b"precious");

    let folder = Folder::new();
    folder.write("model-00003-of-00004.safetensors", "precious");
    let error = tiny().write(&folder.path(), |_| {}).unwrap_err();
    assert!(error.to_string().contains("model-00003-of-00004.safetensors"), "{error}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["model-00003-of-00004.safetensors"]);
    assert_eq!(fs::read(folder.join("model-00003-of-00004.safetensors")).unwrap(), b"precious");

    let blocked = folder.write("a file", "");
    assert!(matches!(
        tiny().write(&blocked, |_| {}),
        Err(SyntheticError::Exists { .. } | SyntheticError::Io { .. })
    ));
    let refused = SyntheticMoe { experts: 0, ..tiny() }.write(&folder.join("never"), |_| {});
    assert!(matches!(refused, Err(SyntheticError::OutOfBounds { dimension: "experts", .. })));
    assert!(!folder.join("never").exists());
}
