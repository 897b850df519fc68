//! Finds GPUs without creating a context.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use poorwill_core::driver::Result as DriverResult;
use poorwill_core::{DriverErrorKind, Op};
use serde::Serialize;

use super::ffi::{
    ATTRIBUTE_CAPABILITY_MAJOR, ATTRIBUTE_CAPABILITY_MINOR, ATTRIBUTE_FILE_DESCRIPTORS, ATTRIBUTE_INTEGRATED,
    ATTRIBUTE_RDMA_WITH_VIRTUAL_MEMORY, ATTRIBUTE_SHARED_MEMORY_PER_BLOCK,
    ATTRIBUTE_SHARED_MEMORY_PER_BLOCK_OPTIN, ATTRIBUTE_VIRTUAL_MEMORY, AllocationProp, Api, CuDevice,
    CuResult, GRANULARITY_MINIMUM, Location,
};
use crate::ledger::{Result, invalid, of};
use crate::system::slices::hami_limit;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuInfo {
    /// Its number, as the driver counts.
    pub ordinal: u32,
    /// Name for people.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Newest CUDA version that the driver supports, major and minor.
    pub cuda_version: (u32, u32),
    /// As NVML and `nvidia-smi` write it, without the prefix (`GPU-`, `MIG-`).
    pub uuid: String,
    /// PCI address, as `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Smallest unit that can be mapped, in bytes; 0 without virtual memory management.
    pub granule_bytes: u64,
    /// Physical memory as the driver reports it, in bytes; 0 on some slices.
    pub total_bytes: u64,
    /// Shared memory that a block of threads may opt in to, in bytes.
    pub shared_memory_per_block_bytes: u64,
    /// Whether it shares the machine's memory.
    pub integrated: bool,
}

impl GpuInfo {
    /// The lower of HAMi's limit and the GPU's total, for a driver that does not report a slice's memory now.
    pub(super) fn total_of_slice(&self) -> Option<u64> {
        let limit =
            hami_limit(&|name| std::env::var_os(name), self.ordinal).and_then(|limit| limit.bytes.ok()?);
        limit.into_iter().chain((self.total_bytes > 0).then_some(self.total_bytes)).min()
    }
}

/// The GPUs that the driver shows this process, in its order. Takes no GPU memory. A GPU whose queries fail
/// gives an error that names it.
///
/// # Errors
/// `Unsupported` without a usable driver or a GPU; `Device` with what the driver reports.
pub fn gpus(library: Option<&Path>) -> DriverResult<Vec<DriverResult<GpuInfo>>> {
    let api = Api::load(library)?;
    let count = count(api).map_err(of(Op::Open))?;
    Ok((0..count).map(|ordinal| query(api, ordinal).map(|(_, gpu)| gpu).map_err(of(Op::Open))).collect())
}

/// The GPU with this number, found as by [`gpus`].
///
/// # Errors
/// As for [`gpus`]; `InvalidArgument` for an unknown number.
pub fn gpu(library: Option<&Path>, ordinal: u32) -> DriverResult<GpuInfo> {
    let api = Api::load(library)?;
    known(api, ordinal).map(|(_, gpu)| gpu).map_err(of(Op::Open))
}

/// Requires virtual memory management.
pub(super) fn find(api: &'static Api, ordinal: u32) -> Result<(CuDevice, GpuInfo)> {
    let (device, gpu) = known(api, ordinal)?;
    if gpu.granule_bytes == 0 {
        let reason = format!("{} has no virtual memory management, which sleeping needs", gpu.name);
        return Err(DriverErrorKind::Unsupported { reason });
    }
    Ok((device, gpu))
}

fn known(api: &'static Api, ordinal: u32) -> Result<(CuDevice, GpuInfo)> {
    let count = count(api)?;
    if ordinal >= count {
        let known =
            if count == 1 { "cuda:0".into() } else { format!("cuda:0 to cuda:{}", count.saturating_sub(1)) };
        return Err(invalid(format!(
            "there is no GPU {ordinal}: the driver shows this process {count} ({known})"
        )));
    }
    query(api, ordinal)
}

pub(super) fn count(api: &Api) -> Result<u32> {
    // SAFETY: C2; initialising twice does nothing.
    let ready = unsafe { (api.init)(0) };
    if ready == CuResult::NO_DEVICE {
        return Err(no_device(api, ready));
    }
    api.check(ready).map_err(failed("cuInit", ready))?;
    // SAFETY: C2.
    let count: c_int = api.get(|count| unsafe { (api.device_get_count)(count) })?;
    if count == 0 {
        return Err(no_device(api, CuResult::NO_DEVICE));
    }
    Ok(u32::try_from(count).unwrap_or(0))
}

fn no_device(api: &Api, code: CuResult) -> DriverErrorKind {
    let error = api.error(code);
    if code == CuResult::NO_DEVICE {
        let reason = format!(
            "the NVIDIA driver shows this process no GPU ({error}); CUDA_VISIBLE_DEVICES may hide some, or the \
             container was started without GPUs"
        );
        return DriverErrorKind::Unsupported { reason };
    }
    error
}

/// Names the call in an error, and adds a hint where the driver's text has none.
pub(super) fn failed(call: &str, code: CuResult) -> impl FnOnce(DriverErrorKind) -> DriverErrorKind {
    let hint = hint(call, code).map_or_else(String::new, |hint| format!("; {hint}"));
    move |error| reworded(error, |text| format!("{call} failed: {text}{hint}"))
}

fn hint(call: &str, code: CuResult) -> Option<&'static str> {
    Some(match code.0 {
        2 if call == "cuDevicePrimaryCtxRetain" => {
            "the GPU has too little free memory for a context, which takes some hundred MiB"
        }
        46 => "another process may have the GPU for itself (exclusive compute mode)",
        802 => "NVIDIA's fabric manager may not be running",
        803 => {
            "the driver's library and kernel module are of different versions: restart the machine, or the \
             container"
        }
        999 => "the kernel module nvidia-uvm may not be loaded; `nvidia-modprobe -u` loads it",
        _ => return None,
    })
}

fn reworded(error: DriverErrorKind, words: impl FnOnce(String) -> String) -> DriverErrorKind {
    match error {
        DriverErrorKind::Device { code, name, text } => {
            DriverErrorKind::Device { code, name, text: words(text) }
        }
        other => other,
    }
}

/// Errors name the GPU.
fn query(api: &'static Api, ordinal: u32) -> Result<(CuDevice, GpuInfo)> {
    let named = |error| reworded(error, |text| format!("cuda:{ordinal} does not say what it is: {text}"));
    properties(api, ordinal).map_err(named)
}

pub(super) fn handle(api: &'static Api, ordinal: u32) -> Result<CuDevice> {
    let number = c_int::try_from(ordinal).map_err(|_| invalid(format!("there is no GPU {ordinal}")))?;
    // SAFETY: C2.
    api.get(|device| unsafe { (api.device_get)(device, number) })
}

pub(super) fn has_virtual_memory(api: &Api, device: CuDevice) -> bool {
    attribute(api, device, ATTRIBUTE_VIRTUAL_MEMORY).is_ok_and(|has| has != 0)
}

fn properties(api: &'static Api, ordinal: u32) -> Result<(CuDevice, GpuInfo)> {
    let device = handle(api, ordinal)?;
    // SAFETY: C2.
    let uuid: [u8; 16] = api.get(|uuid| unsafe { (api.device_get_uuid)(uuid, device) })?;
    // SAFETY: C2.
    let total_bytes: usize = api.get(|bytes| unsafe { (api.device_total_mem)(bytes, device) })?;
    let capability = |which| attribute(api, device, which).map(|number| u32::try_from(number).unwrap_or(0));
    let gpu = GpuInfo {
        ordinal,
        name: text(api, |text, len| {
            // SAFETY: C2, `text` has space for `len` bytes.
            unsafe { (api.device_get_name)(text, len, device) }
        })?,
        compute_capability: (
            capability(ATTRIBUTE_CAPABILITY_MAJOR)?,
            capability(ATTRIBUTE_CAPABILITY_MINOR)?,
        ),
        cuda_version: cuda_version(api)?,
        uuid: dashed(uuid),
        pci_bus_id: text(api, |text, len| {
            // SAFETY: C2, `text` has space for `len` bytes.
            unsafe { (api.device_get_pci_bus_id)(text, len, device) }
        })?,
        granule_bytes: granule_bytes(api, device)?,
        total_bytes: total_bytes as u64,
        shared_memory_per_block_bytes: shared_memory_per_block(api, device)?,
        integrated: attribute(api, device, ATTRIBUTE_INTEGRATED)? != 0,
    };
    Ok((device, gpu))
}

/// The newest CUDA version that the driver supports, major and minor.
pub(super) fn cuda_version(api: &Api) -> Result<(u32, u32)> {
    // SAFETY: C2.
    let version: c_int = api.get(|version| unsafe { (api.driver_get_version)(version) })?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok((version / 1000, version % 1000 / 10))
}

/// For a GPU's own memory, open to network cards where the GPU supports that.
pub(super) fn memory_of(api: &Api, device: CuDevice) -> AllocationProp {
    let rdma = attribute(api, device, ATTRIBUTE_RDMA_WITH_VIRTUAL_MEMORY).is_ok_and(|can| can != 0);
    AllocationProp {
        kind: 1,
        requested_handle_types: 0,
        location: Location { kind: 1, id: device },
        win32_handle_meta_data: 0,
        compression: 0,
        gpu_direct_rdma_capable: rdma.into(),
        usage: 0,
        reserved: [0; 4],
    }
}

/// Whether memory of the device can be given to other processes.
pub(super) fn has_descriptors(api: &Api, device: CuDevice) -> bool {
    attribute(api, device, ATTRIBUTE_FILE_DESCRIPTORS).is_ok_and(|can| can != 0)
}

fn granule_bytes(api: &Api, device: CuDevice) -> Result<u64> {
    if attribute(api, device, ATTRIBUTE_VIRTUAL_MEMORY)? == 0 {
        return Ok(0);
    }
    let prop = memory_of(api, device);
    // SAFETY: C2.
    let bytes: usize =
        api.get(|bytes| unsafe { (api.mem_get_granularity)(bytes, &raw const prop, GRANULARITY_MINIMUM) })?;
    Ok(bytes as u64)
}

/// The fixed amount where the driver does not support opting in.
fn shared_memory_per_block(api: &Api, device: CuDevice) -> Result<u64> {
    let bytes = attribute(api, device, ATTRIBUTE_SHARED_MEMORY_PER_BLOCK_OPTIN)
        .or_else(|_| attribute(api, device, ATTRIBUTE_SHARED_MEMORY_PER_BLOCK))?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

fn attribute(api: &Api, device: CuDevice, which: c_int) -> Result<c_int> {
    // SAFETY: C2.
    api.get(|value| unsafe { (api.device_get_attribute)(value, which, device) })
}

fn text(api: &Api, call: impl FnOnce(*mut c_char, c_int) -> CuResult) -> Result<String> {
    let mut buffer = [0u8; 256];
    api.check(call(buffer.as_mut_ptr().cast(), 255))?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn dashed(uuid: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (nth, byte) in uuid.into_iter().enumerate() {
        if matches!(nth, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_help_is_said() {
        for (call, code, words) in [
            ("cuDevicePrimaryCtxRetain", 2, "some hundred MiB"),
            ("cuDevicePrimaryCtxRetain", 46, "exclusive compute mode"),
            ("cuInit", 802, "fabric manager"),
            ("cuInit", 803, "restart the machine"),
            ("cuInit", 999, "nvidia-modprobe -u"),
        ] {
            let hint = hint(call, CuResult(code)).unwrap();
            assert!(hint.contains(words), "{code}: {hint}");
        }
        for (call, code) in [("cuInit", 2), ("cuInit", 3), ("cuDevicePrimaryCtxRetain", 101)] {
            assert_eq!(hint(call, CuResult(code)), None, "{code}");
        }
    }

    #[test]
    fn the_call_and_what_may_help_are_in_the_text() {
        let (name, text) = ("CUDA_ERROR_UNKNOWN".into(), "unknown error".into());
        let error = failed("cuInit", CuResult(999))(DriverErrorKind::Device { code: 999, name, text });
        assert!(error.to_string().starts_with("CUDA_ERROR_UNKNOWN (999): cuInit failed: unknown error; "));
    }

    #[test]
    fn uuids_are_written_as_usual() {
        let uuid = std::array::from_fn(|nth| u8::try_from(nth * 16 + nth).unwrap());
        assert_eq!(dashed(uuid), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
