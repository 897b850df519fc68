"""The kernels of our own whose shared memory is recorded: a matrix product and attention, forward.

They are written the plain way, as a first version of such a kernel is: pointers and masks, one loop, and an
accumulator in registers. What counts here is which tiles go through shared memory, not how fast they are.
"""

import triton
import triton.language as tl


@triton.jit
def matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    rows,
    columns,
    depth,
    a_stride,
    b_stride,
    c_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_BY_COLUMNS: tl.constexpr,
    SUM_TYPE: tl.constexpr,
):
    """C = A·B, where B is converted to A's type if it has another."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + m[:, None] * a_stride + k[None, :]
    if B_BY_COLUMNS:
        b_at = b_ptr + n[None, :] * b_stride + k[:, None]
    else:
        b_at = b_ptr + k[:, None] * b_stride + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM_TYPE)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        a = tl.load(a_at, mask=(m[:, None] < rows) & (k[None, :] < left), other=0)
        b = tl.load(b_at, mask=(k[:, None] < left) & (n[None, :] < columns), other=0)
        total = tl.dot(a, b.to(a.dtype), total, out_dtype=SUM_TYPE)
        a_at += BLOCK_K
        if B_BY_COLUMNS:
            b_at += BLOCK_K
        else:
            b_at += BLOCK_K * b_stride
    c_at = c_ptr + m[:, None] * c_stride + n[None, :]
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def attention(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    queries,
    keys,
    q_stride,
    kv_stride,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Softmax(Q·Kᵀ)·V of one head, with the running maximum and sum of flash attention."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    head = tl.program_id(1).to(tl.int64)
    q_at = q_ptr + head * queries * q_stride + m[:, None] * q_stride + d[None, :]
    k_at = k_ptr + head * keys * kv_stride + n[:, None] * kv_stride + d[None, :]
    v_at = v_ptr + head * keys * kv_stride + n[:, None] * kv_stride + d[None, :]
    q = tl.load(q_at, mask=m[:, None] < queries, other=0.0)
    highest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    end = keys
    if IS_CAUSAL:
        end = tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        here = start + n
        k = tl.load(k_at, mask=here[:, None] < keys, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        allowed = here[None, :] < keys
        if IS_CAUSAL:
            allowed = allowed & (m[:, None] >= here[None, :])
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        weight = weight * fade + tl.sum(p, 1)
        total = total * fade[:, None]
        v = tl.load(v_at, mask=here[:, None] < keys, other=0.0)
        total = tl.dot(p.to(v.dtype), v, total)
        highest = higher
        k_at += BLOCK_N * kv_stride
        v_at += BLOCK_N * kv_stride
    total = total / weight[:, None]
    o_at = o_ptr + head * queries * q_stride + m[:, None] * q_stride + d[None, :]
    tl.store(o_at, total.to(o_ptr.dtype.element_ty), mask=m[:, None] < queries)
