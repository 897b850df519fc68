//! The UUIDs of the devices, also for a fake NVML.

pub(crate) fn bytes(ordinal: u32) -> [u8; 16] {
    let mut bytes = *b"poorwill\x40\x00\x80\x00\0\0\0\0";
    bytes[12..].copy_from_slice(&ordinal.to_be_bytes());
    bytes
}

/// A device's UUID, without the prefix `GPU-` or `MIG-`.
#[must_use]
pub fn uuid_text(ordinal: u32) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes(ordinal)));
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
    parts.join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_bytes_in_five_parts() {
        assert_eq!(uuid_text(0), "706f6f72-7769-6c6c-4000-800000000000");
        assert_eq!(uuid_text(0x12ab), "706f6f72-7769-6c6c-4000-8000000012ab");
    }
}
