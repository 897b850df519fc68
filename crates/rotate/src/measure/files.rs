//! Files of the system, below a root that tests set. Errors name the file.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Where `/proc` and `/sys` are.
#[derive(Debug, Clone)]
pub(super) struct Files {
    root: PathBuf,
}

/// A graphics card of one of the kernel's drivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DrmCard {
    /// Such as `/sys/class/drm/card1`.
    pub(super) folder: PathBuf,
    /// As the kernel writes it: `0000:03:00.0`.
    pub(super) pci_address: String,
}

impl Default for Files {
    fn default() -> Self {
        Self::at("/")
    }
}

impl Files {
    pub(super) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The cards of these drivers, in the order of their PCI addresses.
    pub(super) fn cards(&self, drivers: &[&str]) -> Result<Vec<DrmCard>, String> {
        let mut cards = Vec::new();
        for name in names(&self.path("/sys/class/drm"))? {
            // Connectors are `card0-DP-1`.
            let number = name.strip_prefix("card").unwrap_or_default();
            if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
                continue;
            }
            let folder = self.path("/sys/class/drm").join(&name);
            // Virtual cards have no device.
            let Ok(device) = fs::read_to_string(folder.join("device/uevent")) else { continue };
            let value = |key: &str| device.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            let driver = value("DRIVER").unwrap_or_default();
            if let (true, Some(address)) = (drivers.contains(&driver), value("PCI_SLOT_NAME")) {
                cards.push(DrmCard { folder, pci_address: address.to_ascii_lowercase() });
            }
        }
        // Domains have four digits or more.
        cards.sort_by_key(|card| (card.pci_address.len(), card.pci_address.clone()));
        Ok(cards)
    }

    /// Whether the machine has a display or compute device of this PCI vendor, with or without a driver.
    pub(super) fn has_gpu_of(&self, vendor: &str) -> bool {
        let devices = self.path("/sys/bus/pci/devices");
        let is_one = |name: &String| {
            let is = |file: &str, start: &str| {
                fs::read_to_string(devices.join(name).join(file)).is_ok_and(|text| text.starts_with(start))
            };
            is("vendor", vendor) && is("class", "0x03")
        };
        names(&devices).unwrap_or_default().iter().any(is_one)
    }
}

/// The names in a folder; none if it is not there.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, String> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("cannot read {}: {error}", folder.display())),
    };
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

/// A file with one decimal number; `None` if it is not there.
pub(super) fn number(path: &Path) -> Result<Option<u64>, String> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
    };
    let number = text.trim().parse();
    number.map(Some).map_err(|_| format!("{} holds `{}`, which is no number", path.display(), text.trim()))
}

/// As [`number`], of a file that has to be there.
pub(super) fn required(path: &Path) -> Result<u64, String> {
    number(path)?.ok_or_else(|| format!("{} is not there", path.display()))
}
