//! The locks that interleavings are model-checked with: the standard library's here, their doubles in
//! `checks/interleavings`.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
