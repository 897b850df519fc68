//! The kernel that copies, run line by line on the CPU: its text copies every byte, and no other.

use poorwill_driver::cuda::{COPY_PAGE_BYTES, COPY_PTX};
use poorwill_testkit::pattern;

use super::ptx::{Kernel, Launch, Memory};

const FROM: u64 = 0x10_0000_0000;
const TO: u64 = 0x7000_0000_0000;

/// Copies so many pages, from and to places that are only as aligned as they must be.
fn check(kernel: &Kernel, pages: usize, blocks: u64, threads: usize) {
    let (len, [before, behind]) = (pages * COPY_PAGE_BYTES, [16, 48]);
    let source = pattern::bytes(pages as u64, len);
    let mut memory = Memory(vec![(FROM + 32, source.clone()), (TO, vec![0xEE; before + len + behind])]);
    for block in 0..blocks {
        let params = [TO + before as u64, FROM + 32, len as u64];
        kernel.run(&mut memory, &Launch { params: &params, block, blocks, threads, shared_bytes: 0 });
    }
    let expected = [vec![0xEE; before], source, vec![0xEE; behind]].concat();
    assert!(memory.0[1].1 == expected, "{pages} pages, {blocks} blocks of {threads} threads");
}

#[test]
fn pages_of_many_numbers_on_many_grids() {
    let kernel = Kernel::parse(COPY_PTX, "poorwill_copy");
    for pages in (0..=20).chain([31, 32, 33, 64, 65]) {
        for (blocks, threads) in [(1, 32), (1, 512), (2, 64), (3, 128), (32, 512)] {
            check(&kernel, pages, blocks, threads);
        }
    }
}

#[test]
fn a_granule_on_the_grid_that_the_driver_gives_it() {
    let kernel = Kernel::parse(COPY_PTX, "poorwill_copy");
    check(&kernel, (2 << 20) / COPY_PAGE_BYTES, 32, 512);
    check(&kernel, (5 << 20) / COPY_PAGE_BYTES, 32, 512);
}
