//! The kernels that encode and decode granules on a GPU: version 1 of `poorwill_core::codec`.
//!
//! A warp has a block. Its lanes have the bytes that they have in a digest's leaf: 16 of each 512. So the decoder
//! digests a block from its registers, and nothing is read twice.
//!
//! Words of `docs/codec.md` are used here: head, unit, plane, row, base, escape. A lane is a thread of a warp.

use std::fmt::Write as _;

use super::Ptx;
use super::digest;

/// Where the file is.
pub(super) const FILE: &str = "crates/driver/src/cuda/codec/kernel.ptx";

const ROWS: usize = 8;
/// Words of 32 bits with a lane's codes.
const CODE_WORDS: usize = 6;
/// Where the codes begin in a block's data, in bytes.
const AT_CODES: usize = 2048;
const PLANES_UNITS: usize = 22;
const RAW_UNITS: usize = 32;
const ESCAPES_MAX: usize = 1279;
const FILL: usize = 0;
const RAW: usize = 1;
const BF16: usize = 2;

/// Every third bit of sixteen codes.
const FIRST_BITS: &str = "0x249249249249";
/// Distances below the largest exponent: those above a base, which is up to 3 below it, and those that no code has.
const THRESHOLDS: [u32; 7] = [1, 2, 3, 7, 8, 9, 10];

/// Shared memory of a warp for escapes, and three bytes in front of the first.
const STAGE_BYTES: usize = 1296;

/// The file's text.
pub(super) fn text() -> String {
    let mut ptx = Ptx::default();
    ptx.0.push_str(HEAD);
    ptx.table();
    ptx.0.push_str("\n.extern .shared .align 16 .b8 found[];\n");
    ptx.encode();
    ptx.decode("poorwill_decode", "cs");
    ptx.decode("poorwill_decode_host", "cv");
    ptx.0
}

const HEAD: &str = "\
// Codes of granules: version 1 of `poorwill_core::codec`, and digests of what is decoded.
//
// Written by `cargo xtask ptx`; the explanation of each step is in xtask/src/ptx/codec.rs.
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
// and their digests, 16 bytes each, low word first. `granules` is an array of 32
// bytes each: the address of the code, its bytes (a multiple of 16), the address of the granule or 0 for its digest
// alone, nothing. A granule has 15 leaves at least. There is room for 16 * leaves + 16 bytes, and 1296 for each warp.
//
// The loads from memory of the host are `cv`: it is read as it is now. On an H100, such loads of the device's memory
// take several times as long as `cs`.
.version 7.0
.target sm_70
.address_size 64

";

const ENCODE: &str = "
.visible .entry poorwill_encode(
    .param .u64 granules,
    .param .u64 sizes,
    .param .u32 leaves
)
.maxntid 1024, 1, 1
.minnctapersm 1
{
    .reg .pred %done, %more, %first, %is, %is_raw, %is_fill, %is_planes, %b<5>;
    .reg .b32  %thread, %threads, %warps, %warp, %block, %leaves, %lane, %leaf, %other, %shared, %counts, %stage;
    .reg .b32  %pattern, %differ, %largest, %e, %c, %r0, %r1, %rest0, %rest1, %low, %high, %kind, %base, %escapes;
    .reg .b32  %units, %best, %next, %slot, %total, %before, %esc, %limit, %padded, %shift, %at_shared;
    .reg .b32  %w<32>, %code<6>, %count<7>;
    .reg .b64  %granules, %sizes, %granule, %target, %target_bytes, %at, %offset, %head, %x, %y, %data, %plane;
    .reg .b64  %d<16>, %bytes;
";

const DECODE: &str = "(
    .param .u64 granules,
    .param .u64 digests,
    .param .u32 leaves
)
.maxntid 1024, 1, 1
.minnctapersm 1
{
    .reg .pred %done, %more, %mine, %first, %upper, %tail, %early, %inside, %is, %is_escape, %stored, %b<5>;
    .reg .b32  %thread, %threads, %warps, %block, %leaves, %lane, %half, %group, %quarter, %leaf, %blocks, %rest;
    .reg .b32  %lo, %hi, %lo2, %hi2, %shared, %from, %to, %step, %end, %bytes, %stripe, %sixteenth;
    .reg .b32  %stage, %low, %high, %next_low, %next_high, %kind, %base, %c, %e, %e2, %two, %other;
    .reg .b32  %total, %before, %esc, %words, %word_at, %word_base, %value, %shift;
    .reg .b32  %code<6>, %v<4>;
    .reg .b64  %granules, %digests, %granule, %table, %keys, %own, %pair, %at, %offset, %code_at, %code_bytes;
    .reg .b64  %data, %plane, %escapes_at, %head_at, %limit;
    .reg .b64  %d<16>, %r<8>, %w<4>, %turn, %start, %k0, %k1, %mix0, %mix1, %add;
    .reg .b64  %p0, %p1, %acc, %x, %y, %word, %length;
";

impl Ptx {
    /// The predicates of a lane's bits, for sums over the lanes before it.
    fn bits_of_lane(&mut self) {
        for (nth, distance) in [1, 2, 4, 8, 16].into_iter().enumerate() {
            self.op(&format!("and.b32 %other, %lane, {distance}"));
            self.op(&format!("setp.ne.u32 %b{nth}, %other, 0"));
        }
    }

    /// `%before` is the sum of `%total` over the lanes before this one; `%total` becomes the sum over all.
    fn sum_before(&mut self) {
        self.op("mov.u32 %before, 0");
        for (nth, distance) in [1, 2, 4, 8, 16].into_iter().enumerate() {
            self.op(&format!("shfl.sync.bfly.b32 %other, %total, {distance}, 31, 0xffffffff"));
            self.op(&format!("@%b{nth} add.u32 %before, %before, %other"));
            self.op("add.u32 %total, %total, %other");
        }
    }

    /// A value of all lanes, by an operation that keeps order irrelevant.
    fn over_lanes(&mut self, op: &str, register: &str) {
        for distance in [16, 8, 4, 2, 1] {
            self.op(&format!("shfl.sync.bfly.b32 %other, {register}, {distance}, 31, 0xffffffff"));
            self.op(&format!("{op} {register}, {register}, %other"));
        }
    }

    /// Counts the escapes among a lane's codes.
    fn count_escapes(&mut self, to: &str) {
        self.op(&format!("mov.u32 {to}, 0"));
        for (low, high, shift) in [(0, 1, 0), (1, 2, 16), (3, 4, 0), (4, 5, 16)] {
            self.op(&format!("mov.b64 %x, {{%code{low}, %code{high}}}"));
            if shift > 0 {
                self.op(&format!("shr.u64 %x, %x, {shift}"));
            }
            self.ops(
                "shr.u64 %y, %x, 1
                and.b64 %y, %y, %x
                shr.u64 %x, %x, 2
                and.b64 %y, %y, %x",
            );
            self.op(&format!("and.b64 %y, %y, {FIRST_BITS}"));
            self.op("popc.b64 %other, %y");
            self.op(&format!("add.u32 {to}, {to}, %other"));
        }
    }

    /// The entry of this thread block: read once, since the array is in memory of the host.
    fn entry_of_block(&mut self, first: &str, second: &str, third: &str) {
        self.op("setp.eq.u32 %first, %thread, 0");
        self.ops(
            "mul.wide.u32 %at, %block, 32
            add.u64 %at, %granules, %at
            @%first ld.global.cv.v2.u64 {%x, %y}, [%at]
            @%first ld.global.cv.u64 %offset, [%at+16]
            @%first st.shared.v2.u64 [%shared], {%x, %y}
            @%first st.shared.u64 [%shared+16], %offset
            bar.sync 0",
        );
        self.op(&format!("ld.shared.v2.u64 {{{first}, {second}}}, [%shared]"));
        self.op(&format!("ld.shared.u64 {third}, [%shared+16]"));
        self.op("bar.sync 0");
    }

    fn encode(&mut self) {
        self.0.push_str(ENCODE);
        self.ops(
            "ld.param.u64 %granules, [granules]
            ld.param.u64 %sizes, [sizes]
            ld.param.u32 %leaves, [leaves]
            cvta.to.global.u64 %granules, %granules
            cvta.to.global.u64 %sizes, %sizes
            mov.u32 %thread, %tid.x
            mov.u32 %threads, %ntid.x
            mov.u32 %block, %ctaid.x
            mov.u32 %shared, found
            and.b32 %lane, %thread, 31
            shr.u32 %warp, %thread, 5
            shr.u32 %warps, %threads, 5",
        );
        self.bits_of_lane();
        self.note("In shared memory: heads, escapes of each block, the code's end and length, a stage for each warp.");
        self.ops(
            "shl.b32 %other, %leaves, 3
            add.u32 %counts, %shared, %other
            shl.b32 %other, %leaves, 2
            add.u32 %slot, %counts, %other
            add.u32 %slot, %slot, 15
            and.b32 %slot, %slot, 0xfffffff0",
        );
        self.op(&format!("mul.lo.u32 %stage, %warp, {STAGE_BYTES}"));
        self.op("add.u32 %stage, %stage, %slot");
        self.op("add.u32 %stage, %stage, 16");
        self.entry_of_block("%granule", "%target", "%target_bytes");
        self.plans();
        self.places();
        self.heads();
        self.blocks();
        self.0.push_str("\nFINISHED:\n    ret;\n}\n");
    }

    /// This lane's bytes of a block.
    fn raw(&mut self) {
        self.ops(
            "mul.wide.u32 %at, %leaf, 4096
            add.u64 %at, %granule, %at
            ld.global.cs.u32 %pattern, [%at]
            mul.wide.u32 %offset, %lane, 16
            add.u64 %at, %at, %offset",
        );
        for row in 0..ROWS {
            self.op(&format!(
                "ld.global.cs.v2.u64 {{%d{}, %d{}}}, [%at+{}]",
                2 * row,
                2 * row + 1,
                512 * row
            ));
        }
        for (nth, word) in (0..16).map(|nth| (nth, 2 * nth)) {
            self.op(&format!("mov.b64 {{%w{word}, %w{}}}, %d{nth}", word + 1));
        }
    }

    /// How each block is stored, into shared memory.
    fn plans(&mut self) {
        self.op("mov.u32 %leaf, %warp");
        self.op("setp.ge.u32 %done, %leaf, %leaves");
        self.op("@%done bra PLANNED");
        self.label("PLAN");
        self.raw();
        self.note("Whether all words are equal, and the largest exponent.");
        self.op("mov.u32 %differ, 0");
        self.op("mov.u32 %largest, 0");
        for word in 0..32 {
            self.op(&format!("xor.b32 %c, %w{word}, %pattern"));
            self.op("or.b32 %differ, %differ, %c");
            for from in [7, 23] {
                self.op(&format!("bfe.u32 %e, %w{word}, {from}, 8"));
                self.op("max.u32 %largest, %largest, %e");
            }
        }
        self.over_lanes("or.b32", "%differ");
        self.over_lanes("max.u32", "%largest");
        self.note("How many exponents lie at least so far below the largest, 128 for each. Four at a time, a byte each.");
        for count in 0..THRESHOLDS.len() {
            self.op(&format!("mov.u32 %count{count}, 0"));
        }
        self.op("mul.lo.u32 %e, %largest, 0x1010101");
        for word in (0..32).step_by(2) {
            self.op(&format!("shl.b32 %r0, %w{word}, 1"));
            self.op(&format!("shl.b32 %r1, %w{}, 1", word + 1));
            // No byte of the difference borrows: none is negative.
            self.ops(
                "prmt.b32 %c, %r0, %r1, 0x7531
                sub.u32 %c, %e, %c
                or.b32 %other, %c, 0x80808080",
            );
            for (count, threshold) in THRESHOLDS.into_iter().enumerate() {
                self.op(&format!("sub.u32 %next, %other, {:#x}", threshold * 0x0101_0101));
                self.op("or.b32 %next, %next, %c");
                self.op("and.b32 %next, %next, 0x80808080");
                self.op(&format!("dp4a.u32.u32 %count{count}, %next, 0x1010101, %count{count}"));
            }
        }
        self.note("Two counts in a word, summed over the lanes.");
        for count in 0..THRESHOLDS.len() {
            self.op(&format!("shr.u32 %count{count}, %count{count}, 7"));
        }
        for low in (0..THRESHOLDS.len()).step_by(2) {
            let high = low + 1;
            if high < THRESHOLDS.len() {
                self.op(&format!("shl.b32 %count{high}, %count{high}, 16"));
                self.op(&format!("or.b32 %count{low}, %count{low}, %count{high}"));
            }
            self.over_lanes("add.u32", &format!("%count{low}"));
            if high < THRESHOLDS.len() {
                self.op(&format!("shr.u32 %count{high}, %count{low}, 16"));
                self.op(&format!("and.b32 %count{low}, %count{low}, 0xffff"));
            }
        }
        self.note("The base with the fewest escapes: the largest exponent, or up to 3 below it.");
        self.op("mov.u32 %best, %count3");
        self.op("mov.u32 %shift, 0");
        for shift in 1..4 {
            // Those too far below this base, and all that are not below the largest of those above it.
            self.op(&format!("add.u32 %next, %count{}, 2048", shift + 3));
            self.op(&format!("sub.u32 %next, %next, %count{}", shift - 1));
            self.op("setp.lt.u32 %is, %next, %best");
            self.op("@%is mov.u32 %best, %next");
            self.op(&format!("@%is mov.u32 %shift, {shift}"));
        }
        self.ops(
            "sub.u32 %base, %largest, %shift
            setp.eq.u32 %is_fill, %differ, 0",
        );
        self.op(&format!("setp.ge.u32 %is_raw, %best, {}", ESCAPES_MAX + 1));
        self.note("Low: units and kind. High: the word, or the base.");
        self.op(&format!("mov.u32 %low, {:#x}", BF16 << 24 | PLANES_UNITS));
        self.op("shl.b32 %high, %base, 24");
        self.op(&format!("@%is_raw mov.u32 %low, {:#x}", RAW << 24 | RAW_UNITS));
        self.op("@%is_raw mov.u32 %high, 0");
        self.op("@%is_raw mov.u32 %best, 0");
        self.op(&format!("@%is_fill mov.u32 %low, {FILL}"));
        self.op("@%is_fill mov.u32 %high, %pattern");
        self.op("@%is_fill mov.u32 %best, 0");
        self.ops(
            "setp.eq.u32 %first, %lane, 0
            mov.b64 %head, {%low, %high}
            shl.b32 %at_shared, %leaf, 3
            add.u32 %at_shared, %shared, %at_shared
            @%first st.shared.u64 [%at_shared], %head
            shl.b32 %at_shared, %leaf, 2
            add.u32 %at_shared, %counts, %at_shared
            @%first st.shared.u32 [%at_shared], %best
            add.u32 %leaf, %leaf, %warps
            setp.lt.u32 %more, %leaf, %leaves
            @%more bra PLAN",
        );
    }

    /// One warp gives each block its place, and finds the length.
    fn places(&mut self) {
        self.label("PLANNED");
        self.ops(
            "bar.sync 0
            setp.ge.u32 %done, %thread, 32
            @%done bra PLACED",
        );
        self.note("Units of all blocks, and where escapes begin.");
        self.ops(
            "add.u32 %padded, %leaves, 15
            and.b32 %padded, %padded, 0xfffffff0
            mov.u32 %total, 0
            mov.u32 %leaf, %lane",
        );
        self.label("UNITS");
        self.ops(
            "setp.lt.u32 %is, %leaf, %leaves
            shl.b32 %at_shared, %leaf, 3
            add.u32 %at_shared, %shared, %at_shared
            @%is ld.shared.u32 %units, [%at_shared]
            @%is and.b32 %units, %units, 0xffffff
            @%is add.u32 %total, %total, %units
            add.u32 %leaf, %leaf, 32
            sub.u32 %other, %leaf, %lane
            setp.lt.u32 %more, %other, %leaves
            @%more bra UNITS",
        );
        self.over_lanes("add.u32", "%total");
        self.ops(
            "shr.u32 %units, %padded, 4
            add.u32 %other, %total, %units
            shl.b32 %escapes, %other, 7
            mov.u32 %leaf, %lane
            mov.u32 %limit, %units",
        );
        self.label("PLACE");
        self.note("`%limit` has the next block's unit, `%escapes` where its escapes begin.");
        self.ops(
            "setp.lt.u32 %is, %leaf, %leaves
            shl.b32 %at_shared, %leaf, 3
            add.u32 %at_shared, %shared, %at_shared
            mov.u32 %low, 0
            @%is ld.shared.v2.u32 {%low, %high}, [%at_shared]
            shr.u32 %kind, %low, 24
            and.b32 %total, %low, 0xffffff",
        );
        self.sum_before();
        self.ops(
            "add.u32 %low, %limit, %before
            add.u32 %limit, %limit, %total
            shl.b32 %slot, %leaf, 2
            add.u32 %slot, %counts, %slot
            mov.u32 %total, 0
            @%is ld.shared.u32 %total, [%slot]",
        );
        self.sum_before();
        self.op("add.u32 %next, %escapes, %before");
        self.op("add.u32 %escapes, %escapes, %total");
        self.op(&format!("setp.eq.u32 %is_fill, %kind, {FILL}"));
        self.op("@%is_fill mov.u32 %low, 0");
        self.op("shl.b32 %other, %kind, 24");
        self.op("or.b32 %low, %low, %other");
        self.op(&format!("setp.eq.u32 %is_planes, %kind, {BF16}"));
        self.ops(
            "@%is_planes or.b32 %high, %high, %next
            @%is st.shared.v2.u32 [%at_shared], {%low, %high}
            add.u32 %leaf, %leaf, 32
            sub.u32 %other, %leaf, %lane
            setp.lt.u32 %more, %other, %leaves
            @%more bra PLACE",
        );
        self.note("The code's end and its length.");
        self.ops(
            "setp.eq.u32 %first, %lane, 0
            add.u32 %total, %escapes, 15
            and.b32 %total, %total, 0xfffffff0
            sub.u32 %at_shared, %stage, 16
            @%first st.shared.v2.u32 [%at_shared], {%escapes, %total}
            cvt.u64.u32 %bytes, %total
            mul.wide.u32 %at, %block, 8
            add.u64 %at, %sizes, %at
            @%first st.global.u64 [%at], %bytes",
        );
        self.label("PLACED");
        self.ops("bar.sync 0");
        self.note("Nothing more where it does not fit.");
        self.op(&format!("mul.lo.u32 %other, %warp, {STAGE_BYTES}"));
        self.ops(
            "sub.u32 %at_shared, %stage, %other
            sub.u32 %at_shared, %at_shared, 16
            ld.shared.v2.u32 {%escapes, %total}, [%at_shared]
            cvt.u64.u32 %bytes, %total
            setp.lt.u64 %done, %target_bytes, %bytes
            @%done bra FINISHED",
        );
    }

    /// Heads and their padding, and zeros behind the last escape.
    fn heads(&mut self) {
        self.ops(
            "add.u32 %padded, %leaves, 15
            and.b32 %padded, %padded, 0xfffffff0
            mov.u32 %leaf, %thread
            setp.ge.u32 %done, %leaf, %padded
            @%done bra HEADS_WRITTEN",
        );
        self.label("HEADS");
        self.ops(
            "mov.u64 %head, 0
            setp.lt.u32 %is, %leaf, %leaves
            shl.b32 %at_shared, %leaf, 3
            add.u32 %at_shared, %shared, %at_shared
            @%is ld.shared.u64 %head, [%at_shared]
            mul.wide.u32 %at, %leaf, 8
            add.u64 %at, %target, %at
            st.global.u64 [%at], %head
            add.u32 %leaf, %leaf, %threads
            setp.lt.u32 %more, %leaf, %padded
            @%more bra HEADS",
        );
        self.label("HEADS_WRITTEN");
        self.ops(
            "add.u32 %other, %escapes, %thread
            setp.lt.u32 %is, %other, %total
            cvt.u64.u32 %at, %other
            add.u64 %at, %target, %at
            mov.u32 %c, 0
            @%is st.global.u8 [%at], %c",
        );
    }

    /// Writes the data of all blocks.
    fn blocks(&mut self) {
        self.op("mov.u32 %leaf, %warp");
        self.op("setp.ge.u32 %done, %leaf, %leaves");
        self.op("@%done bra FINISHED");
        self.label("BLOCK");
        self.ops(
            "shl.b32 %at_shared, %leaf, 3
            add.u32 %at_shared, %shared, %at_shared
            ld.shared.v2.u32 {%low, %high}, [%at_shared]
            shr.u32 %kind, %low, 24
            and.b32 %low, %low, 0xffffff",
        );
        self.op(&format!("setp.eq.u32 %is_fill, %kind, {FILL}"));
        self.op("@%is_fill bra WRITTEN");
        self.ops(
            "mul.wide.u32 %data, %low, 128
            add.u64 %data, %target, %data
            shr.u32 %base, %high, 24
            and.b32 %escapes, %high, 0xffffff",
        );
        self.raw();
        self.op(&format!("setp.eq.u32 %is_raw, %kind, {RAW}"));
        self.op("@%is_raw bra RAW");
        self.note("Sign and mantissa.");
        self.ops(
            "mul.wide.u32 %offset, %lane, 8
            add.u64 %plane, %data, %offset",
        );
        for row in 0..ROWS {
            for half in 0..2 {
                for nth in 0..2 {
                    let word = 4 * row + 2 * half + nth;
                    self.op(&format!("and.b32 %r{nth}, %w{word}, 0x7f007f"));
                    self.op(&format!("shr.u32 %c, %w{word}, 8"));
                    self.op("and.b32 %c, %c, 0x800080");
                    self.op(&format!("or.b32 %r{nth}, %r{nth}, %c"));
                }
                self.op(&format!("prmt.b32 %rest{half}, %r0, %r1, 0x6420"));
            }
            self.op("mov.b64 %x, {%rest0, %rest1}");
            self.op(&format!("st.global.u64 [%plane+{}], %x", 256 * row));
        }
        self.note("Distances below the base.");
        (0..CODE_WORDS).for_each(|word| self.op(&format!("mov.u32 %code{word}, 0")));
        for code in 0..64 {
            self.code(code);
            let (word, bit) = (3 * code / 32, 3 * code % 32);
            self.op(&format!("shl.b32 %other, %c, {bit}"));
            self.op(&format!("or.b32 %code{word}, %code{word}, %other"));
            if bit > 29 {
                self.op(&format!("shr.u32 %other, %c, {}", 32 - bit));
                self.op(&format!("or.b32 %code{0}, %code{0}, %other", word + 1));
            }
        }
        self.ops(
            "mul.wide.u32 %offset, %lane, 4
            add.u64 %plane, %data, %offset",
        );
        for word in 0..CODE_WORDS {
            self.op(&format!("st.global.u32 [%plane+{}], %code{word}", AT_CODES + 128 * word));
        }
        self.note("Escapes, by lanes; no more than were counted before, whatever the granule holds now.");
        self.count_escapes("%total");
        self.sum_before();
        self.op(&format!("setp.ge.u32 %is, %total, {}", ESCAPES_MAX + 1));
        self.op("@%is bra WRITTEN");
        self.op("add.u32 %esc, %stage, %before");
        for code in 0..64 {
            self.code(code);
            self.ops(
                "setp.eq.u32 %is, %c, 7
                @%is st.shared.u8 [%esc], %e
                @%is add.u32 %esc, %esc, 1",
            );
        }
        self.ops(
            "shl.b32 %at_shared, %leaf, 2
            add.u32 %at_shared, %counts, %at_shared
            ld.shared.u32 %limit, [%at_shared]
            min.u32 %limit, %limit, %total
            cvt.u64.u32 %plane, %escapes
            add.u64 %plane, %target, %plane
            mov.u32 %next, 0
            bar.warp.sync 0xffffffff",
        );
        self.label("ESCAPES");
        self.ops(
            "add.u32 %other, %next, %lane
            setp.lt.u32 %is, %other, %limit
            add.u32 %at_shared, %stage, %other
            @%is ld.shared.u8 %c, [%at_shared]
            cvt.u64.u32 %at, %other
            add.u64 %at, %plane, %at
            @%is st.global.u8 [%at], %c
            add.u32 %next, %next, 32
            setp.lt.u32 %more, %next, %limit
            @%more bra ESCAPES
            bar.warp.sync 0xffffffff
            bra WRITTEN",
        );
        self.label("RAW");
        self.ops(
            "mul.wide.u32 %offset, %lane, 16
            add.u64 %plane, %data, %offset",
        );
        for row in 0..ROWS {
            self.op(&format!(
                "st.global.v2.u64 [%plane+{}], {{%d{}, %d{}}}",
                512 * row,
                2 * row,
                2 * row + 1
            ));
        }
        self.label("WRITTEN");
        self.ops(
            "add.u32 %leaf, %leaf, %warps
            setp.lt.u32 %more, %leaf, %leaves
            @%more bra BLOCK",
        );
    }

    /// The exponent of a value and its code, into `%e` and `%c`.
    fn code(&mut self, code: usize) {
        self.op(&format!("bfe.u32 %e, %w{}, {}, 8", code / 2, [7, 23][code % 2]));
        self.op("sub.u32 %c, %base, %e");
        self.op("min.u32 %c, %c, 7");
    }

    /// `load` is how codes are read.
    fn decode(&mut self, name: &str, load: &str) {
        let _ = write!(self.0, "\n.visible .entry {name}{DECODE}");
        self.ops(
            "ld.param.u64 %granules, [granules]
            ld.param.u64 %digests, [digests]
            ld.param.u32 %leaves, [leaves]
            cvta.to.global.u64 %granules, %granules
            cvta.to.global.u64 %digests, %digests
            mov.u32 %threads, %ntid.x
            mov.u32 %block, %ctaid.x
            mov.u32 %shared, found
            mov.u32 %thread, %tid.x",
        );
        self.entry_of_block("%code_at", "%code_bytes", "%granule");
        self.op("setp.ne.u64 %stored, %granule, 0");
        self.lane(0);
        let (low, high) = digest::length_words(4096);
        self.op(&format!("selp.b64 %add, {high:#x}, {low:#x}, %upper"));
        self.bits_of_lane();
        self.note("The first leaf of this warp, if it has one, its head, and where its digest goes.");
        self.ops(
            "shr.u32 %leaf, %thread, 5
            shr.u32 %warps, %threads, 5
            shl.b32 %bytes, %leaves, 4
            add.u32 %end, %shared, %bytes",
        );
        self.op(&format!("mul.lo.u32 %stage, %leaf, {STAGE_BYTES}"));
        self.ops(
            "add.u32 %stage, %stage, %end
            add.u32 %stage, %stage, 16
            setp.ge.u32 %done, %leaf, %leaves
            @%done bra ROOT
            shl.b32 %to, %leaf, 4
            add.u32 %to, %shared, %to
            shl.b32 %from, %half, 3
            add.u32 %to, %to, %from
            shl.b32 %step, %warps, 4
            mul.wide.u32 %head_at, %leaf, 8",
        );
        self.next_head(load);
        self.label("LEAF");
        self.ops(
            "mov.u32 %low, %next_low
            mov.u32 %high, %next_high
            add.u32 %from, %to, %step
            setp.lt.u32 %more, %from, %end
            mad.wide.u32 %head_at, %warps, 8, %head_at
            @!%more bra LAST_HEAD",
        );
        self.next_head(load);
        self.label("LAST_HEAD");
        self.note("By the kind. What is not understood, or lies outside, is zeros.");
        self.ops(
            "shr.u32 %kind, %low, 24
            and.b32 %low, %low, 0xffffff
            mul.wide.u32 %data, %low, 128",
        );
        self.op(&format!("setp.eq.u32 %is, %kind, {FILL}"));
        self.op("@%is bra FILL");
        self.op(&format!("setp.eq.u32 %is, %kind, {BF16}"));
        self.op("@%is bra PLANES");
        self.op(&format!("setp.ne.u32 %is, %kind, {RAW}"));
        self.op("@%is bra ZEROS");
        self.op(&format!("add.u64 %limit, %data, {}", 128 * RAW_UNITS));
        self.ops(
            "setp.lt.u64 %is, %code_bytes, %limit
            @%is bra ZEROS
            add.u64 %data, %code_at, %data
            mul.wide.u32 %offset, %lane, 16
            add.u64 %data, %data, %offset",
        );
        for row in 0..ROWS {
            self.op(&format!(
                "ld.global.{load}.v2.u64 {{%d{}, %d{}}}, [%data+{}]",
                2 * row,
                2 * row + 1,
                512 * row
            ));
        }
        self.op("bra DECODED");
        self.label("ZEROS");
        self.op("mov.u32 %high, 0");
        self.label("FILL");
        (0..2 * ROWS).for_each(|nth| self.op(&format!("mov.b64 %d{nth}, {{%high, %high}}")));
        self.op("bra DECODED");
        self.planes(load);
        self.label("DECODED");
        self.note("To the granule, if there is one.");
        self.ops(
            "mul.wide.u32 %at, %leaf, 4096
            add.u64 %at, %granule, %at
            mul.wide.u32 %offset, %lane, 16
            add.u64 %at, %at, %offset",
        );
        for row in 0..ROWS {
            self.op(&format!(
                "@%stored st.global.v2.u64 [%at+{}], {{%d{}, %d{}}}",
                512 * row,
                2 * row,
                2 * row + 1
            ));
        }
        self.leaf_digest(|_, _| ());
        self.op("@%mine st.shared.u64 [%to], %word");
        self.op("add.u32 %to, %to, %step");
        self.op("add.u32 %leaf, %leaf, %warps");
        self.op("@%more bra LEAF");
        self.root();
        self.0.push_str("\nFINISHED:\n    ret;\n}\n");
    }

    /// Reads the head at `%head_at`. One outside of the code is of no kind.
    fn next_head(&mut self, load: &str) {
        self.ops(
            "add.u64 %limit, %head_at, 8
            setp.ge.u64 %is, %code_bytes, %limit
            add.u64 %at, %code_at, %head_at
            mov.u32 %next_low, 0xff000000
            mov.u32 %next_high, 0",
        );
        self.op(&format!("@%is ld.global.{load}.v2.u32 {{%next_low, %next_high}}, [%at]"));
    }

    /// A block of two planes and escapes, into `%d0` to `%d15`.
    fn planes(&mut self, load: &str) {
        self.label("PLANES");
        self.ops(
            "shr.u32 %base, %high, 24
            and.b32 %high, %high, 0xffffff
            cvt.u64.u32 %escapes_at, %high",
        );
        self.op(&format!("add.u64 %limit, %data, {}", 128 * PLANES_UNITS));
        self.ops(
            "setp.lt.u64 %is, %code_bytes, %limit
            @%is bra ZEROS
            setp.lt.u64 %is, %code_bytes, %escapes_at
            @%is bra ZEROS
            add.u64 %data, %code_at, %data
            mul.wide.u32 %offset, %lane, 8
            add.u64 %plane, %data, %offset",
        );
        for row in 0..ROWS {
            self.op(&format!("ld.global.{load}.u64 %r{row}, [%plane+{}]", 256 * row));
        }
        self.ops(
            "mul.wide.u32 %offset, %lane, 4
            add.u64 %plane, %data, %offset",
        );
        for word in 0..CODE_WORDS {
            self.op(&format!("ld.global.{load}.u32 %code{word}, [%plane+{}]", AT_CODES + 128 * word));
        }
        self.note("How many escapes the lanes have, and those before this one.");
        self.count_escapes("%total");
        self.sum_before();
        self.ops(
            "cvt.u64.u32 %offset, %total
            add.u64 %limit, %escapes_at, %offset
            setp.lt.u64 %is, %code_bytes, %limit
            @%is bra ZEROS",
        );
        self.op(&format!("setp.ge.u32 %is, %total, {}", ESCAPES_MAX + 1));
        self.op("@%is bra ZEROS");
        self.note("The words that hold them, into shared memory.");
        self.ops(
            "add.u64 %escapes_at, %code_at, %escapes_at
            cvt.u32.u64 %shift, %escapes_at
            and.b32 %shift, %shift, 3
            cvt.u64.u32 %offset, %shift
            sub.u64 %escapes_at, %escapes_at, %offset
            add.u32 %words, %total, %shift
            add.u32 %words, %words, 3
            shr.u32 %words, %words, 2
            mov.u32 %word_base, 0",
        );
        self.label("STAGE");
        self.ops(
            "add.u32 %word_at, %word_base, %lane
            setp.lt.u32 %is, %word_at, %words
            mul.wide.u32 %offset, %word_at, 4
            add.u64 %at, %escapes_at, %offset",
        );
        self.op(&format!("@%is ld.global.{load}.u32 %value, [%at]"));
        self.ops(
            "shl.b32 %word_at, %word_at, 2
            add.u32 %word_at, %stage, %word_at
            @%is st.shared.u32 [%word_at], %value
            add.u32 %word_base, %word_base, 32
            setp.lt.u32 %is, %word_base, %words
            @%is bra STAGE
            bar.warp.sync 0xffffffff
            add.u32 %esc, %stage, %shift
            add.u32 %esc, %esc, %before",
        );
        self.note("Values of two bytes: sign and mantissa, and the exponent from its code or an escape.");
        for row in 0..ROWS {
            self.op(&format!("mov.b64 {{%lo, %hi}}, %r{row}"));
            for pair in 0..4 {
                for (nth, exponent) in ["%e", "%e2"].into_iter().enumerate() {
                    let code = 8 * row + 2 * pair + nth;
                    let (word, bit) = (3 * code / 32, 3 * code % 32);
                    if bit > 29 {
                        self.op(&format!("shf.r.wrap.b32 %c, %code{word}, %code{}, {bit}", word + 1));
                        self.op("and.b32 %c, %c, 7");
                    } else {
                        self.op(&format!("bfe.u32 %c, %code{word}, {bit}, 3"));
                    }
                    self.op("setp.eq.u32 %is_escape, %c, 7");
                    self.op(&format!("sub.u32 {exponent}, %base, %c"));
                    self.op(&format!("and.b32 {exponent}, {exponent}, 255"));
                    self.op(&format!("@%is_escape ld.shared.u8 {exponent}, [%esc]"));
                    self.op("@%is_escape add.u32 %esc, %esc, 1");
                }
                let from = if pair < 2 { "%lo" } else { "%hi" };
                let bytes = if pair % 2 == 0 { "0x4140" } else { "0x4342" };
                self.op("mov.u32 %other, 0");
                self.op(&format!("prmt.b32 %two, {from}, %other, {bytes}"));
                self.op("shl.b32 %e2, %e2, 16");
                self.op("or.b32 %e, %e, %e2");
                self.op("shl.b32 %e, %e, 7");
                self.op("and.b32 %c, %two, 0x800080");
                self.op("shl.b32 %c, %c, 8");
                self.op("and.b32 %two, %two, 0x7f007f");
                self.op("or.b32 %two, %two, %c");
                self.op(&format!("or.b32 %v{pair}, %two, %e"));
            }
            self.op(&format!("mov.b64 %d{}, {{%v0, %v1}}", 2 * row));
            self.op(&format!("mov.b64 %d{}, {{%v2, %v3}}", 2 * row + 1));
        }
        self.note("No lane writes the next block's escapes while another reads.");
        self.op("bar.warp.sync 0xffffffff");
    }
}
