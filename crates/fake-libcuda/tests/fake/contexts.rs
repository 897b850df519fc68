//! Contexts: a stack per thread, and what goes when one ends.

use std::ffi::c_void;
use std::ptr;
use std::sync::Barrier;
use std::thread;

use crate::api::{CONTEXT_IS_DESTROYED, Cuda, INVALID_CONTEXT, turn};

fn current(cuda: &Cuda) -> u64 {
    let mut context = 1;
    assert_eq!(cuda.cuCtxGetCurrent(&raw mut context), 0);
    context
}

fn device(cuda: &Cuda) -> i32 {
    let mut device = -1;
    assert_eq!(cuda.cuCtxGetDevice(&raw mut device), 0);
    device
}

fn is_active(cuda: &Cuda, device: i32) -> bool {
    let (mut flags, mut active) = (9, 9);
    assert_eq!(cuda.cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active), 0);
    assert_eq!(flags, 0);
    active == 1
}

#[test]
fn each_thread_has_a_stack() {
    let cuda = turn();
    let primary = current(&cuda);
    let mut other = 0;
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut other, 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(other), 0);
    assert_eq!((current(&cuda), device(&cuda)), (other, 1));
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            let cuda = Cuda::loaded();
            assert_eq!(current(cuda), 0, "a new thread has none");
            assert_eq!(cuda.cuCtxPushCurrent_v2(primary), 0);
            assert_eq!(device(cuda), 0);
        });
        there.join().unwrap();
    });
    assert_eq!(cuda.cuCtxSetCurrent(primary), 0);
    let mut popped = 0;
    assert_eq!((cuda.cuCtxPopCurrent_v2(&raw mut popped), popped), (0, primary), "set replaces the top");
    assert_eq!(current(&cuda), primary);
    assert_eq!([cuda.cuCtxSetCurrent(0), cuda.cuCtxSetCurrent(0)], [0, 0]);
    assert_eq!(current(&cuda), 0, "none takes the top away");
    assert_eq!(cuda.cuCtxPopCurrent_v2(ptr::null_mut()), INVALID_CONTEXT);
    assert_eq!(cuda.cuCtxSetCurrent(primary), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
}

#[test]
fn primary_contexts_are_counted() {
    let cuda = turn();
    assert!(!is_active(&cuda, 1));
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), INVALID_CONTEXT);
    let (mut first, mut second) = (0, 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut first, 1), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
    assert_eq!((first, is_active(&cuda, 1)), (second, true));
    assert_eq!(cuda.census(1).contexts_retained, 2);
    assert_eq!(cuda.cuCtxDestroy_v2(first), INVALID_CONTEXT, "it is not the caller's to destroy");
    assert_eq!(cuda.cuCtxPushCurrent_v2(first), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert!(is_active(&cuda, 1));
    let mut stream = 0;
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert!(!is_active(&cuda, 1));
    assert_eq!(cuda.census(1).streams, 0, "what was made in it is gone");
    assert_eq!(cuda.cuCtxSynchronize(), CONTEXT_IS_DESTROYED, "it is still on the stack");
    assert_eq!(cuda.cuCtxPopCurrent_v2(ptr::null_mut()), 0);
}

#[test]
fn a_context_retained_during_its_last_release_stays() {
    static BARRIER: Barrier = Barrier::new(2);
    extern "C" fn wait(_: *mut c_void) {
        BARRIER.wait();
    }
    let cuda = turn();
    let (mut first, mut second, mut stream, mut event) = (0, 0, 0, 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut first, 1), 0);
    assert_eq!(cuda.cuCtxPushCurrent_v2(first), 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    assert_eq!(cuda.cuLaunchHostFunc(stream, Some(wait), ptr::null_mut()), 0);
    thread::scope(|scope| {
        let released = scope.spawn(|| Cuda::loaded().cuDevicePrimaryCtxRelease_v2(1));
        while cuda.census(1).calls_that_wait == 0 {
            thread::yield_now();
        }
        // The last release is waiting for the device's work.
        assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        BARRIER.wait();
        assert_eq!(released.join().unwrap(), 0);
    });
    assert_eq!((first, is_active(&cuda, 1), cuda.census(1).contexts_retained), (second, true, 1));
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0, "it can be used");
    assert_eq!(cuda.census(1).streams, 1, "its objects are there");
    assert_eq!([cuda.cuEventDestroy_v2(event), cuda.cuStreamDestroy_v2(stream)], [0, 0]);
    assert_eq!(cuda.cuCtxPopCurrent_v2(ptr::null_mut()), 0);
    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
    assert!(!is_active(&cuda, 1));
}

#[test]
fn users_may_retain_while_others_release() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 500;
    let cuda = turn();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let cuda = Cuda::loaded();
                for _ in 0..ROUNDS {
                    let (mut context, mut event) = (0, 0);
                    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
                    assert_eq!(cuda.cuCtxPushCurrent_v2(context), 0);
                    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
                    assert_eq!(cuda.cuEventDestroy_v2(event), 0);
                    assert_eq!(cuda.cuCtxPopCurrent_v2(ptr::null_mut()), 0);
                    assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(1), 0);
                }
            });
        }
    });
    assert!(!is_active(&cuda, 1));
}

#[test]
fn created_contexts_are_current_and_end() {
    let cuda = turn();
    let (primary, mut context) = (current(&cuda), 0);
    assert_eq!(cuda.cuCtxCreate_v2(&raw mut context, 0, 0), 0);
    assert_eq!(current(&cuda), context);
    assert_eq!(cuda.census(0).contexts_retained, 2);
    let (mut stream, mut event, mut of) = (0, 0, 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 0), 0);
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
    assert_eq!((cuda.cuStreamGetCtx(stream, &raw mut of), of), (0, context));
    assert_eq!((cuda.cuStreamGetCtx(0, &raw mut of), of), (0, context));
    assert_eq!(cuda.cuCtxDestroy_v2(context), 0);
    assert_eq!(current(&cuda), primary, "and leaves the stack");
    assert_eq!((cuda.census(0).streams, cuda.census(0).events), (0, 0));
    assert_eq!(cuda.cuCtxDestroy_v2(context), INVALID_CONTEXT);
    assert_eq!(cuda.cuCtxPushCurrent_v2(context), INVALID_CONTEXT);
}

#[test]
fn streams_belong_to_their_context() {
    let cuda = turn();
    let (mut context, mut stream, mut event) = (0, 0, 0);
    assert_eq!(cuda.cuStreamCreate(&raw mut stream, 1), 0);
    assert_eq!(cuda.cuEventCreate(&raw mut event, 2), 0);
    assert_eq!(cuda.cuCtxCreate_v2(&raw mut context, 0, 1), 0);
    assert_eq!(cuda.cuEventRecord(event, 0), crate::api::INVALID_HANDLE, "the stream is of another device");
    assert_eq!(cuda.cuEventRecord(event, stream), 0);
    assert_eq!(cuda.cuMemsetD8Async(0, 0, 0, stream), crate::api::INVALID_HANDLE);
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    assert_eq!(cuda.cuCtxDestroy_v2(context), 0);
    assert_eq!([cuda.cuEventDestroy_v2(event), cuda.cuStreamDestroy_v2(stream)], [0, 0]);
}
