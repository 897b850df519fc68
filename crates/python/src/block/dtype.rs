//! Element types, by the names of NumPy and PyTorch.

use pyo3::prelude::*;
use pyo3::types::PyString;

use super::dlpack::DataType;
use crate::errors::{invalid, wrong_type};

/// `DLDataTypeCode`.
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;

/// Name, code and size in bytes.
const KNOWN: &[(&str, u8, u8)] = &[
    ("uint8", UINT, 1),
    ("int8", INT, 1),
    ("uint16", UINT, 2),
    ("int16", INT, 2),
    ("uint32", UINT, 4),
    ("int32", INT, 4),
    ("uint64", UINT, 8),
    ("int64", INT, 8),
    ("float16", FLOAT, 2),
    ("bfloat16", BFLOAT, 2),
    ("float32", FLOAT, 4),
    ("float64", FLOAT, 8),
    ("complex64", COMPLEX, 8),
    ("complex128", COMPLEX, 16),
    ("bool", BOOL, 1),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtype {
    name: &'static str,
    code: u8,
    bytes: u8,
}

impl Dtype {
    pub(crate) const UINT8: Self = Self { name: "uint8", code: UINT, bytes: 1 };

    pub(super) fn name(self) -> &'static str {
        self.name
    }

    pub(super) fn bytes(self) -> u8 {
        self.bytes
    }

    pub(crate) fn as_dlpack(self) -> DataType {
        DataType { code: self.code, bits: 8 * self.bytes, lanes: 1 }
    }

    fn named(name: &str) -> PyResult<Self> {
        if let Some(&(name, code, bytes)) = KNOWN.iter().find(|(known, ..)| *known == name) {
            return Ok(Self { name, code, bytes });
        }
        let known: Vec<&str> = KNOWN.iter().map(|(name, ..)| *name).collect();
        let (name, known) = (name.escape_debug(), known.join(", "));
        Err(invalid(format!("`{name}` is no type of elements that is known; known are {known}")))
    }
}

impl FromPyObject<'_, '_> for Dtype {
    type Error = PyErr;

    /// A name, or an object that has one, as NumPy's types do.
    fn extract(dtype: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if let Ok(name) = dtype.cast::<PyString>() {
            return Self::named(&name.to_string());
        }
        for attribute in ["name", "__name__"] {
            if let Some(Ok(name)) = dtype.getattr_opt(attribute)?.map(|name| name.extract::<String>()) {
                return Self::named(&name);
            }
        }
        Err(wrong_type("a dtype is a text like \"float32\", or a dtype of NumPy's", &dtype))
    }
}
