//! Tensor sizes of a load like a model's.

/// Four large tensors of an attention and a dense block, and two norms. `bench/peers` has the same.
const LAYER: [u64; 6] = [96 << 20, 64 << 20, 224 << 20, 112 << 20, 16 << 10, 16 << 10];

pub(super) fn count(bytes: u64) -> u64 {
    let layer_bytes: u64 = LAYER.iter().sum();
    bytes.div_ceil(layer_bytes).max(1).saturating_mul(LAYER.len() as u64)
}

/// Whole layers up to at least `bytes`, or one smaller layer.
pub(super) fn sizes(bytes: u64) -> Vec<u64> {
    let layer_bytes: u64 = LAYER.iter().sum();
    if bytes < layer_bytes {
        let part = |size: u64| u128::from(size) * u128::from(bytes) / u128::from(layer_bytes);
        return LAYER.map(|size| u64::try_from(part(size)).unwrap_or(size).max(1)).to_vec();
    }
    (0..bytes.div_ceil(layer_bytes)).flat_map(|_| LAYER).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_whole_or_one_that_is_small() {
        let layer_bytes: u64 = LAYER.iter().sum();
        assert_eq!(sizes(layer_bytes), LAYER);
        assert_eq!(sizes(layer_bytes + 1).len(), 12);
        let sizes_of_24_gib = sizes(24 << 30);
        assert_eq!(sizes_of_24_gib.len(), 50 * LAYER.len());
        for bytes in [1, layer_bytes - 1, layer_bytes, layer_bytes + 1, 24 << 30] {
            assert_eq!(count(bytes), sizes(bytes).len() as u64, "{bytes}");
        }
        assert!(sizes_of_24_gib.iter().sum::<u64>() >= 24 << 30);
        for bytes in [1, 1000, 1 << 20, layer_bytes - 1] {
            let sizes = sizes(bytes);
            assert!(sizes.len() == 6 && sizes.iter().all(|size| *size > 0), "{bytes}: {sizes:?}");
            assert!(sizes.iter().sum::<u64>() <= bytes + 6, "{bytes}: {sizes:?}");
        }
    }
}
