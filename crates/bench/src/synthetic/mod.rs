//! A generated checkpoint: a mixture-of-experts model in shards with an index.
//!
//! Names, dtypes and files are those of a published block-quantised Qwen3-MoE. The numbers are noise that
//! depends only on the seed. No existing file is overwritten; a failed run removes its files.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use poorwill::checkpoint::Dtype;
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::json;

use self::noise::Distribution;
use crate::pattern::Key;

mod noise;

/// Whole windows of a pattern; fits the cache.
const BUFFER_BYTES: usize = 1 << 18;

/// Alignment of tensors in a shard, as in the reference implementation.
const ALIGNMENT: usize = 8;

/// Side of the square of weights with one scale.
const BLOCK: u64 = 128;

/// Size of an attention head, if the model is wide enough.
const HEAD: u64 = 128;

/// Dimensions of the checkpoint; the default has about 640 MiB in 4 shards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntheticMoe {
    /// Transformer layers, 1 to 256.
    pub layers: u64,
    /// Experts per layer, 1 to 1024.
    pub experts: u64,
    /// Width of the model, 1 to 65536.
    pub hidden: u64,
    /// Width of an expert, 1 to 65536.
    pub moe_intermediate: u64,
    /// Rows of the embedding, 1 to 16777216.
    pub vocab: u64,
    /// Files, 1 to 999, at most one per tensor.
    pub shards: u64,
    /// Determines all values.
    pub seed: u64,
}

/// Why a checkpoint was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyntheticError {
    /// A dimension is out of bounds.
    #[error("{dimension} is {value}, but must be from 1 to {max}")]
    OutOfBounds {
        /// Its name.
        dimension: &'static str,
        /// Its value.
        value: u64,
        /// Largest allowed value.
        max: u64,
    },

    /// A file of the checkpoint exists.
    #[error("{}: exists already and is not overwritten; choose an empty folder", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },

    /// The system refused a file or folder.
    #[error("{}: cannot write", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Default for SyntheticMoe {
    fn default() -> Self {
        Self {
            layers: 10,
            experts: 32,
            hidden: 1024,
            moe_intermediate: 512,
            vocab: 28_672,
            shards: 4,
            seed: 0,
        }
    }
}

impl SyntheticMoe {
    /// Without headers, index and configuration.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let layer = sum_of(&self.attention(0)).saturating_add(sum_of(&self.router(0)));
        let experts = sum_of(&self.expert(0, 0)).saturating_mul(self.experts);
        let layers = layer.saturating_add(experts).saturating_mul(self.layers);
        layers.saturating_add(sum_of(&[self.embedding()])).saturating_add(sum_of(&self.head()))
    }

    /// Writes the checkpoint into `dir`, and creates that. `progress` receives the tensor bytes so far.
    pub fn write(&self, dir: &Path, progress: impl FnMut(u64)) -> Result<(), SyntheticError> {
        self.check()?;
        fs::create_dir_all(dir).map_err(|source| refused(dir, source))?;
        let mut writer = Writer { dir, progress, seed: self.seed, written: 0, created: Vec::new() };
        let result = self.write_with(&mut writer);
        if result.is_err() {
            writer.remove_created();
        }
        result
    }

    /// The configuration comes first: a folder with another model is refused at once. The index comes last:
    /// with one, a folder is complete.
    fn write_with(&self, writer: &mut Writer<'_, impl FnMut(u64)>) -> Result<(), SyntheticError> {
        writer.json("config.json", &self.config())?;
        let shards = self.distribute();
        let mut weight_map = BTreeMap::new();
        for (position, shard) in shards.iter().enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", position + 1, shards.len());
            writer.shard(&file, shard)?;
            weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), file.clone())));
        }
        let index = json!({"metadata": {"total_size": self.total_bytes()}, "weight_map": weight_map});
        writer.json("model.safetensors.index.json", &index)
    }

    fn check(&self) -> Result<(), SyntheticError> {
        for (dimension, value, max) in [
            ("layers", self.layers, 256),
            ("experts", self.experts, 1024),
            ("hidden", self.hidden, 1 << 16),
            ("moe_intermediate", self.moe_intermediate, 1 << 16),
            ("vocab", self.vocab, 1 << 24),
            ("shards", self.shards, 999),
        ] {
            out_of_bounds(dimension, value, max)?;
        }
        out_of_bounds("shards", self.shards, self.tensors().len() as u64)
    }

    /// About equal, none empty. Sorted as safetensors does: by alignment, then by name.
    fn distribute(&self) -> Vec<Vec<TensorSpec>> {
        let share = self.total_bytes() / self.shards;
        let tensors = self.tensors();
        let (mut shards, mut shard) = (Vec::new(), Vec::new());
        let (mut full, mut placed, mut left) = (0, 0, tensors.len() as u64);
        for tensor in tensors {
            placed += tensor.bytes();
            left -= 1;
            shard.push(tensor);
            let to_come = self.shards - full - 1;
            if to_come > 0 && (placed >= share * (full + 1) || left == to_come) {
                shards.push(std::mem::take(&mut shard));
                full += 1;
            }
        }
        shards.push(shard);
        for shard in &mut shards {
            shard.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        }
        shards
    }

    fn tensors(&self) -> Vec<TensorSpec> {
        let mut tensors = vec![self.embedding()];
        for layer in 0..self.layers {
            tensors.extend(self.attention(layer));
            tensors.extend(self.router(layer));
            for expert in 0..self.experts {
                tensors.extend(self.expert(layer, expert));
            }
        }
        tensors.extend(self.head());
        tensors
    }

    fn embedding(&self) -> TensorSpec {
        TensorSpec::new(
            "model.embed_tokens.weight".to_owned(),
            Distribution::Bf16Weight,
            &[self.vocab, self.hidden],
        )
    }

    fn attention(&self, layer: u64) -> [TensorSpec; 9] {
        let of = |name: &str, distribution, shape: &[u64]| {
            TensorSpec::new(format!("model.layers.{layer}.{name}"), distribution, shape)
        };
        let Heads { size, queries, keys } = self.heads();
        [
            of("input_layernorm.weight", Distribution::Bf16Norm, &[self.hidden]),
            of("self_attn.q_proj.weight", Distribution::Bf16Weight, &[queries * size, self.hidden]),
            of("self_attn.k_proj.weight", Distribution::Bf16Weight, &[keys * size, self.hidden]),
            of("self_attn.v_proj.weight", Distribution::Bf16Weight, &[keys * size, self.hidden]),
            of("self_attn.o_proj.weight", Distribution::Bf16Weight, &[self.hidden, queries * size]),
            of("self_attn.q_norm.weight", Distribution::Bf16Norm, &[size]),
            of("self_attn.k_norm.weight", Distribution::Bf16Norm, &[size]),
            of("self_attn.k_scale", Distribution::F32Scale, &[]),
            of("self_attn.v_scale", Distribution::F32Scale, &[]),
        ]
    }

    fn router(&self, layer: u64) -> [TensorSpec; 2] {
        let of = |name: &str, distribution, shape: &[u64]| {
            TensorSpec::new(format!("model.layers.{layer}.{name}"), distribution, shape)
        };
        [
            of("post_attention_layernorm.weight", Distribution::Bf16Norm, &[self.hidden]),
            of("mlp.gate.weight", Distribution::F32Weight, &[self.experts, self.hidden]),
        ]
    }

    fn expert(&self, layer: u64, expert: u64) -> [TensorSpec; 6] {
        let weight = |name: &str, rows, columns| {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{name}.weight");
            TensorSpec::new(name, Distribution::F8Weight, &[rows, columns])
        };
        let scale = |name: &str, rows: u64, columns: u64| {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{name}.weight_scale_inv");
            TensorSpec::new(name, Distribution::F32Scale, &[rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)])
        };
        let (wide, narrow) = (self.hidden, self.moe_intermediate);
        [
            weight("gate_proj", narrow, wide),
            scale("gate_proj", narrow, wide),
            weight("up_proj", narrow, wide),
            scale("up_proj", narrow, wide),
            weight("down_proj", wide, narrow),
            scale("down_proj", wide, narrow),
        ]
    }

    fn head(&self) -> [TensorSpec; 2] {
        [
            TensorSpec::new("model.norm.weight".to_owned(), Distribution::Bf16Norm, &[self.hidden]),
            TensorSpec::new(
                "lm_head.weight".to_owned(),
                Distribution::Bf16Weight,
                &[self.vocab, self.hidden],
            ),
        ]
    }

    fn heads(&self) -> Heads {
        let size = HEAD.min(self.hidden).max(1);
        let queries = self.hidden / size;
        let keys = if queries.is_multiple_of(4) { queries / 4 } else { queries };
        Heads { size, queries, keys }
    }

    fn config(&self) -> serde_json::Value {
        let Heads { size, queries, keys } = self.heads();
        json!({
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": queries,
            "num_key_value_heads": keys,
            "head_dim": size,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts.min(8),
            "moe_intermediate_size": self.moe_intermediate,
            "intermediate_size": self.moe_intermediate,
            "decoder_sparse_step": 1,
            "norm_topk_prob": true,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
        })
    }
}

struct Heads {
    size: u64,
    queries: u64,
    keys: u64,
}

fn out_of_bounds(dimension: &'static str, value: u64, max: u64) -> Result<(), SyntheticError> {
    if (1..=max).contains(&value) {
        Ok(())
    } else {
        Err(SyntheticError::OutOfBounds { dimension, value, max })
    }
}

struct TensorSpec {
    name: String,
    distribution: Distribution,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl TensorSpec {
    fn new(name: String, distribution: Distribution, shape: &[u64]) -> Self {
        let dtype = match distribution {
            Distribution::Bf16Weight | Distribution::Bf16Norm => Dtype::BF16,
            Distribution::F32Weight | Distribution::F32Scale => Dtype::F32,
            Distribution::F8Weight => Dtype::F8_E4M3,
        };
        Self { name, distribution, dtype, shape: shape.to_vec() }
    }

    fn bytes(&self) -> u64 {
        let element_bytes = self.dtype.bits() / 8;
        self.shape.iter().fold(element_bytes, |product, dim| product.saturating_mul(*dim))
    }

    /// The number of shards changes no value.
    fn key(&self, seed: u64) -> Key {
        Key::of([seed].into_iter().chain(self.name.bytes().map(u64::from)))
    }
}

fn sum_of(tensors: &[TensorSpec]) -> u64 {
    tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.bytes()))
}

#[derive(Serialize)]
struct HeaderEntry<'a> {
    dtype: Dtype,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

struct Header<'a>(&'a [TensorSpec]);

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("__metadata__", &json!({"format": "pt"}))?;
        let mut begin = 0;
        for tensor in self.0 {
            let end = begin + tensor.bytes();
            let (dtype, shape) = (tensor.dtype, &tensor.shape);
            map.serialize_entry(&tensor.name, &HeaderEntry { dtype, shape, data_offsets: [begin, end] })?;
            begin = end;
        }
        map.end()
    }
}

struct Writer<'a, P> {
    dir: &'a Path,
    progress: P,
    seed: u64,
    written: u64,
    created: Vec<PathBuf>,
}

impl<P: FnMut(u64)> Writer<'_, P> {
    fn json(&mut self, name: &str, value: &serde_json::Value) -> Result<(), SyntheticError> {
        self.file(name, |_, file| {
            serde_json::to_writer_pretty(&mut *file, value)?;
            file.write_all(b"\n")
        })
    }

    fn shard(&mut self, name: &str, tensors: &[TensorSpec]) -> Result<(), SyntheticError> {
        self.file(name, |writer, file| {
            write_header(file, tensors)?;
            let mut buffer = vec![0; BUFFER_BYTES];
            tensors.iter().try_for_each(|tensor| writer.tensor(file, tensor, &mut buffer))
        })
    }

    fn tensor(&mut self, file: &mut impl Write, tensor: &TensorSpec, buffer: &mut [u8]) -> io::Result<()> {
        let key = tensor.key(self.seed);
        let bytes = tensor.bytes();
        let mut done = 0;
        while done < bytes {
            let take = usize::try_from(bytes - done).map_or(buffer.len(), |left| left.min(buffer.len()));
            let part = &mut buffer[..take];
            noise::fill(part, tensor.distribution, key, done);
            file.write_all(part)?;
            done += take as u64;
            self.written += take as u64;
            (self.progress)(self.written);
        }
        Ok(())
    }

    fn file(
        &mut self,
        name: &str,
        fill: impl FnOnce(&mut Self, &mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), SyntheticError> {
        let path = self.dir.join(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        let file = file.map_err(|source| refused(&path, source))?;
        self.created.push(path.clone());
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, file);
        let written = fill(self, &mut file).and_then(|()| file.flush());
        written.map_err(|source| refused(&path, source))
    }

    fn remove_created(&self) {
        for path in &self.created {
            // The failed write is reported.
            let _ = fs::remove_file(path);
        }
    }
}

/// Padded with spaces to align the tensors.
fn write_header(file: &mut impl Write, tensors: &[TensorSpec]) -> io::Result<()> {
    let mut header = serde_json::to_vec(&Header(tensors))?;
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)
}

fn refused(path: &Path, source: io::Error) -> SyntheticError {
    let path = path.to_path_buf();
    match source.kind() {
        ErrorKind::AlreadyExists => SyntheticError::Exists { path },
        _ => SyntheticError::Io { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> SyntheticMoe {
        SyntheticMoe {
            layers: 2,
            experts: 3,
            hidden: 48,
            moe_intermediate: 20,
            vocab: 100,
            shards: 4,
            seed: 1,
        }
    }

    #[test]
    fn the_default_has_about_640_mib() {
        let mib = SyntheticMoe::default().total_bytes() >> 20;
        assert!((600..680).contains(&mib), "{mib} MiB");
    }

    #[test]
    fn the_total_is_the_sum_of_the_tensors() {
        for model in [tiny(), SyntheticMoe::default(), SyntheticMoe { hidden: 640, ..tiny() }] {
            assert_eq!(model.total_bytes(), sum_of(&model.tensors()));
        }
    }

    #[test]
    fn shards_are_balanced_and_never_empty() {
        let model = SyntheticMoe::default();
        let share = model.total_bytes() / model.shards;
        for shard in model.distribute() {
            assert!(sum_of(&shard).abs_diff(share) < share / 4);
        }
        let tensors = tiny().tensors().len() as u64;
        for shards in 1..=tensors {
            let parts = SyntheticMoe { shards, ..tiny() }.distribute();
            assert_eq!(parts.len() as u64, shards);
            assert!(parts.iter().all(|part| !part.is_empty()));
            assert_eq!(parts.iter().map(Vec::len).sum::<usize>() as u64, tensors);
        }
    }

    #[test]
    fn dimensions_out_of_bounds_are_refused() {
        let refused = |model: SyntheticMoe| model.check().unwrap_err().to_string();
        assert_eq!(refused(SyntheticMoe { layers: 0, ..tiny() }), "layers is 0, but must be from 1 to 256");
        assert!(refused(SyntheticMoe { vocab: u64::MAX, ..tiny() }).starts_with("vocab is 1844674407370955"));
        assert_eq!(refused(SyntheticMoe { shards: 62, ..tiny() }), "shards is 62, but must be from 1 to 61");
        let most = u64::MAX;
        let model = SyntheticMoe { layers: most, experts: most, hidden: most, vocab: most, ..tiny() };
        assert_eq!(model.total_bytes(), u64::MAX);
    }
}
