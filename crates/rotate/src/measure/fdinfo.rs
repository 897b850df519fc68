//! What processes hold of a GPU, by `/proc/PID/fdinfo`: the kernel's common format for all DRM drivers.
//!
//! A client of a driver may have several descriptors, also in several processes, and counts once. Processes of other
//! users cannot be read, and are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::files::{Files, names};

/// Of three figures for the same memory, the one that says most about what is taken.
const FIGURES: [&str; 3] = ["drm-resident-", "drm-memory-", "drm-total-"];

/// A client of a DRM driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DrmClient {
    pci_address: String,
    id: u64,
    /// By figure and region, such as `drm-resident-vram0`.
    bytes: BTreeMap<String, u64>,
}

/// All clients of the GPU at this PCI address.
pub(super) fn clients(files: &Files, pci_address: &str) -> Result<Vec<DrmClient>, String> {
    let (mut clients, mut seen) = (Vec::new(), BTreeSet::new());
    for pid in names(&files.path("/proc"))? {
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let process = files.path("/proc").join(pid);
        // It may be another user's, or have ended.
        for descriptor in names(&process.join("fd")).unwrap_or_default() {
            let is_gpu = fs::read_link(process.join("fd").join(&descriptor))
                .is_ok_and(|target| target.starts_with("/dev/dri"));
            if !is_gpu {
                continue;
            }
            let Ok(text) = fs::read_to_string(process.join("fdinfo").join(&descriptor)) else { continue };
            let client = client(&text).filter(|client| client.pci_address == pci_address);
            clients.extend(client.filter(|client| seen.insert(client.id)));
        }
    }
    Ok(clients)
}

impl DrmClient {
    /// What it holds of the regions whose names begin so; `None` if the driver keeps no figure of any.
    pub(super) fn held_bytes(&self, regions: &[&str]) -> Option<u64> {
        FIGURES.iter().find_map(|figure| {
            let of_region = self.bytes.iter().filter_map(|(key, bytes)| {
                let region = key.strip_prefix(figure)?;
                regions.iter().any(|start| region.starts_with(start)).then_some(*bytes)
            });
            of_region.reduce(u64::saturating_add)
        })
    }
}

/// `None` for a descriptor that is no client's.
fn client(text: &str) -> Option<DrmClient> {
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let fields: BTreeMap<&str, &str> = fields.map(|(key, value)| (key.trim(), value.trim())).collect();
    let pci_address = fields.get("drm-pdev")?.to_ascii_lowercase();
    let id = fields.get("drm-client-id")?.parse().ok()?;
    let is_figure = |key: &str| FIGURES.iter().any(|figure| key.starts_with(figure));
    let bytes = fields.iter().filter(|(key, _)| is_figure(key));
    let bytes = bytes.filter_map(|(key, value)| Some(((*key).to_owned(), size(value)?))).collect();
    Some(DrmClient { pci_address, id, bytes })
}

/// `0`, `192 KiB` or `16 MiB`.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let shift = match unit.trim() {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    const XE: &str = "pos:\t0\nflags:\t0100002\ndrm-driver:\txe\ndrm-client-id:\t3\ndrm-pdev:\t0000:03:00.0\n\
                      drm-total-system:\t0\ndrm-resident-gtt:\t192 KiB\ndrm-total-vram0:\t30000 KiB\n\
                      drm-resident-vram0:\t23992 KiB\ndrm-resident-vram1:\t1 MiB\ndrm-total-cycles-rcs:\t7655183225\n";

    #[test]
    fn the_format_of_the_kernel() {
        let found = client(XE).unwrap();
        assert_eq!((&*found.pci_address, found.id), ("0000:03:00.0", 3));
        assert_eq!(found.held_bytes(&["vram", "local"]), Some((23_992 << 10) + (1 << 20)));
        assert_eq!(found.held_bytes(&["gtt"]), Some(192 << 10));
        assert_eq!(found.held_bytes(&["local"]), None);
        // What is resident is not known to older drivers.
        let old = XE.replace("drm-resident-vram", "drm-memory-vram");
        assert_eq!(client(&old).unwrap().held_bytes(&["vram"]), Some((23_992 << 10) + (1 << 20)));
        for none in ["", "pos:\t0\n", "drm-pdev:\t0000:03:00.0\n", "drm-client-id:\t1\n"] {
            assert_eq!(client(none), None, "{none}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, expected) in [
            ("0", Some(0)),
            ("17", Some(17)),
            ("192 KiB", Some(192 << 10)),
            ("16 MiB", Some(16 << 20)),
            ("16 MB", None),
            ("x KiB", None),
            ("18446744073709551615 KiB", None),
        ] {
            assert_eq!(size(text), expected, "{text}");
        }
    }
}
