//! Kernels by name, and memory that they still write to.

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Barrier;

use poorwill_core::Digest;
use poorwill_driver::cuda::{COPY_PTX, DIGEST_PTX};
use poorwill_fake_libcuda::TEST_FILL_PTX;

use crate::api::{
    GRANULE, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, Mapped, Turn, expect_success, in_a_child,
    is_child, turn,
};

const INVALID_IMAGE: i32 = 200;
const INVALID_PTX: i32 = 218;
const NOT_FOUND: i32 = 500;
const MISALIGNED_ADDRESS: i32 = 716;

/// A module that was loaded from this PTX.
fn module(cuda: &Turn, ptx: &str) -> u64 {
    let (mut module, ptx) = (0, CString::new(ptx).unwrap());
    assert_eq!(cuda.cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()), 0);
    module
}

fn function(cuda: &Turn, module: u64, name: &str) -> Result<u64, i32> {
    let (mut function, name) = (0, CString::new(name).unwrap());
    match cuda.cuModuleGetFunction(&raw mut function, module, name.as_ptr()) {
        0 => Ok(function),
        code => Err(code),
    }
}

/// Launches `poorwill_test_fill`. The parameters are gone when this returns.
fn fill(
    cuda: &Turn,
    function: u64,
    mut address: u64,
    mut words: u64,
    mut value: u32,
    mut rounds: u32,
) -> i32 {
    let mut params: [*mut c_void; 4] = [
        (&raw mut address).cast(),
        (&raw mut words).cast(),
        (&raw mut value).cast(),
        (&raw mut rounds).cast(),
    ];
    cuda.cuLaunchKernel(function, 8, 1, 1, 256, 1, 1, 0, 0, params.as_mut_ptr(), ptr::null_mut())
}

#[test]
fn kernels_run_by_name() {
    let cuda = turn();
    let module = module(&cuda, TEST_FILL_PTX);
    let kernel = function(&cuda, module, "poorwill_test_fill").unwrap();
    let mapped = Mapped::new(&cuda, 1);
    assert_eq!(fill(&cuda, kernel, mapped.addr + 8, 100, 0x0102_0304, 2), 0);
    let expected = [vec![0; 8], 0x0102_0304u32.to_ne_bytes().repeat(100), vec![0; 8]].concat();
    assert_eq!(mapped.read(0, 416), expected);
    assert_eq!(fill(&cuda, kernel, mapped.addr + 2, 1, 1, 1), MISALIGNED_ADDRESS);
    assert_eq!(fill(&cuda, kernel, mapped.addr, GRANULE as u64, 1, 1), ILLEGAL_ADDRESS, "not all is mapped");
    assert_eq!(fill(&cuda, kernel, 0, 0, 1, 1), 0, "no word is anywhere");
    let launch = |grid, block| {
        cuda.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, 0, ptr::null_mut(), ptr::null_mut())
    };
    for (grid, block) in [(0, 1), (1, 0), (1, 1025), (1, 1)] {
        assert_eq!(launch(grid, block), INVALID_VALUE, "{grid}, {block}, and no parameters");
    }
    mapped.end();
    assert_eq!(cuda.cuModuleUnload(module), 0);
    assert_eq!(launch(1, 1), INVALID_HANDLE, "it went with its module");
}

/// A page of host memory for the arrays of the kernels that compute digests, registered or not.
struct Arrays<'t> {
    cuda: &'t Turn,
    words: Box<[u64; 512]>,
}

impl<'t> Arrays<'t> {
    fn new(cuda: &'t Turn) -> Self {
        let mut words = Box::new([0; 512]);
        assert_eq!(cuda.cuMemHostRegister_v2(words.as_mut_ptr().cast(), 4096, 2), 0);
        Self { cuda, words }
    }

    fn device(&self) -> u64 {
        let mut pointer = 0;
        let host = self.words.as_ptr().cast_mut().cast();
        assert_eq!(self.cuda.cuMemHostGetDevicePointer_v2(&raw mut pointer, host, 0), 0);
        pointer
    }

    /// Launches one of them with the addresses in the first words and the digests in the upper half.
    fn launch(&self, function: u64, blocks: u32, (threads, shared): (u32, u32), mut leaves: u32) -> i32 {
        let (mut granules, mut digests) = (self.device(), self.device() + 2048);
        let mut params: [*mut c_void; 3] =
            [(&raw mut granules).cast(), (&raw mut digests).cast(), (&raw mut leaves).cast()];
        let (params, none) = (params.as_mut_ptr(), ptr::null_mut());
        self.cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, 0, params, none)
    }

    fn digest(&self, nth: usize) -> Digest {
        let [low, high] = [0, 1].map(|half| u128::from(self.words[256 + 2 * nth + half]));
        Digest(low | high << 64)
    }

    fn end(mut self) {
        assert_eq!(self.cuda.cuMemHostUnregister(self.words.as_mut_ptr().cast()), 0);
    }
}

#[test]
fn digests_are_of_granules_on_the_device_and_in_registered_memory() {
    let cuda = turn();
    let module = module(&cuda, DIGEST_PTX);
    let entries = [("poorwill_digest", 64), ("poorwill_digest_host", 512)]
        .map(|(name, threads)| (function(&cuda, module, name).unwrap(), threads));
    let mapped = Mapped::new(&cuda, 1);
    let leaves = 16;
    let bytes = leaves as usize * 4096;
    let stored: Vec<u64> = (0..bytes as u64 / 8 + 2).map(|word| word * word).collect();
    let start = stored.as_ptr().cast_mut().cast();
    assert_eq!(cuda.cuMemHostRegister_v2(start, bytes + 16, 2), 0);
    let mut host = 0;
    assert_eq!(cuda.cuMemHostGetDevicePointer_v2(&raw mut host, start, 0), 0);
    assert_ne!(host, start as u64, "kernels know it by another address");
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(mapped.addr + 4096, start.cast(), bytes, 0), 0);

    let mut arrays = Arrays::new(&cuda);
    arrays.words[..3].copy_from_slice(&[host + 16, mapped.addr + 4096, host]);
    let expected = |word: usize| {
        let bytes: Vec<u8> = stored[word..word + bytes / 8].iter().flat_map(|w| w.to_le_bytes()).collect();
        Digest::of(&bytes)
    };
    for (kernel, most) in entries {
        arrays.words[256..].fill(0);
        assert_eq!(arrays.launch(kernel, 3, (most, 272), leaves), 0);
        assert_eq!(cuda.cuStreamSynchronize(0), 0);
        assert_eq!([0, 1, 2].map(|nth| arrays.digest(nth)), [expected(2), expected(0), expected(0)]);
        for (shape, leaves) in [((most + 32, 272), 16), ((40, 272), 16), ((most, 271), 16), ((most, 256), 14)]
        {
            assert_eq!(arrays.launch(kernel, 3, shape, leaves), INVALID_VALUE, "{shape:?}, {leaves}");
        }
    }

    let (kernel, good) = (entries[0].0, (64, 272));
    for (address, code) in [
        (start as u64, ILLEGAL_ADDRESS),
        (host + 8, MISALIGNED_ADDRESS),
        (host + 32, ILLEGAL_ADDRESS),
        (mapped.addr + GRANULE as u64 - 4096, ILLEGAL_ADDRESS),
        (0, ILLEGAL_ADDRESS),
    ] {
        arrays.words[1] = address;
        assert_eq!(arrays.launch(kernel, 3, good, leaves), code, "{address:#x}");
    }
    assert_eq!(arrays.launch(kernel, 1000, good, leaves), ILLEGAL_ADDRESS, "the arrays are not that long");
    arrays.end();
    assert_eq!(cuda.cuMemHostUnregister(start), 0);
    mapped.end();
    assert_eq!(cuda.cuModuleUnload(module), 0);
}

#[test]
fn copies_are_between_registered_memory_and_open_memory_of_the_device() {
    const PAGE: usize = 4096;
    let cuda = turn();
    let module = module(&cuda, COPY_PTX);
    let kernel = function(&cuda, module, "poorwill_copy").unwrap();
    let mapped = Mapped::new(&cuda, 1);
    let mut stored: Vec<u64> = (1..=3 * PAGE as u64 / 8 + 2).map(|word| word * word).collect();
    let bytes_of = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let start = stored.as_mut_ptr().cast();
    let bytes = stored.len() * 8;
    assert_eq!(cuda.cuMemHostRegister_v2(start, bytes, 2), 0);
    let mut host = 0;
    assert_eq!(cuda.cuMemHostGetDevicePointer_v2(&raw mut host, start, 0), 0);
    let launch_on = |(blocks, threads), mut to: u64, mut from: u64, len: usize| {
        let mut len = len as u64;
        let mut params: [*mut c_void; 3] =
            [(&raw mut to).cast(), (&raw mut from).cast(), (&raw mut len).cast()];
        let (params, none) = (params.as_mut_ptr(), ptr::null_mut());
        cuda.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, 0, params, none)
    };
    let launch = |to, from, len| launch_on((32, 512), to, from, len);

    assert_eq!(launch(mapped.addr + 32, host + 16, 3 * PAGE), 0);
    assert_eq!(mapped.read(32, 3 * PAGE), bytes_of(&stored[2..]));
    assert_eq!(mapped.read(0, 32), [0; 32]);
    assert_eq!(mapped.read(32 + 3 * PAGE as u64, 64), [0; 64]);
    assert_eq!(launch(host, host + 2 * PAGE as u64, PAGE), 0, "within the host's memory, too");
    assert_eq!(cuda.cuStreamSynchronize(0), 0);
    assert_eq!(stored[..512], stored[1024..1536]);
    assert_eq!(launch(0, 0, 0), 0, "no byte is anywhere");

    let end = mapped.addr + mapped.bytes as u64;
    for (to, from, len, code) in [
        (mapped.addr, start as u64, PAGE, ILLEGAL_ADDRESS),
        (mapped.addr, host + 32, 3 * PAGE, ILLEGAL_ADDRESS),
        (end - PAGE as u64 + 16, host, PAGE, ILLEGAL_ADDRESS),
        (end, host, PAGE, ILLEGAL_ADDRESS),
        (mapped.addr + 8, host, PAGE, MISALIGNED_ADDRESS),
        (mapped.addr, host + 8, PAGE, MISALIGNED_ADDRESS),
        (mapped.addr, host, PAGE - 16, INVALID_VALUE),
        (host, host + 16, PAGE, INVALID_VALUE),
    ] {
        assert_eq!(launch(to, from, len), code, "{len} bytes from {from:#x} to {to:#x}");
    }
    for shape in [(1, 544), (1, 40)] {
        assert_eq!(launch_on(shape, mapped.addr, host, PAGE), INVALID_VALUE, "{shape:?}");
    }
    assert_eq!(cuda.cuMemHostUnregister(start), 0);
    assert_eq!(launch(mapped.addr, host, PAGE), ILLEGAL_ADDRESS, "it is registered no more");
    mapped.end();
    assert_eq!(cuda.cuModuleUnload(module), 0);
}

#[test]
fn names_must_be_in_the_ptx() {
    let cuda = turn();
    let loaded = module(&cuda, TEST_FILL_PTX);
    assert_eq!(function(&cuda, loaded, "poorwill_test_fil"), Err(NOT_FOUND));
    assert_eq!(cuda.cuModuleUnload(loaded), 0);
    assert_eq!(cuda.cuModuleUnload(loaded), INVALID_HANDLE);
    let mut handle = 0;
    assert_eq!(cuda.cuModuleLoadData(&raw mut handle, c"kernel".as_ptr().cast()), INVALID_PTX);
    assert_eq!(cuda.cuModuleLoadData(&raw mut handle, ptr::null()), INVALID_VALUE);
}

#[test]
fn an_unknown_kernel_is_named() {
    if !is_child() {
        let output = in_a_child("kernels::an_unknown_kernel_is_named", &[]);
        expect_success(&output);
        return assert!(String::from_utf8_lossy(&output.stderr).contains("the kernel `other`"));
    }
    let cuda = turn();
    let module = module(&cuda, &TEST_FILL_PTX.replace("poorwill_test_fill", "other"));
    let kernel = function(&cuda, module, "other").unwrap();
    assert_eq!(fill(&cuda, kernel, 0, 0, 0, 0), INVALID_IMAGE);
    assert_eq!(cuda.cuModuleUnload(module), 0);
}

#[test]
fn memory_of_a_launched_kernel_cannot_be_unmapped() {
    static BARRIER: Barrier = Barrier::new(2);
    extern "C" fn wait(_: *mut c_void) {
        BARRIER.wait();
    }
    let cuda = turn();
    let module = module(&cuda, TEST_FILL_PTX);
    let kernel = function(&cuda, module, "poorwill_test_fill").unwrap();
    let mapped = Mapped::new(&cuda, 2);
    // After a host function that waits until the check is done.
    assert_eq!(cuda.cuLaunchHostFunc(0, Some(wait), ptr::null_mut()), 0);
    assert_eq!(fill(&cuda, kernel, mapped.addr + GRANULE as u64, 16, 7, 2), 0);
    assert_eq!(cuda.cuMemUnmap(mapped.addr, mapped.bytes), ILLEGAL_ADDRESS);
    BARRIER.wait();
    assert_eq!(cuda.cuStreamSynchronize(0), 0);
    assert_eq!(mapped.read(GRANULE as u64, 68), [[7, 0, 0, 0].repeat(16), vec![0; 4]].concat());
    mapped.end();
    assert_eq!(cuda.cuModuleUnload(module), 0);
}
