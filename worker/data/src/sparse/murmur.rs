//! MurmurHash3 (A. Appleby, public domain), the variant of 32 bits for x86.

/// The hash of these bytes.
pub(super) fn murmur3(bytes: &[u8], seed: u32) -> u32 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut hash = seed;
    for word in words {
        hash ^= scrambled(u32::from_le_bytes(*word));
        hash = hash.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    hash ^= scrambled(u32::from_le_bytes(last));
    hash ^= bytes.len() as u32;
    hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

/// Of 0 it is 0, so an absent rest changes nothing.
fn scrambled(word: u32) -> u32 {
    word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593)
}

#[cfg(test)]
mod tests {
    use super::murmur3;

    /// From the tables of published test vectors (SMHasher's verification value and its known strings).
    #[test]
    fn the_hash_is_that_of_the_reference() {
        for (text, seed, hash) in [
            ("", 0, 0),
            ("", 1, 0x514e_28b7),
            ("", u32::MAX, 0x81f1_6f39),
            ("a", 0x9747_b28c, 0x7fa0_9ea6),
            ("aaaa", 0x9747_b28c, 0x5a97_808a),
            ("Hello, world!", 0x9747_b28c, 0x2488_4cba),
            ("The quick brown fox jumps over the lazy dog", 0x9747_b28c, 0x2fa8_26cd),
        ] {
            assert_eq!(murmur3(text.as_bytes(), seed), hash, "{text}");
        }
    }
}
