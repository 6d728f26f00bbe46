// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! GIDs, tokens and nonces, from the system's random source.

use std::collections::HashSet;
use std::io;
use std::sync::Mutex;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_ism_abi::Gid;

use super::sync::lock;

/// GIDs alive on this host, or drawn to be next. Fabrics of one daemon share one pool.
///
/// No two GIDs have the same second half: Linux compares only this half in one place (EISM-10), so a
/// collision would end connections of a bystander.
#[derive(Debug, Default)]
pub struct GidPool {
    second_halves: Mutex<HashSet<[u8; 8]>>,
}

impl GidPool {
    /// Draws an unused GID: a version 4 UUID with a non-zero first half.
    ///
    /// # Errors
    /// If the system gives no random numbers.
    pub(super) fn draw(&self) -> io::Result<Gid> {
        loop {
            let gid = Gid(uuid::Builder::from_random_bytes(random()?).into_uuid().into_bytes());
            if usable(gid) && self.reserve(gid) {
                return Ok(gid);
            }
        }
    }

    /// Reserves a given GID; `false` if its second half is in use.
    pub(super) fn reserve(&self, gid: Gid) -> bool {
        lock(&self.second_halves).insert(gid.part2())
    }

    /// Releases the GID of an ended session. Random GIDs do not return.
    pub(super) fn release(&self, gid: Gid) {
        lock(&self.second_halves).remove(&gid.part2());
    }

    /// Number of GIDs in use.
    pub fn len(&self) -> usize {
        lock(&self.second_halves).len()
    }

    /// Whether no GID is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Whether a driver could use this GID: to SMC, a first half of zeroes means "no GID".
pub(super) fn usable(gid: Gid) -> bool {
    gid.part1() != [0; 8] && gid.part2() != [0; 8]
}

/// An unpredictable number, never 0.
pub(super) fn secret() -> io::Result<u64> {
    loop {
        let number = u64::from_ne_bytes(random()?);
        if number != 0 {
            return Ok(number);
        }
    }
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..)
        && !rest.is_empty()
    {
        match getrandom(rest, GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: EISM-10.
    #[test]
    fn a_gid_is_a_version_4_uuid() {
        let gid = GidPool::default().draw().unwrap();
        let uuid = uuid::Uuid::from_bytes(gid.0);
        assert_eq!(uuid.get_version_num(), 4);
        assert_eq!(uuid.get_variant(), uuid::Variant::RFC4122);
        assert_eq!(uuid.to_string(), gid.to_string());
    }

    #[test]
    fn a_second_half_is_given_once_at_a_time() {
        let pool = GidPool::default();
        let (mut a, mut b) = (Gid([1; 16]), Gid([1; 16]));
        a.0[0] = 7;
        b.0[0] = 8;
        assert!(pool.reserve(a));
        assert!(!pool.reserve(b), "differs in the first half only");
        pool.release(a);
        assert!(pool.reserve(b));
    }

    // Shows: EISM-10.
    #[test]
    fn zero_halves_are_not_usable() {
        assert!(!usable(Gid::NONE));
        let mut gid = Gid([0; 16]);
        gid.0[15] = 1;
        assert!(!usable(gid), "SMC would read nobody");
        gid.0[0] = 1;
        assert!(usable(gid));
    }
}
