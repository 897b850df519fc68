//! `BackupView`: a backup in place, as an array that NumPy and PyTorch share.

use poorwill::ByteSize;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::process::ProcessLocal;

/// A backup in host memory, in place and read-only; `Arena.view_backup` makes it.
///
/// `numpy.asarray(view)` shares it as a flat uint8 array, and `torch.from_numpy` that array; PyTorch does not
/// know that it must not be written. The bytes stay as they are until the last of this object and its arrays
/// is gone, also after wakes, sleeps and a close. Until then the host memory is in use. A forked child does
/// not have it.
#[pyclass(frozen, module = "poorwill")]
#[derive(Debug)]
pub(crate) struct BackupView {
    nbytes: usize,
    address: usize,
    view: ProcessLocal<poorwill::BackupView>,
}

impl BackupView {
    pub(super) fn new(view: poorwill::BackupView) -> Self {
        let (nbytes, address) = (view.len(), view.as_ptr().expose_provenance());
        Self { nbytes, address, view: ProcessLocal::new(view) }
    }
}

#[pymethods]
impl BackupView {
    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Its address in host memory, the same in every view until the backup is stored elsewhere.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Compares its granules with the digests of what was stored.
    ///
    /// Raises PoorwillError for one that differs.
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        let view = self.view.get()?;
        py.detach(|| view.verify()).map_err(|error| crate::errors::failed(py, &error))
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.view.get()?;
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", (self.nbytes,))?;
        interface.set_item("typestr", "|u1")?;
        let is_read_only = true;
        interface.set_item("data", (self.address, is_read_only))?;
        Ok(interface)
    }

    fn __repr__(&self) -> String {
        match self.view.get() {
            Ok(view) => {
                format!("<poorwill.BackupView of {}: {}>", view.range(), ByteSize(self.nbytes as u64))
            }
            Err(_) => "<poorwill.BackupView of another process>".to_owned(),
        }
    }
}
