//! Values that belong to the process that created them.
//!
//! A forked child has locks that no thread will release. There, access to such a value is an error and
//! dropping it does nothing. [`ProcessLocal`] is for Python objects and drops with Python's lock released;
//! [`ProcessOwned`] is for threads without Python.

use std::ops::Deref;
use std::{mem, process};

use pyo3::prelude::*;

use crate::exceptions::PoorwillError;

/// A value of this process, for Python objects.
#[derive(Debug)]
pub(crate) struct ProcessLocal<T: Send> {
    /// Taken by `drop`.
    value: Option<T>,
    process: u32,
}

impl<T: Send> ProcessLocal<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// Fails in a fork of the process that created it.
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

impl<T: Send> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        if !self.is_here() {
            mem::forget(value);
            return;
        }
        let mut value = Some(value);
        // Once Python has ended there is no lock to release.
        Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}

/// A value that a fork leaks. Callers know that they run in the owning process.
#[derive(Debug)]
pub(crate) struct ProcessOwned<T> {
    /// Taken by `drop`.
    value: Option<T>,
    process: u32,
}

impl<T> ProcessOwned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    pub(crate) fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

impl<T> Deref for ProcessOwned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only dropping takes it")
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            mem::forget(self.value.take());
        }
    }
}
