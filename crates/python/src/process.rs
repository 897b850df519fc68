//! Values that only the process that made them may touch.
//!
//! A forked child has copies of everything, and none of the threads: a lock may be held there for ever, and whoever
//! waits for a thread waits for ever. So in a child getting at such a value is an error, and letting go of it does
//! nothing. [`Here`] is for what Python holds, and is dropped while other Python threads go on; [`Owned`] is for what
//! threads hold that know nothing of Python.

use std::ops::Deref;
use std::{mem, process};

use pyo3::prelude::*;

use crate::errors::PoorwillError;

/// A value of this process.
#[derive(Debug)]
pub(crate) struct Here<T: Send> {
    /// There until it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T: Send> Here<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// The value; an error in a fork of the process that made it.
    pub(crate) fn get(&self) -> PyResult<&T> {
        self.value.as_ref().filter(|_| self.is_here()).ok_or_else(|| {
            let (opened_by, this) = (self.process, process::id());
            PoorwillError::new_err(format!(
                "this belongs to process {opened_by}, and this is its fork {this}: open another one here"
            ))
        })
    }

    fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

impl<T: Send> Drop for Here<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        if !self.is_here() {
            mem::forget(value);
            return;
        }
        let mut value = Some(value);
        // Where Python is not to be had any more, nobody waits for it.
        Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}

/// A value that is let go of in the process that made it, and in a fork of it left as it is. Who uses it is known to
/// be in that process.
#[derive(Debug)]
pub(crate) struct Owned<T> {
    /// There until it is dropped.
    value: Option<T>,
    process: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only dropping takes it")
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            mem::forget(self.value.take());
        }
    }
}
