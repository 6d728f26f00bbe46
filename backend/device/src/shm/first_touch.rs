// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of guests allocated by the daemon's first touches.
//!
//! The kernel charges a page of a shared file to the first process touching the page. A guest could give the
//! daemon memory with holes, and so charge the daemon for all of the memory, past every quota. So the kernel
//! does not allocate pages for the daemon on its own: touching an absent page raises SIGBUS ([userfaultfd(2)]
//! in its SIGBUS mode), and the handler ([`BusErrorGuard`](super::BusErrorGuard)) asks for the page here, on
//! the guest's account ([`TouchQuota`]).
//!
//! A present page costs nothing. Huge pages come from a pool of their own and are not counted.
//!
//! [userfaultfd(2)]: https://man7.org/linux/man-pages/man2/userfaultfd.2.html

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bytes the daemon may allocate for one guest, in all its connections. Never given back: the daemon cannot
/// know the end of a file after closing it.
#[derive(Debug)]
pub struct TouchQuota {
    limit: u64,
    used: AtomicU64,
    misses: AtomicU64,
}

impl TouchQuota {
    /// A quota of `limit` bytes.
    pub fn new(limit: u64) -> TouchQuota {
        TouchQuota { limit, used: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    /// Bytes allocated.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed).min(self.limit)
    }

    /// Touches of absent pages so far.
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// Outcome of touching an absent page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touched {
    /// The page is present now.
    Allocated,
    /// The guest's quota is used up.
    OverQuota,
    /// There is no such page: the file has ended, or the memory is broken.
    Lost,
}

/// A region with counted first touches.
#[derive(Debug)]
pub(super) struct FirstTouches {
    quota: Arc<TouchQuota>,
    page: usize,
    /// A bit for each counted page. Touching a page again after the guest removed it adds no memory.
    counted: Box<[AtomicU64]>,
    /// Consecutive touches of pages already present.
    vain: AtomicU64,
}

/// Another thread may have been faster a few times. Beyond this number, the page is present but broken.
const MAX_VAIN: u64 = 1 << 16;

impl FirstTouches {
    /// Counts first touches in `[start, start + len)`, a mapping of the process. `None`: not supported by the
    /// kernel for this mapping.
    pub(super) fn new(start: usize, len: usize, quota: &Arc<TouchQuota>) -> Option<FirstTouches> {
        let page = rustix::param::page_size();
        // The last page counts whole, as in the mapping.
        register(userfault()?, start, len.checked_next_multiple_of(page)?).ok()?;
        let words = len.div_ceil(page).div_ceil(64);
        // Untouched zeroes take no memory.
        let counted = Box::into_raw(vec![0u64; words].into_boxed_slice());
        // SAFETY: the pointer is from a box of the same length, and the elements have the same layout.
        let counted = unsafe { Box::from_raw(counted as *mut [AtomicU64]) };
        Some(FirstTouches { quota: quota.clone(), page, counted, vain: AtomicU64::new(0) })
    }

    /// Allocates the page at `address` of the region starting at `start`. Async-signal-safe.
    pub(super) fn touch(&self, start: usize, address: usize) -> Touched {
        self.quota.misses.fetch_add(1, Ordering::Relaxed);
        let offset = address.wrapping_sub(start);
        let number = offset / self.page;
        let Some(word) = self.counted.get(number / 64) else { return Touched::Lost };
        let bit = 1 << (number % 64);
        let new = word.fetch_or(bit, Ordering::Relaxed) & bit == 0;
        if new && !self.quota.take(self.page as u64) {
            return Touched::OverQuota;
        }
        let Some(Some(fd)) = USERFAULT.get() else { return Touched::Lost };
        let page = address & !(self.page - 1);
        let mut request = ZeroPage { start: page as u64, len: self.page as u64, mode: 0, done: 0 };
        // SAFETY: the kernel reads and writes only the structure. ZEROPAGE never replaces a present page, and
        // no reader has seen an absent one.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), ZEROPAGE as _, &raw mut request) };
        if result == 0 {
            self.vain.store(0, Ordering::Relaxed);
            return Touched::Allocated;
        }
        // SAFETY: the pointer is to this thread's errno.
        match unsafe { *libc::__errno_location() } {
            libc::EEXIST if self.vain.fetch_add(1, Ordering::Relaxed) < MAX_VAIN => {
                Touched::Allocated
            }
            libc::EAGAIN => Touched::Allocated,
            _ => Touched::Lost,
        }
    }
}

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    start: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// The request number of `linux/userfaultfd.h`; `direction` is 3 for both ways, 2 for reading.
const fn request(direction: u64, number: u64, len: usize) -> u64 {
    direction << 30 | (len as u64) << 16 | 0xaa << 8 | number
}

const API: u64 = request(3, 0x3f, size_of::<Api>());
const REGISTER: u64 = request(3, 0x00, size_of::<Register>());
const UNREGISTER: u64 = request(2, 0x01, size_of::<Range>());
const ZEROPAGE: u64 = request(3, 0x04, size_of::<ZeroPage>());
/// The requests made after the start, for the sandbox.
pub const USERFAULT_REQUESTS: [u64; 3] = [REGISTER, UNREGISTER, ZEROPAGE];

const USER_MODE_ONLY: libc::c_int = 1;
const FEATURE_SIGBUS: u64 = 1 << 7;
const MODE_MISSING: u64 = 1;
/// A bit of `ioctls`: ZEROPAGE works for the range.
const HAS_ZEROPAGE: u64 = 1 << 4;

static USERFAULT: OnceLock<Option<OwnedFd>> = OnceLock::new();

/// The process's descriptor, created by the first call; a sandbox may forbid later creation. `None`: not
/// supported by the kernel.
pub fn userfault() -> Option<&'static OwnedFd> {
    USERFAULT.get_or_init(|| open().ok()).as_ref()
}

fn open() -> io::Result<OwnedFd> {
    // The first call asks the kernel; a sandbox may forbid later calls.
    rustix::param::page_size();
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call takes only flags, and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = Api { api: 0xaa, features: FEATURE_SIGBUS, ioctls: 0 };
    // SAFETY: the kernel reads and writes only the structure.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), API as _, &raw mut api) })?;
    Ok(fd)
}

fn register(fd: &OwnedFd, start: usize, len: usize) -> io::Result<()> {
    let (start, len) = (start as u64, len as u64);
    let mut region = Register { start, len, mode: MODE_MISSING, ioctls: 0 };
    // SAFETY: the kernel reads and writes only the structure. The request changes how pages of the mapping
    // are allocated, not their contents.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), REGISTER as _, &raw mut region) })?;
    if region.ioctls & HAS_ZEROPAGE == 0 {
        let mut range = Range { start, len };
        // SAFETY: as above.
        check(unsafe { libc::ioctl(fd.as_raw_fd(), UNREGISTER as _, &raw mut range) })?;
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_never_exceeded() {
        let quota = TouchQuota::new(10);
        assert!(quota.take(4) && quota.take(6));
        assert!(!quota.take(1) && !quota.take(u64::MAX));
        assert_eq!(quota.used(), 10);
    }

    #[test]
    fn requests_are_those_of_the_kernels_header() {
        assert_eq!((API, REGISTER), (0xc018_aa3f, 0xc020_aa00));
        assert_eq!((UNREGISTER, ZEROPAGE), (0x8010_aa01, 0xc020_aa04));
    }
}
