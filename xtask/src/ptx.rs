//! `cargo xtask ptx`: writes the kernel that computes digests on a GPU, as PTX.
//!
//! The kernel is straight code for most of its length: sixteen loads, sixteen steps of the hash, each with other words
//! of the secret. It is written by the functions here, one for each step of XXH3 (Collet, the specification of xxHash),
//! so that what a reader checks is short. The file is committed; a test holds the two together, and the tests of
//! `poorwill-driver` run the text against `Digest::of`.
//!
//! What the kernel computes is version 1 of `poorwill_core::digest`. The words of that page and of the specification
//! are used here: leaf, root; stripe (64 bytes), block (16 stripes), secret, accumulator, scramble, merge.

use std::fmt::Write as _;
use std::fs;

use crate::steps::{Failure, say, workspace_root};

/// Where the file is.
pub(crate) const FILE: &str = "crates/driver/src/cuda/digest/kernel.ptx";

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const PRIME_AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

/// What the accumulators begin with.
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

/// Stripes of a block, since the secret is 192 bytes long.
const STRIPES: usize = 16;

// Where things are in the table of constants, in bytes: a part for each seed, behind them the start.
const AT_LAST: usize = 192;
const AT_LOW: usize = 256;
const AT_HIGH: usize = 320;
const PART_BYTES: usize = 384;
const AT_START: usize = 2 * PART_BYTES;

pub(crate) fn run() -> Result<(), Failure> {
    let path = workspace_root().join(FILE);
    fs::write(&path, text()).map_err(|cause| Failure::File { path, cause })?;
    say(&format!("xtask ptx: wrote {FILE}"));
    Ok(())
}

/// The file.
pub(crate) fn text() -> String {
    let mut ptx = Ptx(String::new());
    ptx.0.push_str(HEAD);
    ptx.table();
    ptx.0.push_str(ENTRY);
    ptx.leaves();
    ptx.root();
    ptx.0.push_str("\nFINISHED:\n    ret;\n}\n");
    ptx.0
}

const HEAD: &str = "\
// Digests of granules: version 1 of `poorwill_core::digest`, computed on a GPU.
//
// Written by `cargo xtask ptx`; the explanation of each step is in xtask/src/ptx.rs.
//
// One thread block per granule. `granules` is an array of addresses, 16-byte aligned; `digests` one of 16 bytes for
// each, low word first. Both arrays and the granules may be host memory that is page-locked. A granule has `leaves`
// leaves of 4096 bytes: 15 at least, since shorter inputs of the root are hashed in another way. There is room for
// 16 * leaves + 16 bytes of dynamic shared memory. Threads of a block: a multiple of 32, up to 256.
//
// Four threads share a leaf. Thread t of them has the accumulators 2t and 2t+1, so it needs 16 bytes of each stripe
// of 64, and of the secret the words 2t to 2t+17. The loads are `cv`: memory of the host is read as it is now.
.version 7.0
.target sm_70
.address_size 64

";

const ENTRY: &str = "
.extern .shared .align 16 .b8 found[];

.visible .entry poorwill_digest(
    .param .u64 granules,
    .param .u64 digests,
    .param .u32 leaves
)
.maxntid 256, 1, 1
.minnctapersm 2
{
    .reg .pred %done, %last, %mine, %inside;
    .reg .b32  %thread, %threads, %block, %leaves, %quarter, %base, %leaf, %here, %top, %blocks, %rest;
    .reg .b32  %lo, %hi, %lo2, %hi2, %shared, %from, %bytes;
    .reg .b64  %granules, %digests, %granule, %table, %key, %at, %offset;
    .reg .b64  %w<18>, %d<32>, %last0, %last1, %start0, %start1, %acc0, %acc1;
    .reg .b64  %k0, %k1, %x, %y, %low, %high, %length;

    ld.param.u64 %granules, [granules];
    ld.param.u64 %digests, [digests];
    ld.param.u32 %leaves, [leaves];
    cvta.to.global.u64 %granules, %granules;
    cvta.to.global.u64 %digests, %digests;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %at, %block, 8;
    add.u64 %at, %granules, %at;
    ld.global.cv.u64 %granule, [%at];

    // Which of the four this thread is, and what of stripes and secrets is its.
    and.b32 %quarter, %thread, 3;
    mul.wide.u32 %offset, %quarter, 16;
    add.u64 %granule, %granule, %offset;
    mov.u64 %table, constants;
    add.u64 %table, %table, %offset;
    mov.u32 %shared, found;
    sub.u32 %top, %leaves, 1;
    mov.u32 %base, 0;
";

struct Ptx(String);

impl Ptx {
    fn op(&mut self, text: &str) {
        // A `String` takes all that is written to it.
        let _ = writeln!(self.0, "    {text};");
    }

    fn note(&mut self, text: &str) {
        let _ = writeln!(self.0, "\n    // {text}");
    }

    fn label(&mut self, name: &str) {
        let _ = writeln!(self.0, "\n{name}:");
    }

    /// What the kernel looks up, 16 bytes for each thread of the four at a time.
    fn table(&mut self) {
        let mut words: Vec<u64> = Vec::new();
        for seed in SEEDS {
            let secret = secret(seed);
            words.extend(&secret);
            // The last stripe's keys, and those that merge into the low and the high word, lie across words.
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

    /// Digests of all leaves, into shared memory.
    fn leaves(&mut self) {
        self.secret(0);
        self.op(&format!("ld.const.v2.u64 {{%start0, %start1}}, [%table+{AT_START}]"));
        self.label("LEAVES");
        self.note("Threads behind the last leaf read it once more, and keep nothing of it.");
        self.op("shr.u32 %leaf, %thread, 2");
        self.op("add.u32 %leaf, %leaf, %base");
        self.op("min.u32 %here, %leaf, %top");
        self.op("mul.wide.u32 %at, %here, 4096");
        self.op("add.u64 %at, %granule, %at");
        self.op("mov.u64 %acc0, %start0");
        self.op("mov.u64 %acc1, %start1");
        self.op("mov.u32 %blocks, 0");
        self.label("BLOCK");
        for stripe in 0..STRIPES {
            let (d0, d1) = (2 * stripe, 2 * stripe + 1);
            self.op(&format!("ld.global.cv.v2.u64 {{%d{d0}, %d{d1}}}, [%at+{}]", 64 * stripe));
        }
        for stripe in 0..STRIPES - 1 {
            self.stripe(stripe);
        }
        self.note("The last stripe of all has keys of its own, and nothing behind it.");
        self.op("setp.eq.u32 %last, %blocks, 3");
        self.op("selp.b64 %k0, %last0, %w15, %last");
        self.op("selp.b64 %k1, %last1, %w16, %last");
        self.accumulate("%d30", "%d31", "%k0", "%k1");
        self.op("@%last bra LEAF");
        self.scramble();
        self.op("add.u64 %at, %at, 1024");
        self.op("add.u32 %blocks, %blocks, 1");
        self.op("bra BLOCK");
        self.label("LEAF");
        self.merge(0);
        let bytes = 4096_u64;
        self.op(&format!("add.u64 %low, %low, {:#x}", bytes.wrapping_mul(PRIME64_1)));
        self.op(&format!("add.u64 %high, %high, {:#x}", !bytes.wrapping_mul(PRIME64_2)));
        self.avalanche();
        self.op("setp.lt.u32 %inside, %leaf, %leaves");
        self.op("setp.eq.u32 %mine, %quarter, 0");
        self.op("and.pred %mine, %mine, %inside");
        self.op("shl.b32 %from, %leaf, 4");
        self.op("add.u32 %from, %shared, %from");
        self.op("@%mine st.shared.v2.u64 [%from], {%low, %high}");
        self.op("shr.u32 %rest, %threads, 2");
        self.op("add.u32 %base, %base, %rest");
        self.op("setp.lt.u32 %inside, %base, %leaves");
        self.op("@%inside bra LEAVES");
    }

    /// The digest of the leaves' digests and the length, by one warp, each four of whose threads do the same.
    fn root(&mut self) {
        self.note("The granule's length, behind the digests of its leaves.");
        self.op("shl.b32 %bytes, %leaves, 4");
        self.op("add.u32 %from, %shared, %bytes");
        self.op("mul.wide.u32 %length, %leaves, 4096");
        self.op("setp.eq.u32 %mine, %thread, 0");
        self.op("@%mine st.shared.u64 [%from], %length");
        self.op("bar.sync 0");
        self.op("setp.ge.u32 %done, %thread, 32");
        self.op("@%done bra FINISHED");

        self.note("Blocks that are full, then stripes, as many as begin before the last byte; then the last 64 bytes.");
        self.secret(PART_BYTES);
        self.op("mov.u64 %acc0, %start0");
        self.op("mov.u64 %acc1, %start1");
        self.op("shl.b32 %from, %quarter, 4");
        self.op("add.u32 %from, %shared, %from");
        self.op("add.u32 %top, %bytes, 7");
        self.op("shr.u32 %blocks, %top, 10");
        self.op("and.b32 %rest, %top, 1023");
        self.op("shr.u32 %rest, %rest, 6");
        self.label("ROOT_BLOCK");
        self.op("setp.eq.u32 %done, %blocks, 0");
        self.op("@%done bra ROOT_STRIPES");
        for stripe in 0..STRIPES {
            let (d0, d1) = (2 * stripe, 2 * stripe + 1);
            self.op(&format!("ld.shared.v2.u64 {{%d{d0}, %d{d1}}}, [%from+{}]", 64 * stripe));
        }
        (0..STRIPES).for_each(|stripe| self.stripe(stripe));
        self.scramble();
        self.op("add.u32 %from, %from, 1024");
        self.op("sub.u32 %blocks, %blocks, 1");
        self.op("bra ROOT_BLOCK");

        self.label("ROOT_STRIPES");
        self.op(&format!("add.u64 %key, %table, {PART_BYTES}"));
        self.label("ROOT_STRIPE");
        self.op("setp.eq.u32 %done, %rest, 0");
        self.op("@%done bra ROOT_LAST");
        self.op("ld.shared.v2.u64 {%d0, %d1}, [%from]");
        self.op("ld.const.u64 %k0, [%key]");
        self.op("ld.const.u64 %k1, [%key+8]");
        self.accumulate("%d0", "%d1", "%k0", "%k1");
        self.op("add.u32 %from, %from, 64");
        self.op("add.u64 %key, %key, 8");
        self.op("sub.u32 %rest, %rest, 1");
        self.op("bra ROOT_STRIPE");

        self.label("ROOT_LAST");
        self.op("shl.b32 %from, %quarter, 4");
        self.op("add.u32 %from, %from, %bytes");
        self.op("add.u32 %from, %shared, %from");
        self.op("ld.shared.u64 %d0, [%from+-56]");
        self.op("ld.shared.u64 %d1, [%from+-48]");
        self.accumulate("%d0", "%d1", "%last0", "%last1");
        self.merge(PART_BYTES);
        self.op("add.u32 %bytes, %bytes, 8");
        self.op("cvt.u64.u32 %length, %bytes");
        self.op(&format!("mul.lo.u64 %x, %length, {PRIME64_1:#x}"));
        self.op("add.u64 %low, %low, %x");
        self.op(&format!("mul.lo.u64 %x, %length, {PRIME64_2:#x}"));
        self.op("not.b64 %x, %x");
        self.op("add.u64 %high, %high, %x");
        self.avalanche();
        self.op("mul.wide.u32 %at, %block, 16");
        self.op("add.u64 %at, %digests, %at");
        self.op("@%mine st.global.v2.u64 [%at], {%low, %high}");
    }

    /// This thread's words of a secret.
    fn secret(&mut self, part: usize) {
        self.note("The words of the secret that this thread needs.");
        for word in (0..18).step_by(2) {
            let at = part + 8 * word;
            self.op(&format!("ld.const.v2.u64 {{%w{word}, %w{}}}, [%table+{at}]", word + 1));
        }
        self.op(&format!("ld.const.v2.u64 {{%last0, %last1}}, [%table+{}]", part + AT_LAST));
    }

    /// A stripe of a block whose bytes are in registers.
    fn stripe(&mut self, nth: usize) {
        self.note(&format!("Stripe {nth}."));
        let [d0, d1] = [2 * nth, 2 * nth + 1].map(|nth| format!("%d{nth}"));
        let [w0, w1] = [nth, nth + 1].map(|nth| format!("%w{nth}"));
        self.accumulate(&d0, &d1, &w0, &w1);
    }

    /// Two words into two accumulators: each is added to the neighbour's, and with its key multiplied into its own.
    fn accumulate(&mut self, d0: &str, d1: &str, key0: &str, key1: &str) {
        self.op(&format!("xor.b64 %x, {d0}, {key0}"));
        self.op(&format!("xor.b64 %y, {d1}, {key1}"));
        self.op(&format!("add.u64 %acc0, %acc0, {d1}"));
        self.op(&format!("add.u64 %acc1, %acc1, {d0}"));
        for (product, acc) in [("%x", "%acc0"), ("%y", "%acc1")] {
            self.op(&format!("mov.b64 {{%lo, %hi}}, {product}"));
            self.op(&format!("mad.wide.u32 {acc}, %lo, %hi, {acc}"));
        }
    }

    /// Behind a full block.
    fn scramble(&mut self) {
        self.note("Scramble.");
        for (acc, word) in [("%acc0", "%w16"), ("%acc1", "%w17")] {
            self.op(&format!("shr.u64 %x, {acc}, 47"));
            self.op(&format!("xor.b64 {acc}, {acc}, %x"));
            self.op(&format!("xor.b64 {acc}, {acc}, {word}"));
            self.op(&format!("mul.lo.u64 {acc}, {acc}, {PRIME32_1:#x}"));
        }
    }

    /// The sums over the four threads of their accumulators' folded products; without what depends on the length.
    fn merge(&mut self, part: usize) {
        self.note("Merge: both halves of the product of a thread's two accumulators, and the sum over the four threads.");
        for (sum, at) in [("%low", AT_LOW), ("%high", AT_HIGH)] {
            self.op(&format!("ld.const.v2.u64 {{%k0, %k1}}, [%table+{}]", part + at));
            self.op("xor.b64 %k0, %k0, %acc0");
            self.op("xor.b64 %k1, %k1, %acc1");
            self.op("mul.lo.u64 %x, %k0, %k1");
            self.op("mul.hi.u64 %y, %k0, %k1");
            self.op(&format!("xor.b64 {sum}, %x, %y"));
        }
        for sum in ["%low", "%high"] {
            for distance in [1, 2] {
                self.op(&format!("mov.b64 {{%lo, %hi}}, {sum}"));
                self.op(&format!("shfl.sync.bfly.b32 %lo2, %lo, {distance}, 31, 0xffffffff"));
                self.op(&format!("shfl.sync.bfly.b32 %hi2, %hi, {distance}, 31, 0xffffffff"));
                self.op("mov.b64 %x, {%lo2, %hi2}");
                self.op(&format!("add.u64 {sum}, {sum}, %x"));
            }
        }
    }

    /// The last mixing of both words.
    fn avalanche(&mut self) {
        self.note("Avalanche.");
        for word in ["%low", "%high"] {
            self.op(&format!("shr.u64 %x, {word}, 37"));
            self.op(&format!("xor.b64 {word}, {word}, %x"));
            self.op(&format!("mul.lo.u64 {word}, {word}, {PRIME_AVALANCHE:#x}"));
            self.op(&format!("shr.u64 %x, {word}, 32"));
            self.op(&format!("xor.b64 {word}, {word}, %x"));
        }
    }
}

/// The secret of a seed: words take turns in gaining and losing it.
fn secret(seed: u64) -> [u64; 24] {
    std::array::from_fn(|nth| {
        let word = SECRET[nth];
        if nth % 2 == 0 { word.wrapping_add(seed) } else { word.wrapping_sub(seed) }
    })
}

/// The word that begins at any byte.
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
    fn the_committed_kernel_is_what_is_written_here() {
        let committed = fs::read_to_string(workspace_root().join(FILE)).unwrap();
        assert!(committed == text(), "{FILE} is another one: run `cargo xtask ptx`");
    }

    #[test]
    fn words_of_the_secret_may_begin_anywhere() {
        let secret = secret(0);
        assert_eq!([0, 8, 184].map(|byte| word_at(&secret, byte)), [secret[0], secret[1], secret[23]]);
        assert_eq!(word_at(&secret, 1), secret[0] >> 8 | secret[1] << 56);
    }
}
