// Digests on a GPU: version 1 of `poorwill_core::digest`, in the steps of XXH3-128 (Collet, the specification of
// xxHash).
//
// The words of those two are used here: leaf, root; stripe (64 bytes), block (16 stripes), secret, accumulator,
// scramble, merge. A lane is a thread of a warp.
//
// A warp has a leaf, half a block at a time: 512 bytes that follow each other, 16 in each lane. Lane 4s+t has those of
// stripe s that belong to the accumulators 2t and 2t+1. A stripe's contribution to its block depends on no other
// stripe, so lanes are summed behind each block. From there on the lower half of the warp has the accumulators 2t, and
// the upper one 2t+1, each of them four times. Merging, the lower half computes the low word, the upper one the high.

#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE static __device__ __forceinline__

// Enumerations, as other constants would be written into the module.
enum : u32 {
    ALL_LANES = 0xffffffff,
    LEAF_BYTES = 4096,
    /// Words of a leaf in a lane.
    LANE_WORDS = 16,
    PRIME32_1 = 0x9E3779B1,
    PRIME32_2 = 0x85EBCA77,
    PRIME32_3 = 0xC2B2AE3D,
};

enum : u64 {
    PRIME64_1 = 0x9E3779B185EBCA87,
    PRIME64_2 = 0xC2B2AE3D27D4EB4F,
    PRIME64_3 = 0x165667B19E3779F9,
    PRIME64_4 = 0x85EBCA77C2B2AE63,
    PRIME64_5 = 0x27D4EB2F165667C5,
    PRIME_AVALANCHE = 0x165667919E3779F9,
    /// ASCII `poorwil1`.
    ROOT_SEED = 0x316C6977726F6F70,
};

/// A seed's secret, and its words that begin between others: for the last stripe, and to merge into either word.
struct Keys {
    u64 secret[24], last[8], merge[2][8];
};

struct Constants {
    Keys leaf, root;
    u64 start[8];
};

/// The word that begins at a byte.
__device__ constexpr u64 word_at(const Keys& keys, int byte)
{
    u64 low = keys.secret[byte / 8] >> 8 * (byte % 8);
    return byte % 8 == 0 ? low : low | keys.secret[byte / 8 + 1] << (64 - 8 * (byte % 8));
}

__device__ constexpr Keys keys_of(u64 seed)
{
    // The default secret.
    Keys keys = {{
        0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072, 0x78E5C0CC4EE679CB,
        0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0, 0xCB00C391BB52283C, 0xA32E531B8B65D088,
        0x4EF90DA297486471, 0xD8ACDEA946EF1938, 0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A,
        0x647378D9C97E9FC8, 0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
        0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
    }};
    for (int nth = 0; nth < 24; nth++)
        keys.secret[nth] += nth % 2 == 0 ? seed : 0 - seed;
    for (int nth = 0; nth < 8; nth++) {
        keys.last[nth] = word_at(keys, 192 - 64 - 7 + 8 * nth);
        keys.merge[0][nth] = word_at(keys, 11 + 8 * nth);
        keys.merge[1][nth] = word_at(keys, 192 - 64 - 11 + 8 * nth);
    }
    return keys;
}

static __constant__ const Constants CONSTANTS = {
    keys_of(0),
    keys_of(ROOT_SEED),
    {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1},
};

/// Dynamic shared memory.
extern __shared__ __align__(16) u8 found[];

/// A place in memory that is not shared.
template <typename Value>
INLINE Value* in_global(u64 address)
{
    return (Value*)__cvta_global_to_generic(address);
}

/// What a lane needs of a seed's secret.
struct Lane {
    /// Which stripe of eight, and which quarter of it.
    u32 group, quarter;
    bool upper;
    /// For its two stripes of a block.
    u64 keys[4];
    u64 scramble, merge[2], start;
};

INLINE Lane lane_of(const Keys& keys)
{
    u32 number = threadIdx.x % 32, group = number / 4, quarter = number % 4, half = number / 16;
    Lane lane = {group, quarter, half == 1};
    for (int nth = 0; nth < 4; nth++)
        lane.keys[nth] = keys.secret[2 * quarter + group + nth % 2 + 8 * (nth / 2)];
    lane.scramble = keys.secret[16 + 2 * quarter + half];
    lane.merge[0] = keys.merge[half][2 * quarter + half];
    lane.merge[1] = keys.merge[half][2 * quarter + 1 - half];
    lane.start = CONSTANTS.start[2 * quarter + half];
    return lane;
}

/// The sum of a product of halves, and something.
INLINE u64 folded(u64 word, u64 add)
{
    u64 sum;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"((u32)word), "r"((u32)(word >> 32)), "l"(add));
    return sum;
}

/// Adds two words to two sums: each to its neighbour's, and its product with the key to its own.
INLINE void accumulate(u64 sums[2], const u64 data[2], const u64 keys[2])
{
    sums[0] = folded(data[0] ^ keys[0], sums[0] + data[1]);
    sums[1] = folded(data[1] ^ keys[1], sums[1] + data[0]);
}

/// The same with the second stripe, which has other keys where it is the very last one.
INLINE void accumulate_last(u64 sums[2], const u64 data[2], const Lane& lane, const Keys& secret)
{
    u64 keys[2] = {lane.keys[2], lane.keys[3]};
    u32 quarter = lane.quarter;
    // So that they are read here again, and occupy no register before.
    asm volatile("" : "+r"(quarter));
    if (lane.group == 7) {
        keys[0] = secret.last[2 * quarter];
        keys[1] = secret.last[2 * quarter + 1];
    }
    accumulate(sums, data, keys);
}

/// A lane's accumulator, from the sums of all lanes. First the halves of the warp exchange what belongs to the other.
INLINE u64 gathered(const Lane& lane, const u64 sums[2])
{
    u64 own = lane.upper ? sums[1] : sums[0];
    own += __shfl_xor_sync(ALL_LANES, lane.upper ? sums[0] : sums[1], 16);
    own += __shfl_xor_sync(ALL_LANES, own, 8);
    return own + __shfl_xor_sync(ALL_LANES, own, 4);
}

INLINE u64 scrambled(const Lane& lane, u64 accumulator)
{
    return (accumulator ^ accumulator >> 47 ^ lane.scramble) * PRIME32_1;
}

/// A word of the digest: the length's part, and folded products of pairs of accumulators. Then the avalanche.
INLINE u64 merged(const Lane& lane, u64 accumulator, u64 length)
{
    u64 other = __shfl_xor_sync(ALL_LANES, accumulator, 16) ^ lane.merge[1];
    u64 own = accumulator ^ lane.merge[0];
    u64 word = own * other ^ __umul64hi(own, other);
    word += __shfl_xor_sync(ALL_LANES, word, 1);
    word += __shfl_xor_sync(ALL_LANES, word, 2);
    word += lane.upper ? ~(length * PRIME64_2) : length * PRIME64_1;
    word = (word ^ word >> 37) * PRIME_AVALANCHE;
    return word ^ word >> 32;
}

/// The digest of a leaf in registers: the low word in the lower half of the warp, the high one in the upper. `used` is
/// told which block's registers are free.
template <typename Used>
INLINE u64 leaf_digest(const Lane& lane, const u64 data[LANE_WORDS], Used used)
{
    u64 accumulator = lane.start;
#pragma unroll
    for (int block = 0; block < 4; block++) {
        u64 sums[2] = {0, 0};
        accumulate(sums, data + 4 * block, lane.keys);
        if (block == 3)
            accumulate_last(sums, data + 4 * block + 2, lane, CONSTANTS.leaf);
        else
            accumulate(sums, data + 4 * block + 2, lane.keys + 2);
        used(block);
        accumulator += gathered(lane, sums);
        if (block < 3)
            accumulator = scrambled(lane, accumulator);
    }
    return merged(lane, accumulator, LEAF_BYTES);
}

/// Where a lane of the lower or upper half puts its word of a leaf's digest.
INLINE u64* leaf_word(u32 leaf)
{
    return (u64*)found + 2 * leaf + threadIdx.x % 32 / 16;
}

/// One warp computes the digest of the leaves' digests and the length, for 15 leaves or more.
INLINE void write_root(u64 digests, u32 leaves)
{
    u32 bytes = 16 * leaves;
    if (threadIdx.x == 0)
        *(u64*)(found + bytes) = (u64)leaves * LEAF_BYTES;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    Lane lane = lane_of(CONSTANTS.root);
    u64 accumulator = lane.start;
    const ulonglong2* from = (const ulonglong2*)found + threadIdx.x;
    // Blocks that are full, then stripes, as many as begin before the last byte; then the last 64 bytes.
#pragma unroll 1
    for (u32 blocks = (bytes + 7) / 1024; blocks > 0; blocks--, from += 64) {
        u64 sums[2] = {0, 0};
        accumulate(sums, &from[0].x, lane.keys);
        accumulate(sums, &from[32].x, lane.keys + 2);
        accumulator = scrambled(lane, accumulator + gathered(lane, sums));
    }
    // At most 15 are left, so that the last 64 bytes take the place of the sixteenth.
    u32 stripes = (bytes + 7) % 1024 / 64;
    u64 sums[2] = {0, 0};
    if (lane.group < stripes)
        accumulate(sums, &from[0].x, lane.keys);
    if (lane.group + 8 < stripes)
        accumulate(sums, &from[32].x, lane.keys + 2);
    if (lane.group == 7)
        accumulate_last(sums, (const u64*)(found + bytes - 56) + 2 * lane.quarter, lane, CONSTANTS.root);
    accumulator += gathered(lane, sums);
    u64 word = merged(lane, accumulator, bytes + 8);
    if (threadIdx.x % 16 == 0)
        in_global<u64>(digests)[2 * (u64)blockIdx.x + lane.upper] = word;
}
