//! Caps: the user's limit, in the forms that Python has for it.

use poorwill::budget::{Caps, InvalidCap, InvalidCaps};
use poorwill::{Cap, DeviceSpec};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyMapping, PyString};

use crate::device;
use crate::errors::{invalid, wrong_type};
use crate::sizes::whole_number;

const UNDERSTOOD: &str =
    "a cap is an int, in bytes, a float, as a share, or a text like \"20GiB\" or \"0.92\"";

/// The cap of one device: a cap for all, or its own in a mapping or text.
pub(crate) fn of(caps: &Bound<'_, PyAny>, spec: &DeviceSpec) -> PyResult<Option<Cap>> {
    if let Ok(text) = caps.cast::<PyString>() {
        let caps: Caps = text.to_string().parse().map_err(invalid)?;
        return Ok(caps.of(spec));
    }
    match caps.cast::<PyMapping>() {
        Ok(caps) => of_named(caps, spec),
        Err(_) => Ok(Some(one(caps)?)),
    }
}

/// Parses all entries, so that a mistake shows whichever device is opened.
fn of_named(caps: &Bound<'_, PyMapping>, spec: &DeviceSpec) -> PyResult<Option<Cap>> {
    let mut named: Vec<(String, Cap)> = Vec::new();
    for entry in caps.items()?.iter() {
        let (key, cap): (Bound<'_, PyAny>, Bound<'_, PyAny>) = entry.extract()?;
        let id = device::named(Some(&key), caps.py())?.id();
        if named.iter().any(|(known, _)| *known == id) {
            return Err(invalid(InvalidCaps::Twice { text: caps.str()?.to_string(), device: id }));
        }
        named.push((id, one(&cap)?));
    }
    let id = spec.id();
    Ok(named.into_iter().find(|(known, _)| *known == id).map(|(_, cap)| cap))
}

fn one(cap: &Bound<'_, PyAny>) -> PyResult<Cap> {
    if let Ok(text) = cap.cast::<PyString>() {
        return text.to_string().parse().map_err(invalid);
    }
    let refused = |reason: &str| Ok(InvalidCap::new(cap.str()?.to_string(), reason));
    let refused = |reason| refused(reason).map_or_else(|error: PyErr| error, invalid);
    if let Ok(share) = cap.cast::<PyFloat>() {
        return match share.value() {
            share if !share.is_finite() => Err(refused("it is no number")),
            share if share < 0.0 => Err(refused("it is negative")),
            share => decimal(share).parse().map_err(invalid),
        };
    }
    match whole_number(cap)? {
        // As text: the library detects implausible numbers there.
        Some(Ok(bytes)) => bytes.to_string().parse().map_err(invalid),
        Some(Err(reason)) => Err(refused(reason)),
        None => Err(wrong_type(UNDERSTOOD, cap)),
    }
}

/// The shortest decimal, which is what the user wrote: `0.92`.
fn decimal(share: f64) -> String {
    let text = share.abs().to_string();
    if text.contains('.') { text } else { text + ".0" }
}
