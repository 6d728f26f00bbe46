//! Hash tables whose keys nobody can choose.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table whose keys are numbers that this process or its device made: counted, or random. It has no
/// defence against keys that were chosen to collide, which these cannot be, and so costs less.
pub(crate) type PlainMap<K, V> = HashMap<K, V, BuildHasherDefault<Plain>>;

/// Scatters keys that are different already.
#[derive(Default)]
pub(crate) struct Plain(u64);

/// 2^64 divided by the golden ratio: neighbours end far from each other, in the high bits too, which
/// a table looks at first.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, key: u32) {
        self.write_u64(u64::from(key));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = (self.0.rotate_left(32) ^ key).wrapping_mul(SCATTER);
    }

    fn write_usize(&mut self, key: usize) {
        self.write_u64(key as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::{BuildHasher, BuildHasherDefault};

    use virtio_ism_abi::Gid;

    use super::Plain;

    #[test]
    fn neighbours_and_permutations_do_not_collide() {
        let hasher = BuildHasherDefault::<Plain>::default();
        let numbers: HashSet<u64> = (0u32..10_000).map(|n| hasher.hash_one(n)).collect();
        assert_eq!(numbers.len(), 10_000);
        // Both ends of a hash are used, by different parts of a table.
        let high: HashSet<u64> = numbers.iter().map(|hash| hash >> 57).collect();
        let low: HashSet<u64> = numbers.iter().map(|hash| hash & 0x7f).collect();
        assert_eq!((high.len(), low.len()), (128, 128));
        let bytes = |at: usize| hasher.hash_one(Gid(std::array::from_fn(|i| u8::from(i == at))));
        assert_eq!((0..16).map(bytes).collect::<HashSet<_>>().len(), 16);
    }
}
