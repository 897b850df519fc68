// Codes of granules: version 1 of `poorwill_core::codec`, and digests of what is decoded.
//
// One thread block per granule. A granule has `leaves` blocks of 4096 bytes. Threads of a block: a multiple of 32, up
// to what `maxntid` says. Granules, slots, codes and arrays may be memory of the device, or of the host if it is
// page-locked. Granules, slots and codes are 16-byte aligned.
//
// `poorwill_encode` writes the code of each granule to its slot, and its length to `sizes`, 8 bytes each. A code that
// is longer than the slot is not written, so slots of 0 bytes measure. `granules` is an array of 32 bytes each: the
// address of the granule, that of the slot, bytes of the slot, nothing. There is room for 12 * leaves + 32 bytes, and
// 1296 for each warp, of dynamic shared memory.
//
// `poorwill_decode` and `poorwill_decode_host`, for codes in memory of the device and of the host, write the granules,
// and their digests, 16 bytes each, low word first. `granules` is an array of 32 bytes each: the address of the code,
// its bytes (a multiple of 16), the address of the granule or 0 for its digest alone, nothing. A granule has 15 leaves
// at least. There is room for 16 * leaves + 16 bytes, and 1296 for each warp.
//
// The loads from memory of the host are `cv`: it is read as it is now. On an H100, such loads of the device's memory
// take several times as long as `cs`.
//
// Words of `docs/codec.md` are used here: head, unit, plane, row, base, escape. A warp has a block. Its lanes have the
// bytes that they have in a digest's leaf: 16 of each row of 512. So the decoder digests a block from its registers.

#include "xxh3.cuh"

enum : u32 {
    ROWS = 8,
    ESCAPE = 7,
    ESCAPES_MAX = 1279,
    UNIT = 128,
    /// Where the codes begin in a block's data, in bytes.
    AT_CODES = 2048,
    /// Words of a lane's codes.
    CODE_WORDS = 6,
    CODES = 64,
    /// Shared memory of a warp for escapes, and three bytes in front of the first.
    STAGE_BYTES = 1296,
    BASES = 4,
    THRESHOLDS = 7,
    /// A byte in each byte of a word.
    BYTES = 0x01010101,
};

enum Kind : u32 { FILL, RAW, BF16 };

/// Units of a block's data.
enum : u32 { RAW_UNITS = 32, BF16_UNITS = 22 };

/// An element of the array of granules.
struct Entry {
    u64 first, second, third;
};

// How memory is read: `Now` as it is now, `Once` as what is not read again.
#define LOADS(Name, how)                                                                                             \
    struct Name {                                                                                                    \
        INLINE u32 word(u64 at)                                                                                      \
        {                                                                                                            \
            u32 word;                                                                                                \
            asm volatile("ld.global." how ".u32 %0, [%1];" : "=r"(word) : "l"(at));                                  \
            return word;                                                                                             \
        }                                                                                                            \
        INLINE uint2 two(u64 at)                                                                                     \
        {                                                                                                            \
            uint2 two;                                                                                               \
            asm volatile("ld.global." how ".v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "l"(at));           \
            return two;                                                                                              \
        }                                                                                                            \
        INLINE ulonglong2 row(u64 at)                                                                                \
        {                                                                                                            \
            ulonglong2 row;                                                                                          \
            asm volatile("ld.global." how ".v2.u64 {%0, %1}, [%2];" : "=l"(row.x), "=l"(row.y) : "l"(at));           \
            return row;                                                                                              \
        }                                                                                                            \
    };
LOADS(Now, "cv")
LOADS(Once, "cs")

INLINE u32 lane_number()
{
    return threadIdx.x % 32;
}

/// The entry of this thread block: read once, since the array is in memory of the host.
INLINE Entry entry_of_block(u64 granules)
{
    Entry* shared = (Entry*)found;
    if (threadIdx.x == 0) {
        u64 at = granules + 32 * (u64)blockIdx.x;
        ulonglong2 two = Now::row(at);
        *shared = {two.x, two.y, Now::row(at + 16).x};
    }
    __syncthreads();
    Entry entry = *shared;
    __syncthreads();
    return entry;
}

/// The sum of the lanes before this one; `total` becomes that of all.
INLINE u32 sum_before(u32& total)
{
    u32 before = 0;
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, total, distance);
        before += lane_number() & distance ? other : 0;
        total += other;
    }
    return before;
}

/// A value of all lanes, by an operation that keeps order irrelevant.
template <typename Op>
INLINE u32 of_lanes(u32 value, Op op)
{
    for (u32 distance = 16; distance > 0; distance /= 2)
        value = op(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

INLINE u32 sum_of_lanes(u32 value)
{
    return of_lanes(value, [](u32 a, u32 b) { return a + b; });
}

/// Adds a word's bytes to a sum.
INLINE u32 add_bytes(u32 word, u32 sum)
{
    asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(BYTES));
    return sum;
}

/// Escapes among a lane's codes.
INLINE u32 count_escapes(const u32 codes[CODE_WORDS])
{
    u32 count = 0;
    for (int half = 0; half < 4; half++) {
        const u32* words = codes + half / 2 * 3 + half % 2;
        u64 sixteen = (words[0] | (u64)words[1] << 32) >> 16 * (half % 2);
        count += __popcll(sixteen & sixteen >> 1 & sixteen >> 2 & 0x249249249249);
    }
    return count;
}

/// A lane's words of a block of a granule.
INLINE void read_block(u32 words[4 * ROWS], u64 at)
{
    for (int row = 0; row < ROWS; row++) {
        u32* four = words + 4 * row;
        asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                     : "l"(at + 16 * lane_number() + 512 * row));
    }
}

/// The exponent of a lane's value.
INLINE u32 exponent_of(const u32 words[4 * ROWS], int value)
{
    return words[value / 2] >> 7 + 16 * (value % 2) & 0xff;
}

/// Keeps the compiler from holding what it has calculated from these words: there are too few registers for it.
INLINE void forget(u32 words[4 * ROWS])
{
    for (int nth = 0; nth < 4 * ROWS; nth++)
        asm volatile("" : "+r"(words[nth]));
}

/// What the encoder has in shared memory: heads, escapes of each block, the code's end and length.
struct Plan {
    uint2* heads;
    u32* escapes;
    uint2* end;
};

INLINE u32 head_of(Kind kind, u32 place)
{
    return kind << 24 | place;
}

/// How a block is stored: its head with its units as the place, and its escapes.
INLINE void plan_block(const Plan& plan, u32 leaf, const u32 words[4 * ROWS], u32 pattern)
{
    u32 differ = 0, largest = 0;
    for (int nth = 0; nth < 4 * ROWS; nth++) {
        differ |= words[nth] ^ pattern;
        largest = max(largest, max(exponent_of(words, 2 * nth), exponent_of(words, 2 * nth + 1)));
    }
    differ = of_lanes(differ, [](u32 a, u32 b) { return a | b; });
    largest = of_lanes(largest, [](u32 a, u32 b) { return max(a, b); });
    // How many exponents lie at least so far below the largest: those above a base, and those that no code has. Four at
    // a time, a byte each, 128 for each that does. No byte of the difference borrows: none is negative.
    const u32 thresholds[THRESHOLDS] = {1, 2, 3, 7, 8, 9, 10};
    u32 counts[THRESHOLDS] = {};
    for (int nth = 0; nth < 4 * ROWS; nth += 2) {
        u32 below = largest * BYTES - __byte_perm(words[nth] << 1, words[nth + 1] << 1, 0x7531);
        for (int count = 0; count < THRESHOLDS; count++) {
            u32 reach = ((below | 0x80808080) - thresholds[count] * BYTES | below) & 0x80808080;
            counts[count] = add_bytes(reach, counts[count]);
        }
    }
    // Two counts in a word, summed over the lanes.
    for (int count = 0; count < THRESHOLDS; count += 2) {
        bool is_last = count + 1 == THRESHOLDS;
        u32 two = sum_of_lanes(counts[count] >> 7 | (is_last ? 0 : counts[count + 1] >> 7 << 16));
        counts[count] = two & 0xffff;
        if (!is_last)
            counts[count + 1] = two >> 16;
    }
    // The base with the fewest escapes. Escapes are those too far below it, and all that lie above it.
    u32 escapes = counts[3], base = largest;
    for (int below = 1; below < BASES; below++) {
        u32 other = counts[below + 3] + 2048 - counts[below - 1];
        if (other < escapes) {
            escapes = other;
            base = largest - below;
        }
    }
    uint2 head = {head_of(BF16, BF16_UNITS), base << 24};
    if (escapes > ESCAPES_MAX)
        head = {head_of(RAW, RAW_UNITS), 0};
    if (differ == 0)
        head = {head_of(FILL, 0), pattern};
    if (lane_number() == 0) {
        plan.heads[leaf] = head;
        plan.escapes[leaf] = head.x >> 24 == BF16 ? escapes : 0;
    }
}

/// One warp gives each block its place, and finds the length.
INLINE void place_blocks(const Plan& plan, u32 leaves, u64 size_at)
{
    u32 units = 0;
#pragma unroll 1
    for (u32 leaf = lane_number(); leaf < leaves; leaf += 32)
        units += plan.heads[leaf].x & 0xffffff;
    u32 unit = (leaves + 15) / 16;
    u32 escape = UNIT * (sum_of_lanes(units) + unit);
#pragma unroll 1
    for (u32 first = 0; first < leaves; first += 32) {
        u32 leaf = first + lane_number();
        bool is_leaf = leaf < leaves;
        uint2 head = is_leaf ? plan.heads[leaf] : uint2{0, 0};
        u32 kind = head.x >> 24;
        u32 block_units = head.x & 0xffffff, escapes = is_leaf ? plan.escapes[leaf] : 0;
        u32 at = unit + sum_before(block_units), escapes_at = escape + sum_before(escapes);
        unit += block_units;
        escape += escapes;
        head.x = head_of((Kind)kind, kind == FILL ? 0 : at);
        if (kind == BF16)
            head.y |= escapes_at;
        if (is_leaf)
            plan.heads[leaf] = head;
    }
    if (lane_number() == 0) {
        u32 bytes = (escape + 15) / 16 * 16;
        *plan.end = {escape, bytes};
        *in_global<u64>(size_at) = bytes;
    }
}

/// Heads and their padding, and zeros behind the last escape.
INLINE void write_heads(const Plan& plan, u32 leaves, u64 target)
{
#pragma unroll 1
    for (u32 leaf = threadIdx.x; leaf < (leaves + 15) / 16 * 16; leaf += blockDim.x)
        in_global<uint2>(target)[leaf] = leaf < leaves ? plan.heads[leaf] : uint2{0, 0};
    uint2 end = *plan.end;
    if (end.x + threadIdx.x < end.y)
        in_global<u8>(target)[end.x + threadIdx.x] = 0;
}

/// Signs and mantissas of two words.
INLINE u32 first_plane(const u32 words[2])
{
    u32 bytes[2];
    for (int nth = 0; nth < 2; nth++)
        bytes[nth] = words[nth] & 0x7f007f | words[nth] >> 8 & 0x800080;
    return __byte_perm(bytes[0], bytes[1], 0x6420);
}

/// Writes a block's planes and escapes; of these no more than were counted before, whatever the granule holds now.
INLINE void write_planes(u64 data, u64 escapes_at, u32 counted, u32 base, u32 words[4 * ROWS], u8* stage)
{
    for (int row = 0; row < ROWS; row++) {
        const u32* four = words + 4 * row;
        in_global<uint2>(data)[lane_number() + 32 * row] = {first_plane(four), first_plane(four + 2)};
    }
    u32 codes[CODE_WORDS] = {};
    for (int nth = 0; nth < CODES; nth++) {
        u32 code = min(base - exponent_of(words, nth), (u32)ESCAPE);
        int bit = 3 * nth % 32;
        codes[3 * nth / 32] |= code << bit;
        if (bit > 29)
            codes[3 * nth / 32 + 1] |= code >> 32 - bit;
    }
    for (int word = 0; word < CODE_WORDS; word++)
        in_global<u32>(data + AT_CODES)[lane_number() + 32 * word] = codes[word];
    u32 total = count_escapes(codes);
    u8* escape = stage + sum_before(total);
    if (total > ESCAPES_MAX)
        return;
    forget(words);
    for (int nth = 0; nth < CODES; nth++) {
        u32 exponent = exponent_of(words, nth);
        if (base - exponent >= ESCAPE)
            *escape++ = exponent;
    }
    __syncwarp();
#pragma unroll 1
    for (u32 at = lane_number(); at < min(counted, total); at += 32)
        in_global<u8>(escapes_at)[at] = stage[at];
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(1024, 1) poorwill_encode(u64 granules, u64 sizes, u32 leaves)
{
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u8* end = found + (12 * leaves + 15) / 16 * 16;
    Plan plan = {(uint2*)found, (u32*)(found + 8 * leaves), (uint2*)end};
    auto [granule, target, target_bytes] = entry_of_block(granules);
#pragma unroll 1
    for (u32 leaf = warp; leaf < leaves; leaf += warps) {
        u64 at = granule + (u64)leaf * LEAF_BYTES;
        u32 words[4 * ROWS], pattern = Once::word(at);
        read_block(words, at);
        plan_block(plan, leaf, words, pattern);
    }
    __syncthreads();
    if (warp == 0)
        place_blocks(plan, leaves, sizes + 8 * (u64)blockIdx.x);
    __syncthreads();
    // Nothing more where it does not fit.
    if (target_bytes < plan.end->y)
        return;
    write_heads(plan, leaves, target);
#pragma unroll 1
    for (u32 leaf = warp; leaf < leaves; leaf += warps) {
        uint2 head = plan.heads[leaf];
        u32 kind = head.x >> 24;
        if (kind == FILL)
            continue;
        u64 data = target + (u64)(head.x & 0xffffff) * UNIT;
        u32 words[4 * ROWS];
        read_block(words, granule + (u64)leaf * LEAF_BYTES);
        if (kind == RAW) {
            for (int row = 0; row < ROWS; row++) {
                const u32* four = words + 4 * row;
                in_global<uint4>(data)[lane_number() + 32 * row] = {four[0], four[1], four[2], four[3]};
            }
        } else {
            u64 escapes_at = target + (head.y & 0xffffff);
            u8* stage = end + 16 + warp * STAGE_BYTES;
            write_planes(data, escapes_at, plan.escapes[leaf], head.y >> 24, words, stage);
        }
    }
}

/// A code that is decoded.
struct Code {
    u64 at, bytes;
};

/// The head of a block. One outside of the code is of no kind.
template <typename Load>
INLINE uint2 head_at(const Code& code, u32 leaf)
{
    u64 at = 8 * (u64)leaf;
    return code.bytes >= at + 8 ? Load::two(code.at + at) : uint2{0xff000000, 0};
}

INLINE void fill(u64 data[LANE_WORDS], u32 word)
{
    // So that registers are occupied from here on, and not from where it is decided.
    asm volatile("" : "+r"(word));
    for (int nth = 0; nth < LANE_WORDS; nth++)
        data[nth] = word | (u64)word << 32;
}

/// Two values: their signs and mantissas, and their exponents.
INLINE u32 two_values(u32 bytes, u32 exponents)
{
    return bytes & 0x7f007f | (bytes & 0x800080) << 8 | exponents << 7;
}

/// A block of two planes and escapes, or zeros where they do not lie in the code.
template <typename Load>
INLINE void read_planes(u64 data[LANE_WORDS], const Code& code, u64 at, u32 high, u32 stage)
{
    u32 base = high >> 24;
    u64 escapes_at = high & 0xffffff;
    if (code.bytes < at + UNIT * BF16_UNITS || code.bytes < escapes_at)
        return fill(data, 0);
    uint2 plane[ROWS];
    for (int row = 0; row < ROWS; row++)
        plane[row] = Load::two(code.at + at + 8 * lane_number() + 256 * row);
    u32 codes[CODE_WORDS];
    for (int word = 0; word < CODE_WORDS; word++)
        codes[word] = Load::word(code.at + at + AT_CODES + 4 * lane_number() + 128 * word);
    u32 total = count_escapes(codes);
    u32 before = sum_before(total);
    if (code.bytes < escapes_at + total || total > ESCAPES_MAX)
        return fill(data, 0);
    // The words that hold the escapes, into shared memory.
    u64 escapes = code.at + escapes_at;
    u32 shift = escapes % 4, words = (total + shift + 3) / 4;
#pragma unroll 1
    for (u32 word = lane_number(); word < words; word += 32)
        ((u32*)(found + stage))[word] = Load::word(escapes - shift + 4 * (u64)word);
    __syncwarp();
    u32 escape = stage + shift + before;
    for (int row = 0; row < ROWS; row++) {
        u32 values[4];
        for (int pair = 0; pair < 4; pair++) {
            u32 exponents[2];
            for (int nth = 0; nth < 2; nth++) {
                int value = 8 * row + 2 * pair + nth, bit = 3 * value % 32;
                u32 word = codes[3 * value / 32];
                u32 distance = (bit > 29 ? __funnelshift_r(word, codes[3 * value / 32 + 1], bit) : word >> bit) & 7;
                bool is_escape = distance == ESCAPE;
                // Read in any case: no branch is needed, and there is room behind the last one.
                u32 next = found[escape];
                exponents[nth] = is_escape ? next : base - distance & 0xff;
                escape += is_escape;
            }
            u32 bytes = __byte_perm(pair < 2 ? plane[row].x : plane[row].y, 0, pair % 2 ? 0x4342 : 0x4140);
            values[pair] = two_values(bytes, exponents[0] | exponents[1] << 16);
        }
        data[2 * row] = values[0] | (u64)values[1] << 32;
        data[2 * row + 1] = values[2] | (u64)values[3] << 32;
    }
    // No lane writes the next block's escapes while another reads.
    __syncwarp();
}

/// A block, by its kind. What is not understood, or lies outside, is zeros.
template <typename Load>
INLINE void read_code(u64 data[LANE_WORDS], const Code& code, uint2 head, u32 stage)
{
    u64 at = (u64)(head.x & 0xffffff) * UNIT;
    u32 kind = head.x >> 24;
    if (kind == BF16) {
        read_planes<Load>(data, code, at, head.y, stage);
    } else if (kind == RAW && code.bytes >= at + UNIT * RAW_UNITS) {
        for (int row = 0; row < ROWS; row++) {
            ulonglong2 two = Load::row(code.at + at + 16 * lane_number() + 512 * row);
            data[2 * row] = two.x;
            data[2 * row + 1] = two.y;
        }
    } else {
        fill(data, kind == FILL ? head.y : 0);
    }
}

template <typename Load>
INLINE void decode(u64 granules, u64 digests, u32 leaves)
{
    auto [code_at, code_bytes, granule] = entry_of_block(granules);
    Code code = {code_at, code_bytes};
    u32 leaf = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 stage = 16 * leaves + 16 + leaf * STAGE_BYTES;
    if (leaf < leaves) {
        Lane lane = lane_of(CONSTANTS.leaf);
        uint2 next = head_at<Load>(code, leaf);
        do {
            uint2 head = next;
            if (leaf + warps < leaves)
                next = head_at<Load>(code, leaf + warps);
            u64 data[LANE_WORDS];
            read_code<Load>(data, code, head, stage);
            if (granule != 0) {
                ulonglong2* block = in_global<ulonglong2>(granule + (u64)leaf * LEAF_BYTES);
                for (int row = 0; row < ROWS; row++)
                    block[lane_number() + 32 * row] = {data[2 * row], data[2 * row + 1]};
            }
            u64 word = leaf_digest(lane, data, [](int) {});
            if (threadIdx.x % 16 == 0)
                *leaf_word(leaf) = word;
            leaf += warps;
        } while (leaf < leaves);
    }
    write_root(digests, leaves);
}

extern "C" __global__ void __launch_bounds__(1024, 1) poorwill_decode(u64 granules, u64 digests, u32 leaves)
{
    decode<Once>(granules, digests, leaves);
}

extern "C" __global__ void __launch_bounds__(1024, 1) poorwill_decode_host(u64 granules, u64 digests, u32 leaves)
{
    decode<Now>(granules, digests, leaves);
}
