/// PTX of the kernels `poorwill_encode(u64 granules, u64 sizes, u32 leaves)` and
/// `poorwill_decode(u64 granules, u64 digests, u32 leaves)`. The header states the requirements.
pub const CODEC_PTX: &str = include_str!("kernel.ptx");
