//! The kernel that computes digests on a GPU.
//!
//! The functions here write one step of XXH3 each (Collet, the specification of xxHash), so a reader checks less
//! text. A loop over leaves has straight code for the four blocks of a leaf, and the root repeats most of the steps.
//! A stripe's contribution to the accumulators of its block depends on no other stripe, so sixteen are hashed side by
//! side. The file is committed; a test compares it with this code, and the tests of `poorwill-driver` run it against
//! `Digest::of`.
//!
//! The kernel computes version 1 of `poorwill_core::digest`. Words of that page and of the specification are used
//! here: leaf, root; stripe (64 bytes), block (16 stripes), secret, accumulator, scramble, merge. A lane is a thread
//! of a warp.

use std::fmt::Write as _;

use super::Ptx;

/// Where the file is.
pub(super) const FILE: &str = "crates/driver/src/cuda/digest/kernel.ptx";

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

/// Initial accumulators.
const START: [u64; 8] =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];

/// The default secret, as words.
const SECRET: [u64; 24] = [
    0xBE4B_A423_396C_FEB8,
    0x1CAD_21F7_2C81_017C,
    0xDB97_9083_E96D_D4DE,
    0x1F67_B3B7_A4A4_4072,
    0x78E5_C0CC_4EE6_79CB,
    0x2172_FFCC_7DD0_5A82,
    0x8E24_43F7_7446_08B8,
    0x4C26_3A81_E690_35E0,
    0xCB00_C391_BB52_283C,
    0xA32E_531B_8B65_D088,
    0x4EF9_0DA2_9748_6471,
    0xD8AC_DEA9_46EF_1938,
    0x3F34_9CE3_3F76_FAA8,
    0x1D4F_0BC7_C7BB_DCF9,
    0x3159_B4CD_4BE0_518A,
    0x6473_78D9_C97E_9FC8,
    0xC3EB_D334_83AC_C5EA,
    0xEB63_13FA_FFA0_81C5,
    0x49DA_F0B7_51DD_0D17,
    0x9E68_D429_2655_16D3,
    0xFCA1_477D_58BE_162B,
    0xCE31_D07A_D1B8_F88F,
    0x2804_1695_8F3A_CB45,
    0x7E40_4BBB_CAFB_D7AF,
];

/// Seeds of a leaf and of the root.
const SEEDS: [u64; 2] = [0, u64::from_le_bytes(*b"poorwil1")];

/// Blocks of a leaf.
const LEAF_BLOCKS: usize = 4;

// Offsets in the table of constants, in bytes: a part for each seed, then the start.
const AT_SCRAMBLE: usize = 128;
const AT_LAST: usize = 192;
const AT_LOW: usize = 256;
const AT_HIGH: usize = 320;
const PART_BYTES: usize = 384;
const AT_START: usize = 2 * PART_BYTES;

/// The file's text.
pub(super) fn text() -> String {
    let mut ptx = Ptx::default();
    ptx.0.push_str(HEAD);
    ptx.table();
    ptx.0.push_str("\n.extern .shared .align 16 .b8 found[];\n");
    ENTRIES.iter().for_each(|entry| ptx.entry(entry));
    ptx.0
}

/// An entry of the module; all entries have the same body.
struct Entry {
    name: &'static str,
    /// Maximum threads per block.
    threads: u32,
    /// Blocks to fit on a multiprocessor, which sets the registers per thread.
    resident: u32,
}

const ENTRIES: [Entry; 2] = [
    // Few threads, so that most of many blocks read while one warp of another computes a root.
    Entry { name: "poorwill_digest", threads: 64, resident: 8 },
    // Host memory is slow to reach, and there are often few granules: one block alone keeps many loads in flight.
    Entry { name: "poorwill_digest_host", threads: 512, resident: 1 },
];

const HEAD: &str = "\
// Digests of granules: version 1 of `poorwill_core::digest`, computed on a GPU.
//
// Written by `cargo xtask ptx`; the explanation of each step is in xtask/src/ptx/digest.rs.
//
// Two entries with the same body: `poorwill_digest` is for granules in memory of the device, `poorwill_digest_host`
// for granules in memory of the host. They differ in how many threads a block has.
//
// One thread block per granule. `granules` is an array of addresses, 16-byte aligned; `digests` one of 16 bytes for
// each, low word first. Both arrays and the granules may be host memory that is page-locked. A granule has `leaves`
// leaves of 4096 bytes: 15 at least, since shorter inputs of the root are hashed in another way. There is room for
// 16 * leaves + 16 bytes of dynamic shared memory. Threads of a block: a multiple of 32, up to what `maxntid` says.
//
// A warp reads a leaf, half a block at a time: 512 bytes that follow each other, 16 by each lane. Lane 4s+t has those
// of stripe s that belong to the accumulators 2t and 2t+1. What stripes add to accumulators is summed over the lanes
// behind each block; from there on the lower half of the warp has the accumulators 2t, and the upper one 2t+1, each of
// them four times. Merging, the lower half computes the digest's low word, and the upper one the high word. A lane
// reads the next leaf's bytes as soon as it is done with the same ones of this leaf.
//
// The loads are `cv`: memory of the host is read as it is now.
.version 7.0
.target sm_70
.address_size 64

";

const PARAMS: &str = "
    .param .u64 granules,
    .param .u64 digests,
    .param .u32 leaves
";

const BODY: &str = "\
{
    .reg .pred %done, %more, %mine, %first, %upper, %tail, %early, %inside;
    .reg .b32  %thread, %threads, %warps, %block, %leaves, %lane, %half, %group, %quarter, %leaf, %blocks, %rest;
    .reg .b32  %lo, %hi, %lo2, %hi2, %shared, %from, %to, %step, %end, %bytes, %stripe, %sixteenth;
    .reg .b64  %granules, %digests, %granule, %table, %keys, %own, %pair, %at, %offset;
    .reg .b64  %d<16>, %w<4>, %turn, %start, %k0, %k1, %mix0, %mix1, %add;
    .reg .b64  %p0, %p1, %acc, %x, %y, %word, %length;

    ld.param.u64 %granules, [granules];
    ld.param.u64 %digests, [digests];
    ld.param.u32 %leaves, [leaves];
    cvta.to.global.u64 %granules, %granules;
    cvta.to.global.u64 %digests, %digests;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %shared, found;
    mul.wide.u32 %at, %block, 8;
    add.u64 %at, %granules, %at;
    ld.global.cv.u64 %granule, [%at];
";

impl Ptx {
    /// The constants.
    pub(super) fn table(&mut self) {
        let mut words: Vec<u64> = Vec::new();
        for seed in SEEDS {
            let secret = secret(seed);
            words.extend(&secret);
            // The last stripe's keys, and the keys for merging the low and the high word, cross word borders.
            for from in [192 - 64 - 7, 11, 192 - 64 - 11] {
                words.extend((0..8).map(|nth| word_at(&secret, from + 8 * nth)));
            }
        }
        words.extend(START);
        self.0.push_str("// For leaves, then for the root: the secret; its words for the last stripe, for merging into the low word, for the\n");
        self.0.push_str("// high word. Then what accumulators begin with.\n");
        let _ = writeln!(self.0, ".const .align 16 .b64 constants[{}] = {{", words.len());
        let lines: Vec<String> = words
            .chunks(4)
            .map(|line| {
                line.iter()
                    .map(|word| format!("{word:#018X}").replace("0X", "0x"))
                    .collect::<Vec<_>>()
                    .join(", ")
            })
            .collect();
        let _ = writeln!(self.0, "    {}\n}};", lines.join(",\n    "));
    }

    /// The whole kernel, under one name.
    fn entry(&mut self, Entry { name, threads, resident }: &Entry) {
        let _ = write!(self.0, "\n.visible .entry {name}({PARAMS})\n");
        let _ = write!(self.0, ".maxntid {threads}, 1, 1\n.minnctapersm {resident}\n{BODY}");
        self.leaves();
        self.root();
        self.0.push_str("\nFINISHED:\n    ret;\n}\n");
    }

    /// Digests of all leaves, into shared memory.
    fn leaves(&mut self) {
        self.lane(0);
        let (low, high) = length_words(4096);
        self.op(&format!("selp.b64 %add, {high:#x}, {low:#x}, %upper"));
        self.note("The first leaf of this warp, if it has one, and where its digest goes.");
        self.op("shr.u32 %leaf, %thread, 5");
        self.op("shr.u32 %warps, %threads, 5");
        self.op("setp.ge.u32 %done, %leaf, %leaves");
        self.op("@%done bra ROOT");
        self.op("mul.wide.u32 %at, %leaf, 4096");
        self.op("add.u64 %at, %granule, %at");
        self.op("mul.wide.u32 %offset, %lane, 16");
        self.op("add.u64 %at, %at, %offset");
        self.op("shl.b32 %to, %leaf, 4");
        self.op("add.u32 %to, %shared, %to");
        self.op("shl.b32 %from, %half, 3");
        self.op("add.u32 %to, %to, %from");
        self.op("shl.b32 %step, %warps, 4");
        self.op("shl.b32 %bytes, %leaves, 4");
        self.op("add.u32 %end, %shared, %bytes");
        (0..LEAF_BLOCKS).for_each(|block| self.read(block, ""));
        self.label("LEAF");
        self.note("Whether there is a next leaf, which is read during this one.");
        self.op("add.u32 %from, %to, %step");
        self.op("setp.lt.u32 %more, %from, %end");
        self.op("mad.wide.u32 %at, %step, 256, %at");
        self.leaf_digest(|ptx, block| ptx.read(block, "@%more "));
        self.op("@%mine st.shared.u64 [%to], %word");
        self.op("add.u32 %to, %to, %step");
        self.op("@%more bra LEAF");
    }

    /// The digest of the leaf in registers, into `%word`. `used` is called when a block's registers are free again.
    pub(super) fn leaf_digest(&mut self, used: impl Fn(&mut Self, usize)) {
        self.op("mov.u64 %acc, %start");
        for block in 0..LEAF_BLOCKS {
            let is_last = block + 1 == LEAF_BLOCKS;
            self.note(&format!("Block {block}."));
            let [d0, d1, d2, d3] = data(block);
            self.accumulate([&d0, &d1], ["%w0", "%w1"], true, "");
            // The very last stripe has its own keys, and no stripe after it.
            let keys = if is_last { ["%k0", "%k1"] } else { ["%w2", "%w3"] };
            if is_last {
                self.last_keys(0);
            }
            self.accumulate([&d2, &d3], keys, false, "");
            used(self, block);
            self.gather();
            if !is_last {
                self.scramble();
            }
        }
        self.merge();
        self.avalanche();
    }

    /// One warp computes the digest of the leaves' digests and the length, by the steps of a leaf.
    pub(super) fn root(&mut self) {
        self.label("ROOT");
        self.note("The granule's length, behind the digests of its leaves.");
        self.op("shl.b32 %bytes, %leaves, 4");
        self.op("add.u32 %end, %shared, %bytes");
        self.op("mul.wide.u32 %length, %leaves, 4096");
        self.op("setp.eq.u32 %first, %thread, 0");
        self.op("@%first st.shared.u64 [%end], %length");
        self.op("bar.sync 0");
        self.op("setp.ge.u32 %done, %thread, 32");
        self.op("@%done bra FINISHED");

        self.note("Blocks that are full, then stripes, as many as begin before the last byte; then the last 64 bytes.");
        self.lane(PART_BYTES);
        self.op("mov.u64 %acc, %start");
        self.op("shl.b32 %from, %lane, 4");
        self.op("add.u32 %from, %shared, %from");
        self.op("add.u32 %rest, %bytes, 7");
        self.op("shr.u32 %blocks, %rest, 10");
        self.op("and.b32 %rest, %rest, 1023");
        self.op("shr.u32 %rest, %rest, 6");
        self.label("ROOT_BLOCK");
        self.op("setp.eq.u32 %done, %blocks, 0");
        self.op("@%done bra ROOT_STRIPES");
        self.op("ld.shared.v2.u64 {%d0, %d1}, [%from]");
        self.op("ld.shared.v2.u64 {%d2, %d3}, [%from+512]");
        self.accumulate(["%d0", "%d1"], ["%w0", "%w1"], true, "");
        self.accumulate(["%d2", "%d3"], ["%w2", "%w3"], false, "");
        self.gather();
        self.scramble();
        self.op("add.u32 %from, %from, 1024");
        self.op("sub.u32 %blocks, %blocks, 1");
        self.op("bra ROOT_BLOCK");

        self.label("ROOT_STRIPES");
        self.note("At most 15 stripes are left, so that the last 64 bytes take the place of the sixteenth.");
        self.op("mov.u64 %p0, 0");
        self.op("mov.u64 %p1, 0");
        self.op("setp.lt.u32 %early, %group, %rest");
        self.op("@%early ld.shared.v2.u64 {%d0, %d1}, [%from]");
        self.accumulate(["%d0", "%d1"], ["%w0", "%w1"], false, "@%early ");
        self.op("add.u32 %stripe, %group, 8");
        self.op("setp.lt.u32 %inside, %stripe, %rest");
        self.op("@%inside ld.shared.v2.u64 {%d2, %d3}, [%from+512]");
        self.accumulate(["%d2", "%d3"], ["%w2", "%w3"], false, "@%inside ");
        self.op("shl.b32 %from, %quarter, 4");
        self.op("add.u32 %from, %from, %end");
        self.op("@%tail ld.shared.u64 %d0, [%from+-56]");
        self.op("@%tail ld.shared.u64 %d1, [%from+-48]");
        self.last_keys(PART_BYTES);
        self.accumulate(["%d0", "%d1"], ["%k0", "%k1"], false, "@%tail ");
        self.gather();
        self.op("add.u32 %bytes, %bytes, 8");
        self.op("cvt.u64.u32 %length, %bytes");
        self.op(&format!("mul.lo.u64 %x, %length, {PRIME64_1:#x}"));
        self.op(&format!("mul.lo.u64 %y, %length, {PRIME64_2:#x}"));
        self.op("not.b64 %y, %y");
        self.op("selp.b64 %add, %y, %x, %upper");
        self.merge();
        self.avalanche();
        self.op("mul.wide.u32 %at, %block, 16");
        self.op("add.u64 %at, %digests, %at");
        self.op("mul.wide.u32 %offset, %half, 8");
        self.op("add.u64 %at, %at, %offset");
        self.op("@%mine st.global.u64 [%at], %word");
    }

    /// The number of this lane, and its words of a secret. Repeated for the root, so that no register is occupied
    /// during the leaves.
    pub(super) fn lane(&mut self, part: usize) {
        self.note("Which lane this is, and which stripes, accumulators and word are its.");
        self.op("mov.u32 %thread, %tid.x");
        self.op("and.b32 %lane, %thread, 31");
        self.op("shr.u32 %group, %lane, 2");
        self.op("and.b32 %quarter, %lane, 3");
        self.op("shr.u32 %half, %lane, 4");
        self.op("and.b32 %sixteenth, %lane, 15");
        self.op("setp.eq.u32 %tail, %group, 7");
        self.op("setp.eq.u32 %upper, %half, 1");
        self.op("setp.eq.u32 %mine, %sixteenth, 0");
        self.note("Its words of the secret: for its stripes, to scramble, to merge. And what accumulators begin with.");
        self.op("mov.u64 %table, constants");
        for (to, from, index, bytes) in [
            ("%table", "%table", "%quarter", 16),
            ("%keys", "%table", "%group", 8),
            ("%own", "%table", "%half", 8),
            ("%pair", "%table", "%half", AT_HIGH - AT_LOW),
        ] {
            self.op(&format!("mul.wide.u32 %offset, {index}, {bytes}"));
            self.op(&format!("add.u64 {to}, {from}, %offset"));
        }
        for (nth, at) in [0, 8, 64, 72].into_iter().enumerate() {
            self.op(&format!("ld.const.u64 %w{nth}, [%keys+{}]", part + at));
        }
        self.op(&format!("ld.const.u64 %turn, [%own+{}]", part + AT_SCRAMBLE));
        self.op(&format!("ld.const.v2.u64 {{%k0, %k1}}, [%pair+{}]", part + AT_LOW));
        self.op("selp.b64 %mix0, %k1, %k0, %upper");
        self.op("selp.b64 %mix1, %k0, %k1, %upper");
        self.op(&format!("ld.const.u64 %start, [%own+{AT_START}]"));
    }

    /// The keys of the second stripe of lanes, which differ if that is the very last stripe.
    pub(super) fn last_keys(&mut self, part: usize) {
        self.op("mov.u64 %k0, %w2");
        self.op("mov.u64 %k1, %w3");
        self.op(&format!("@%tail ld.const.v2.u64 {{%k0, %k1}}, [%table+{}]", part + AT_LAST));
    }

    /// Reads this lane's bytes of a leaf's block.
    pub(super) fn read(&mut self, block: usize, guard: &str) {
        let [d0, d1, d2, d3] = data(block);
        let at = 1024 * block;
        self.op(&format!("{guard}ld.global.cv.v2.u64 {{{d0}, {d1}}}, [%at+{at}]"));
        self.op(&format!("{guard}ld.global.cv.v2.u64 {{{d2}, {d3}}}, [%at+{}]", at + 512));
    }

    /// Adds two words to two sums: each to its neighbour's sum, and its product with the key to its own.
    pub(super) fn accumulate(
        &mut self,
        [d0, d1]: [&str; 2],
        [key0, key1]: [&str; 2],
        is_first: bool,
        guard: &str,
    ) {
        self.op(&format!("{guard}xor.b64 %x, {d0}, {key0}"));
        self.op(&format!("{guard}xor.b64 %y, {d1}, {key1}"));
        for (product, sum, neighbour) in [("%x", "%p0", d1), ("%y", "%p1", d0)] {
            self.op(&format!("{guard}mov.b64 {{%lo, %hi}}, {product}"));
            if is_first {
                self.op(&format!("{guard}mad.wide.u32 {sum}, %lo, %hi, {neighbour}"));
            } else {
                self.op(&format!("{guard}add.u64 {sum}, {sum}, {neighbour}"));
                self.op(&format!("{guard}mad.wide.u32 {sum}, %lo, %hi, {sum}"));
            }
        }
    }

    /// Sums the lanes into this lane's accumulator. First the halves of the warp exchange what belongs to the other.
    pub(super) fn gather(&mut self) {
        self.note("Sum over the lanes.");
        self.op("selp.b64 %y, %p0, %p1, %upper");
        self.op("selp.b64 %p0, %p1, %p0, %upper");
        self.swap("%y", 16);
        self.op("add.u64 %p0, %p0, %x");
        for distance in [8, 4] {
            self.swap("%p0", distance);
            self.op("add.u64 %p0, %p0, %x");
        }
        self.op("add.u64 %acc, %acc, %p0");
    }

    /// Reads a word of the lane at this distance, into `%x`.
    pub(super) fn swap(&mut self, word: &str, distance: u32) {
        self.op(&format!("mov.b64 {{%lo, %hi}}, {word}"));
        self.op(&format!("shfl.sync.bfly.b32 %lo2, %lo, {distance}, 31, 0xffffffff"));
        self.op(&format!("shfl.sync.bfly.b32 %hi2, %hi, {distance}, 31, 0xffffffff"));
        self.op("mov.b64 %x, {%lo2, %hi2}");
    }

    /// After a full block.
    pub(super) fn scramble(&mut self) {
        self.note("Scramble.");
        self.op("shr.u64 %x, %acc, 47");
        self.op("xor.b64 %acc, %acc, %x");
        self.op("xor.b64 %acc, %acc, %turn");
        self.op(&format!("mul.lo.u64 %acc, %acc, {PRIME32_1:#x}"));
    }

    /// The length's part, and the sum of the folded products of pairs of accumulators.
    pub(super) fn merge(&mut self) {
        self.note("Merge: both halves of the product of two accumulators, and the sum over the four pairs.");
        self.swap("%acc", 16);
        self.op("xor.b64 %x, %x, %mix1");
        self.op("xor.b64 %y, %acc, %mix0");
        self.op("mul.lo.u64 %word, %x, %y");
        self.op("mul.hi.u64 %x, %x, %y");
        self.op("xor.b64 %word, %word, %x");
        for distance in [1, 2] {
            self.swap("%word", distance);
            self.op("add.u64 %word, %word, %x");
        }
        self.op("add.u64 %word, %word, %add");
    }

    /// The final mixing of a word.
    pub(super) fn avalanche(&mut self) {
        self.note("Avalanche.");
        self.op("shr.u64 %x, %word, 37");
        self.op("xor.b64 %word, %word, %x");
        self.op(&format!("mul.lo.u64 %word, %word, {PRIME_AVALANCHE:#x}"));
        self.op("shr.u64 %x, %word, 32");
        self.op("xor.b64 %word, %word, %x");
    }
}

/// What the length of an input adds to the low and the high word.
pub(super) fn length_words(bytes: u64) -> (u64, u64) {
    (bytes.wrapping_mul(PRIME64_1), !bytes.wrapping_mul(PRIME64_2))
}

/// The registers of this lane's bytes of a leaf's block: two words of the first half, then two of the second.
pub(super) fn data(block: usize) -> [String; 4] {
    std::array::from_fn(|nth| format!("%d{}", 4 * block + nth))
}

/// The secret of a seed: words alternately gain and lose it.
fn secret(seed: u64) -> [u64; 24] {
    std::array::from_fn(|nth| {
        let word = SECRET[nth];
        if nth % 2 == 0 { word.wrapping_add(seed) } else { word.wrapping_sub(seed) }
    })
}

/// The word that starts at any byte.
fn word_at(secret: &[u64; 24], byte: usize) -> u64 {
    let bytes: Vec<u8> = secret.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[byte..byte + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_secret_may_begin_anywhere() {
        let secret = secret(0);
        assert_eq!([0, 8, 184].map(|byte| word_at(&secret, byte)), [secret[0], secret[1], secret[23]]);
        assert_eq!(word_at(&secret, 1), secret[0] >> 8 | secret[1] << 56);
    }
}
