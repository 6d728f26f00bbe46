// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A short list with its limit in the type, so an encoder can never exceed a count field.

use core::fmt;
use core::ops::Deref;

/// Up to `N` values, stored in place.
#[derive(Clone, Copy)]
pub struct List<T, const N: usize> {
    items: [T; N],
    len: usize,
}

/// The list is full; returns the rejected value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T: Copy + Default, const N: usize> List<T, N> {
    /// An empty list.
    pub fn new() -> Self {
        List { items: [T::default(); N], len: 0 }
    }

    /// Adds `item` at the end; more than fit are an error (SEC-10).
    ///
    /// # Errors
    /// [`Full`] when the list already holds `N` items.
    pub fn push(&mut self, item: T) -> Result<(), Full<T>> {
        let Some(slot) = self.items.get_mut(self.len) else { return Err(Full(item)) };
        *slot = item;
        self.len += 1;
        Ok(())
    }

    /// The items as a list, or `None` when there are more than `N`.
    pub fn from_slice(items: &[T]) -> Option<Self> {
        let mut list = Self::new();
        list.items.get_mut(..items.len())?.copy_from_slice(items);
        list.len = items.len();
        Some(list)
    }
}

impl<T, const N: usize> List<T, N> {
    /// The items.
    pub fn as_slice(&self) -> &[T] {
        self.items.get(..self.len).unwrap_or(&[])
    }
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, const N: usize> Deref for List<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<'a, T, const N: usize> IntoIterator for &'a List<T, N> {
    type Item = &'a T;
    type IntoIter = core::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.as_slice().iter()
    }
}

impl<T: PartialEq, const N: usize> PartialEq for List<T, N> {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<T: Eq, const N: usize> Eq for List<T, N> {}

impl<T: fmt::Debug, const N: usize> fmt::Debug for List<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_its_limit_and_no_more() {
        let mut list = List::<u8, 2>::new();
        assert_eq!(list.push(1), Ok(()));
        assert_eq!(list.push(2), Ok(()));
        assert_eq!(list.push(3), Err(Full(3)));
        assert_eq!(list.as_slice(), &[1, 2]);
        assert_eq!(List::<u8, 2>::from_slice(&[1, 2, 3]), None);
    }

    #[test]
    fn equality_looks_at_the_items_only() {
        let one = List::<u8, 3>::from_slice(&[1]).unwrap();
        let mut other = List::<u8, 3>::new();
        other.push(1).unwrap();
        assert_eq!(one, other);
    }
}
