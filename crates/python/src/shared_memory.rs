//! Shared memory of Triton kernels and GPUs: the numbers of `poorwill.triton`.

use poorwill_triton::{
    AttentionTiles, DeltaRuleOutputTiles, DeltaRuleStateTiles, MatmulTiles, WITHOUT_OPT_IN_BYTES,
    known_capabilities, per_block_bytes,
};
use pyo3::prelude::*;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("SHARED_MEMORY_WITHOUT_OPT_IN_BYTES", WITHOUT_OPT_IN_BYTES)?;
    module.add_function(wrap_pyfunction!(known_compute_capabilities, module)?)?;
    module.add_function(wrap_pyfunction!(shared_memory_of_capability, module)?)?;
    module.add_function(wrap_pyfunction!(estimate_matmul, module)?)?;
    module.add_function(wrap_pyfunction!(estimate_attention, module)?)?;
    module.add_function(wrap_pyfunction!(estimate_chunk_fwd_o, module)?)?;
    module.add_function(wrap_pyfunction!(estimate_chunk_gated_delta_rule_fwd_h, module)?)
}

/// Compute capabilities whose shared memory is known, in ascending order.
#[pyfunction]
fn known_compute_capabilities() -> Vec<(u32, u32)> {
    known_capabilities().map(|known| (known.major, known.minor)).collect()
}

/// Shared memory, in bytes, that a block may opt in to; None for an unknown capability.
#[pyfunction]
fn shared_memory_of_capability(major: u32, minor: u32) -> Option<u64> {
    per_block_bytes((major, minor))
}

/// Upper bound of a matrix product's shared memory, in bytes.
#[pyfunction]
#[pyo3(signature = (
    capability, *, block_m, block_n, block_k, a_bytes, b_bytes, output_bytes, num_stages, num_warps
))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
fn estimate_matmul(
    capability: (u32, u32),
    block_m: u64,
    block_n: u64,
    block_k: u64,
    a_bytes: u64,
    b_bytes: u64,
    output_bytes: u64,
    num_stages: u64,
    num_warps: u64,
) -> u64 {
    MatmulTiles { block_m, block_n, block_k, a_bytes, b_bytes, output_bytes, num_stages, num_warps }
        .estimate_bytes(capability)
}

/// The same for attention.
#[pyfunction]
#[pyo3(signature = (capability, *, block_m, block_n, head_dim, element_bytes, num_stages, num_warps))]
fn estimate_attention(
    capability: (u32, u32),
    block_m: u64,
    block_n: u64,
    head_dim: u64,
    element_bytes: u64,
    num_stages: u64,
    num_warps: u64,
) -> u64 {
    AttentionTiles { block_m, block_n, head_dim, element_bytes, num_stages, num_warps }
        .estimate_bytes(capability)
}

/// The same for flash-linear-attention's `chunk_fwd_kernel_o`.
#[pyfunction]
#[pyo3(signature = (
    capability, *, block_t, block_k, block_v, key_dim, element_bytes, state_v_first, num_stages, num_warps
))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
fn estimate_chunk_fwd_o(
    capability: (u32, u32),
    block_t: u64,
    block_k: u64,
    block_v: u64,
    key_dim: Option<u64>,
    element_bytes: u64,
    state_v_first: bool,
    num_stages: u64,
    num_warps: u64,
) -> u64 {
    DeltaRuleOutputTiles {
        block_t,
        block_k,
        block_v,
        key_dim,
        element_bytes,
        state_v_first,
        num_stages,
        num_warps,
    }
    .estimate_bytes(capability)
}

/// The same for its `chunk_gated_delta_rule_fwd_kernel_h_blockdim64`.
#[pyfunction]
#[pyo3(signature = (
    capability, *, block_t, block_v, k_blocks, element_bytes, state_v_first, num_stages, num_warps
))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
fn estimate_chunk_gated_delta_rule_fwd_h(
    capability: (u32, u32),
    block_t: u64,
    block_v: u64,
    k_blocks: u64,
    element_bytes: u64,
    state_v_first: bool,
    num_stages: u64,
    num_warps: u64,
) -> u64 {
    DeltaRuleStateTiles { block_t, block_v, k_blocks, element_bytes, state_v_first, num_stages, num_warps }
        .estimate_bytes(capability)
}
