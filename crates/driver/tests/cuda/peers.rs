//! Memory of a pool in the hands of another GPU of the same process.
//!
//! Needs two devices: the fake library has them, and a machine with two GPUs that reach each other.

use std::ffi::c_int;
use std::sync::Arc;

use libloading::os::unix::Library;
use poorwill_core::{
    AllocRequest, Block, Driver, DriverErrorKind, Level, Pool, PoolConfig, SleepRequest, Tag, WakeRequest,
};
use poorwill_driver::CudaDevice;
use poorwill_driver::cuda::{self, Peers};
use poorwill_testkit::device::{cuda_config, skipped_unless};
use poorwill_testkit::pattern;

use crate::turn;

/// Smaller than half a block, so that both halves lie in it.
const HALF_BYTES: usize = 3 << 20;

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;

/// The device of this run, and another that reaches it. Nothing where there is none.
fn pair(peers: Peers) -> Option<(Arc<CudaDevice>, u32)> {
    let open = |peers| CudaDevice::open(&cuda_config().open_to(peers)).unwrap();
    let reachable = open(Peers::Reachable).peers().first().copied();
    if skipped_unless(|_| reachable.is_some(), "it has one GPU, or none that reaches it") {
        return None;
    }
    Some((Arc::new(open(peers)), reachable?))
}

fn pool(device: &Arc<CudaDevice>) -> (Pool, Block) {
    let config = PoolConfig::default().limited_to(64 << 20);
    let pool = Pool::new(Arc::clone(device) as Arc<dyn Driver>, config).unwrap();
    let block = pool.alloc(&AllocRequest::new(2 * HALF_BYTES as u64, Tag::weights())).unwrap();
    (pool, block)
}

macro_rules! call {
    ($library:expr, $name:literal, ($($arg:expr => $ty:ty),*)) => {{
        // SAFETY: the documented type of the symbol.
        let function = unsafe { $library.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name.as_bytes()) };
        let function = function.unwrap();
        // SAFETY: out-parameters are locals, handles are alive.
        unsafe { function($($arg),*) }
    }};
}

/// Lets the other GPU copy the first half of a block onto the second, in its primary context. PyTorch does so
/// once it knows that the two reach each other. Returns the driver's result.
fn copied_by(peer: u32, block: &Block) -> c_int {
    let path = cuda_config().library.unwrap_or_else(|| "libcuda.so.1".into());
    // SAFETY: it is loaded already, by the driver under test.
    let library = unsafe { Library::new(path) }.unwrap();
    let (mut context, mut popped, device) = (0usize, 0usize, c_int::try_from(peer).unwrap());
    let retained = &raw mut context;
    assert_eq!(call!(library, "cuDevicePrimaryCtxRetain", (retained => *mut usize, device => c_int)), 0);
    assert_eq!(call!(library, "cuCtxPushCurrent_v2", (context => usize)), 0);
    let (from, stream) = (block.range.addr, 0);
    let to = from + HALF_BYTES as u64;
    let code = call!(
        library,
        "cuMemcpyAsync",
        (to => u64, from => u64, HALF_BYTES => usize, stream => usize)
    );
    assert_eq!(call!(library, "cuCtxSynchronize", ()), 0);
    assert_eq!(call!(library, "cuCtxPopCurrent_v2", (&raw mut popped => *mut usize)), 0);
    assert_eq!(call!(library, "cuDevicePrimaryCtxRelease_v2", (device => c_int)), 0);
    code
}

fn halves(pool: &Pool, block: &Block) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = pattern::read(pool, block.id, 2 * HALF_BYTES).unwrap();
    let second = bytes.split_off(HALF_BYTES);
    (bytes, second)
}

#[test]
fn another_gpu_copies_in_memory_of_a_pool_before_and_after_a_sleep() {
    let _turn = turn();
    let Some((device, peer)) = pair(Peers::Reachable) else { return };
    assert!(device.peers().contains(&peer) && !device.peers().contains(&device.gpu().ordinal));
    let (pool, block) = pool(&device);
    pattern::fill(&pool, block.id, 5, HALF_BYTES).unwrap();
    assert_eq!(copied_by(peer, &block), 0);
    assert!(halves(&pool, &block) == (pattern::bytes(5, HALF_BYTES), pattern::bytes(5, HALF_BYTES)));
    pool.sleep(&SleepRequest::all(Level::One)).unwrap();
    pool.wake(&WakeRequest::all()).unwrap();
    pattern::fill(&pool, block.id, 6, HALF_BYTES).unwrap();
    assert_eq!(copied_by(peer, &block), 0);
    assert!(halves(&pool, &block) == (pattern::bytes(6, HALF_BYTES), pattern::bytes(6, HALF_BYTES)));
    pool.close().unwrap();
}

#[test]
fn only_the_peers_that_are_named_get_access() {
    let _turn = turn();
    let Some((device, peer)) = pair(Peers::None) else { return };
    assert_eq!(device.peers(), [0u32; 0]);
    let (pool, block) = pool(&device);
    assert_eq!(copied_by(peer, &block), INVALID_VALUE);
    pool.close().unwrap();

    let named = Peers::Only(vec![peer, device.gpu().ordinal, peer]);
    let device = Arc::new(CudaDevice::open(&cuda_config().open_to(named)).unwrap());
    assert_eq!(device.peers(), [peer]);
    let (pool, block) = self::pool(&device);
    assert_eq!(copied_by(peer, &block), 0);
    pool.close().unwrap();
}

#[test]
fn a_peer_that_there_is_not_is_refused() {
    let _turn = turn();
    let known = cuda::gpus(cuda_config().library.as_deref()).unwrap().len();
    let none = u32::try_from(known).unwrap();
    let config = cuda_config().open_to(Peers::Only(vec![none]));
    let error = CudaDevice::open(&config).unwrap_err();
    assert!(matches!(error.kind, DriverErrorKind::InvalidArgument { .. }), "{error}");
    assert!(error.to_string().contains(&format!("cuda:{none} cannot be a peer")), "{error}");
}
