//! What `poorwill/torch/` asks of an arena: which of its tags PyTorch's segments come from.

use poorwill::Tag;
use pyo3::prelude::*;

use crate::arena::Arena;
use crate::errors::{invalid, refused};
use crate::torch;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(torch_allocator, module)?)?;
    module.add_function(wrap_pyfunction!(torch_make_default, module)?)?;
    module.add_function(wrap_pyfunction!(torch_tag_at, module)?)?;
    module.add_function(wrap_pyfunction!(torch_set_margin, module)?)?;
    module.add_function(wrap_pyfunction!(torch_set_cached_max, module)?)?;
    module.add_function(wrap_pyfunction!(torch_trim, module)?)
}

/// Addresses of two C functions, alloc and free, for segments of a tag of an arena.
#[pyfunction]
fn torch_allocator(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<(usize, usize)> {
    let number = route_to(py, arena, tag)?;
    torch::addresses(number).ok_or_else(|| refused("no function is left for another tag"))
}

/// Makes the symbol `poorwill_alloc` serve a tag of an arena, for the arena's device.
#[pyfunction]
fn torch_make_default(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<()> {
    torch::routes().make_default(route_to(py, arena, tag)?);
    Ok(())
}

fn route_to(py: Python<'_>, arena: &Bound<'_, Arena>, tag: &str) -> PyResult<usize> {
    let tag = Tag::new(tag).map_err(invalid)?;
    let opened = arena.get().opened()?;
    // May drop a closed arena's last reference, which waits for the device.
    py.detach(move || torch::routes().to(&opened, &tag)).map_err(refused)
}

/// The tag of an arena's segment that an address is in, or None.
#[pyfunction]
fn torch_tag_at(py: Python<'_>, arena: &Bound<'_, Arena>, addr: u64) -> PyResult<Option<String>> {
    let opened = arena.get().opened()?;
    // May drop a closed arena's last reference, which waits for the device.
    Ok(py.detach(move || torch::routes().tag_at(&opened, addr)).map(|tag| tag.to_string()))
}

/// Sets how many bytes every request for a segment has to leave free on the device.
#[pyfunction]
fn torch_set_margin(arena: &Bound<'_, Arena>, margin_bytes: u64) -> PyResult<()> {
    arena.get().opened()?.set_margin_bytes(margin_bytes);
    Ok(())
}

/// Sets how many unused bytes an arena may keep mapped.
#[pyfunction]
fn torch_set_cached_max(py: Python<'_>, arena: &Bound<'_, Arena>, max_bytes: Option<u64>) -> PyResult<()> {
    arena.get().with(py, |arena| arena.set_cached_max_bytes(max_bytes))
}

/// `Arena.trim`, without asking PyTorch to free its cache first.
#[pyfunction]
fn torch_trim(py: Python<'_>, arena: &Bound<'_, Arena>) -> PyResult<u64> {
    arena.get().with(py, poorwill::Arena::trim)
}
