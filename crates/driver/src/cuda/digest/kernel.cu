// Digests of granules: version 1 of `poorwill_core::digest`, computed on a GPU.
//
// Two entries with the same body: `poorwill_digest` is for granules in memory of the device, `poorwill_digest_host`
// for granules in memory of the host. They differ in how many threads a block has.
//
// One thread block per granule. `granules` is an array of addresses, 16-byte aligned; `digests` one of 16 bytes for
// each, low word first. Both arrays and the granules may be host memory that is page-locked. A granule has `leaves`
// leaves of 4096 bytes: 15 at least, since shorter inputs of the root are hashed in another way. There is room for
// 16 * leaves + 16 bytes of dynamic shared memory. Threads of a block: a multiple of 32, up to what `maxntid` says.
//
// A lane reads the next leaf's bytes as soon as it is done with the same ones of this leaf.
//
// The loads are `cv`: memory of the host is read as it is now.

#include "xxh3.cuh"

/// Reads a lane's bytes of half a block.
INLINE void read(u64 data[2], u64 at)
{
    asm volatile("ld.global.cv.v2.u64 {%0, %1}, [%2];" : "=l"(data[0]), "=l"(data[1]) : "l"(at));
}

INLINE void digest(u64 granules, u64 digests, u32 leaves)
{
    u64 granule;
    asm volatile("ld.global.cv.u64 %0, [%1];" : "=l"(granule) : "l"(granules + 8 * (u64)blockIdx.x));
    u32 leaf = threadIdx.x / 32, warps = blockDim.x / 32;
    if (leaf < leaves) {
        Lane lane = lane_of(CONSTANTS.leaf);
        u64 at = granule + (u64)leaf * LEAF_BYTES + 16 * (threadIdx.x % 32);
        u64 data[LANE_WORDS];
#pragma unroll
        for (int half = 0; half < 8; half++)
            read(data + 2 * half, at + 512 * half);
        bool more;
        do {
            more = leaf + warps < leaves;
            at += (u64)warps * LEAF_BYTES;
            u64 word = leaf_digest(lane, data, [&](int block) {
                if (more) {
                    read(data + 4 * block, at + 1024 * block);
                    read(data + 4 * block + 2, at + 1024 * block + 512);
                }
            });
            if (threadIdx.x % 16 == 0)
                *leaf_word(leaf) = word;
            leaf += warps;
        } while (more);
    }
    write_root(digests, leaves);
}

// Few threads, so that most of many blocks read while one warp of another computes a root.
extern "C" __global__ void __launch_bounds__(64, 8) poorwill_digest(u64 granules, u64 digests, u32 leaves)
{
    digest(granules, digests, leaves);
}

// Host memory is slow to reach, and there are often few granules: one block alone keeps many loads in flight.
extern "C" __global__ void __launch_bounds__(512, 1) poorwill_digest_host(u64 granules, u64 digests, u32 leaves)
{
    digest(granules, digests, leaves);
}
