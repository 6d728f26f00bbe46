// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers for own DMBs (`idx` of REGISTER), chosen by the driver.

/// Hands out the numbers below a bound, low ones first.
#[derive(Debug)]
pub(super) struct IndexPool {
    max: u32,
    next: u32,
    released: Vec<u32>,
}

impl IndexPool {
    pub(super) fn new(max: u32) -> IndexPool {
        IndexPool { max, next: 0, released: Vec::new() }
    }

    pub(super) fn max(&self) -> u32 {
        self.max
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        if let Some(index) = self.released.pop() {
            return Some(index);
        }
        let index = self.next;
        (index < self.max).then(|| {
            self.next += 1;
            index
        })
    }

    pub(super) fn release(&mut self, index: u32) {
        self.released.push(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_dense_and_bounded() {
        let mut pool = IndexPool::new(2);
        assert_eq!((pool.take(), pool.take(), pool.take()), (Some(0), Some(1), None));
        pool.release(0);
        assert_eq!((pool.take(), pool.take()), (Some(0), None));
    }
}
