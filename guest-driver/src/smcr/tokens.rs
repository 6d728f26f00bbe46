// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random numbers and the table of alert tokens.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use rustc_hash::FxHashMap;

/// Random bytes of the kernel.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// A random number of 24 bits: the first packet sequence number of a queue pair.
pub(crate) fn random_psn() -> io::Result<u32> {
    Ok(u32::from_ne_bytes(random()?) & 0x00ff_ffff)
}

type Map<T> = FxHashMap<u32, Arc<T>>;

/// Alert tokens, the peers' names for connections (CDC-4, RMB-19). Tokens are random: a peer cannot
/// guess another token from its own, and a past one is noticed (RMB-20). Never zero.
#[derive(Debug)]
pub(crate) struct Tokens<T> {
    map: RwLock<Map<T>>,
}

impl<T> Default for Tokens<T> {
    fn default() -> Self {
        Tokens { map: RwLock::default() }
    }
}

impl<T> Tokens<T> {
    /// Enters the result of `make` for a fresh token.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub(crate) fn insert(&self, make: impl FnOnce(u32) -> Arc<T>) -> io::Result<Arc<T>> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        loop {
            let token = u32::from_ne_bytes(random()?);
            if token != 0 && !map.contains_key(&token) {
                let value = make(token);
                map.insert(token, value.clone());
                return Ok(value);
            }
        }
    }

    /// The owner of a token.
    #[inline]
    pub(crate) fn get(&self, token: u32) -> Option<Arc<T>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).get(&token).cloned()
    }

    /// Removes a token.
    pub(crate) fn remove(&self, token: u32) -> Option<Arc<T>> {
        self.map.write().unwrap_or_else(PoisonError::into_inner).remove(&token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: RMB-19, CDC-4.
    #[test]
    fn tokens_are_found_until_they_are_removed_and_are_never_zero() {
        let tokens = Tokens::default();
        let given: Vec<_> = (0..200).map(|_| *tokens.insert(Arc::new).unwrap()).collect();
        assert!(given.iter().all(|token| *token != 0));
        let len = || tokens.map.read().unwrap().len();
        assert_eq!(len(), 200);
        assert_eq!(tokens.get(given[7]).as_deref(), Some(&given[7]));
        tokens.remove(given[7]);
        assert!(tokens.get(given[7]).is_none());
        assert_eq!(len(), 199);
    }

    // Shows: RMB-20, CDC-4, SEC-8.
    #[test]
    fn a_token_that_nobody_has_is_not_found() {
        let tokens = Tokens::<u32>::default();
        assert!(tokens.get(0).is_none() && tokens.get(1).is_none());
    }
}
