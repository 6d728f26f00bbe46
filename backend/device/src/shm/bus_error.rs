// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bus errors in the memory of guests.
//!
//! The daemon maps files owned by front ends. A page taken away by its owner (a file cut short, a hole
//! without a huge page to fill it, broken hardware) raises SIGBUS when the daemon touches the page. SIGBUS
//! would end the daemon for all guests. A [`BusErrorGuard`] limits the damage to the owner: the signal
//! handler maps zeroes over the region, the access goes on, and a thread calls the owner's `on_fault` to end
//! the connection.
//!
//! A page never present raises SIGBUS as well (see [`TouchQuota`]). The handler allocates the page, within
//! the owner's quota.
//!
//! The whole region is replaced: page by page, a front end could cause more faults or use up the process's
//! mappings.
//!
//! A bus error anywhere else goes to the previous handler.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::TouchQuota;
use super::dump;
use super::first_touch::{FirstTouches, Touched};

/// Most contained regions at a time, in the whole process.
const REGIONS: usize = 8192;

/// Called in a thread of this module after a fault of a region.
type OnFault = Arc<dyn Fn(FaultCause) + Send + Sync>;

/// Why a region was replaced by zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FaultCause {
    /// A page of the region is gone.
    Lost = 1,
    /// A page of the region was not present, and the quota for such pages is used up.
    OverQuota = 2,
}

/// A region, for the handler.
struct Slot {
    /// Address of the first byte; 0: the slot is free.
    start: AtomicUsize,
    /// Bytes.
    len: AtomicUsize,
    /// The cause of zeroes mapped over the region and not yet reported to the owner; 0: nothing.
    fault: AtomicU8,
    /// First touches in the region; null: not reported by the kernel.
    touches: AtomicPtr<FirstTouches>,
}

static SLOTS: [Slot; REGIONS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        fault: AtomicU8::new(0),
        touches: AtomicPtr::new(null_mut()),
    }
}; REGIONS];
/// Number of slots ever used.
static USED_SLOTS: AtomicUsize = AtomicUsize::new(0);
/// The eventfd that wakes the thread.
static FAULT_EVENT: AtomicI32 = AtomicI32::new(-1);
/// The previous handler, if this one is installed; otherwise the error.
static HANDLER: OnceLock<Result<Previous, i32>> = OnceLock::new();
static OWNERS: Mutex<Owners> = Mutex::new(Owners { free: Vec::new(), on_fault: Vec::new() });

/// The previous `sigaction`.
struct Previous(libc::sigaction);

// SAFETY: a value without ownership; the pointer inside is the address of a function.
unsafe impl Send for Previous {}
// SAFETY: as above.
unsafe impl Sync for Previous {}

/// Owners of the slots.
struct Owners {
    free: Vec<usize>,
    /// By slot.
    on_fault: Vec<Option<OnFault>>,
}

/// Why faults in memory cannot be contained.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// Every slot is in use.
    #[error("the daemon maps {REGIONS} memory regions already, which is its limit")]
    TooMany,
    /// The handler or its thread could not be installed.
    #[error("no handler for bus errors")]
    Handler(#[source] io::Error),
}

/// Memory of a guest with contained bus errors: neither the process nor the access ends.
pub struct BusErrorGuard {
    slots: Vec<usize>,
    /// The objects the slots point at.
    touches: Vec<Arc<FirstTouches>>,
    /// Keep the mappings in place while the handler uses them.
    tables: Vec<Arc<GuestMemoryMmap>>,
}

impl BusErrorGuard {
    /// Contains bus errors in all regions of `table`, and counts first touches against `quota`.
    /// `on_fault` is called in another thread after a bus error, perhaps more than once; it must not
    /// block. To be called before the memory is touched.
    ///
    /// # Errors
    /// See [`GuardError`].
    pub fn new(
        table: Arc<GuestMemoryMmap>,
        quota: &Arc<TouchQuota>,
        on_fault: impl Fn(FaultCause) + Send + Sync + 'static,
    ) -> Result<BusErrorGuard, GuardError> {
        install().map_err(GuardError::Handler)?;
        let on_fault: OnFault = Arc::new(on_fault);
        let mut contained =
            BusErrorGuard { slots: Vec::new(), touches: Vec::new(), tables: Vec::new() };
        let mut owners = owners();
        for region in table.iter() {
            let slot = owners.take(on_fault.clone()).ok_or(GuardError::TooMany)?;
            contained.slots.push(slot);
            if let Some(slot) = SLOTS.get(slot) {
                let start = region.as_ptr().addr();
                let len = usize::try_from(region.len()).unwrap_or(0);
                dump::leave_out(start, len);
                let touches = FirstTouches::new(start, len, quota).map(Arc::new);
                let pointer = touches.as_ref().map_or(null_mut(), |t| Arc::as_ptr(t).cast_mut());
                contained.touches.extend(touches);
                slot.fault.store(0, Ordering::Relaxed);
                slot.touches.store(pointer, Ordering::Relaxed);
                slot.len.store(len, Ordering::Relaxed);
                // After the other fields of the slot.
                slot.start.store(start, Ordering::Release);
            }
        }
        drop(owners);
        contained.tables.push(table);
        Ok(contained)
    }

    /// Also keeps `table`, with the same regions.
    pub fn keep(&mut self, table: Arc<GuestMemoryMmap>) {
        self.tables.push(table);
    }

    /// Whether another holder of the tables may still touch the memory.
    pub fn is_in_use(&self) -> bool {
        self.tables.iter().any(|table| Arc::strong_count(table) > 1)
    }
}

impl Drop for BusErrorGuard {
    fn drop(&mut self) {
        let mut owners = owners();
        for index in &self.slots {
            if let Some(slot) = SLOTS.get(*index) {
                slot.start.store(0, Ordering::Release);
                slot.touches.store(null_mut(), Ordering::Release);
            }
            owners.give_back(*index);
        }
    }
}

impl std::fmt::Debug for BusErrorGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BusErrorGuard").field("regions", &self.slots.len()).finish()
    }
}

impl Owners {
    fn take(&mut self, on_fault: OnFault) -> Option<usize> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.on_fault.len() < REGIONS => {
                self.on_fault.push(None);
                USED_SLOTS.store(self.on_fault.len(), Ordering::Release);
                self.on_fault.len() - 1
            }
            None => return None,
        };
        *self.on_fault.get_mut(index)? = Some(on_fault);
        Some(index)
    }

    fn give_back(&mut self, index: usize) {
        if let Some(on_fault) = self.on_fault.get_mut(index) {
            *on_fault = None;
            self.free.push(index);
        }
    }
}

fn owners() -> MutexGuard<'static, Owners> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs the handler and starts the thread, once in a process.
fn install() -> io::Result<()> {
    let installed = HANDLER
        .get_or_init(|| try_install().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)));
    installed.as_ref().map(|_| ()).map_err(|code| io::Error::from_raw_os_error(*code))
}

fn try_install() -> io::Result<Previous> {
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    FAULT_EVENT.store(event.as_raw_fd(), Ordering::Release);
    std::thread::Builder::new()
        .name("bus-errors".into())
        .stack_size(64 << 10)
        .spawn(move || report_faults(&event))?;
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both point to structures of their own, valid when zeroed. The handler calls only mmap, ioctl,
    // write and sigaction, all async-signal-safe, and uses only atomics.
    unsafe {
        let set = action.assume_init_mut();
        set.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
        set.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&mut set.sa_mask);
        if libc::sigaction(libc::SIGBUS, set, previous.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Previous(previous.assume_init()))
    }
}

/// Reports faulted regions to their owners.
fn report_faults(event: &OwnedFd) {
    let mut count = [0; 8];
    while rustix::io::retry_on_intr(|| rustix::io::read(event, &mut count)).is_ok() {
        for (index, slot) in SLOTS.iter().take(USED_SLOTS.load(Ordering::Acquire)).enumerate() {
            let cause = match slot.fault.swap(0, Ordering::AcqRel) {
                0 => None,
                2 => Some(FaultCause::OverQuota),
                _ => Some(FaultCause::Lost),
            };
            if let Some(cause) = cause {
                let on_fault = owners().on_fault.get(index).cloned().flatten();
                // Without the lock: the call may end a connection, and with it contained memory.
                if let Some(on_fault) = on_fault {
                    on_fault(cause);
                }
            }
        }
    }
}

/// The region of an address, as its slot.
fn slot_of(address: usize) -> Option<(&'static Slot, usize, usize)> {
    let used = USED_SLOTS.load(Ordering::Acquire);
    SLOTS.iter().take(used).find_map(|slot| {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Acquire);
        // Unchanged: the length belongs to the start.
        let whole = start != 0 && slot.start.load(Ordering::Relaxed) == start;
        (whole && address.wrapping_sub(start) < len).then_some((slot, start, len))
    })
}

extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo, since SA_SIGINFO is set. `si_addr` is read only for a signal
    // from the kernel, valid there.
    let (address, code) = unsafe {
        let code = (*info).si_code;
        (if code > 0 { (*info).si_addr().addr() } else { 0 }, code)
    };
    // SAFETY: the pointer is to this thread's errno. The calls below may change errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    let contained = slot_of(address).is_some_and(|(slot, start, len)| {
        let touches = slot.touches.load(Ordering::Acquire);
        // SAFETY: the pointer is to an object of the region's `BusErrorGuard`, present as long as any thread
        // touches the region.
        let touches = unsafe { touches.as_ref() }.filter(|_| code == libc::BUS_ADRERR);
        let cause = match touches.map_or(Touched::Lost, |t| t.touch(start, address)) {
            Touched::Allocated => return true,
            Touched::OverQuota => FaultCause::OverQuota,
            Touched::Lost => FaultCause::Lost,
        };
        // SAFETY: a slot names a mapping kept in place by its `BusErrorGuard`, used by others only through
        // volatile accesses. The old contents are lost for others in any case.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(start),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        slot.fault.store(cause as u8, Ordering::Release);
        let one = 1u64.to_ne_bytes();
        // SAFETY: reads eight bytes of `one`. The descriptor is never closed; its counter cannot be full.
        unsafe { libc::write(FAULT_EVENT.load(Ordering::Acquire), one.as_ptr().cast(), one.len()) };
        true
    });
    if !contained && let Some(Ok(previous)) = HANDLER.get() {
        // SAFETY: the action came from the kernel. The access is then repeated with the previous action; a
        // signal sent by a process is raised again.
        unsafe {
            libc::sigaction(signal, &previous.0, std::ptr::null_mut());
            if address == 0 {
                libc::raise(signal);
            }
        }
    }
    // SAFETY: as above.
    unsafe { *errno = saved };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::sync::mpsc;
    use std::time::Duration;

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{Bytes, FileOffset, GuestAddress};

    const LEN: usize = 64 << 10;

    fn quota(bytes: u64) -> Arc<TouchQuota> {
        Arc::new(TouchQuota::new(bytes))
    }

    fn memory(file: &File) -> Arc<GuestMemoryMmap> {
        let backing = FileOffset::new(file.try_clone().unwrap(), 0);
        let ranges = [(GuestAddress(0), LEN, Some(backing))];
        Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).unwrap())
    }

    fn memfd() -> File {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LEN as u64).unwrap();
        file
    }

    #[test]
    fn a_page_that_is_gone_reads_as_zero_and_its_owner_is_told() {
        let file = memfd();
        let table = memory(&file);
        let (told, wait) = mpsc::channel();
        let contained = BusErrorGuard::new(table.clone(), &quota(1 << 20), move |cause| {
            told.send(cause).unwrap();
        })
        .unwrap();
        table.write_obj(7u64, GuestAddress(0x8000)).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(table.read_obj::<u64>(GuestAddress(0x8000)).unwrap(), 0);
        assert_eq!(wait.recv_timeout(Duration::from_secs(120)), Ok(FaultCause::Lost));
        // The region as a whole is replaced, and can be written.
        table.write_obj(9u64, GuestAddress(0)).unwrap();
        assert_eq!(table.read_obj::<u64>(GuestAddress(0)).unwrap(), 9);
        assert!(contained.is_in_use());
        drop(table);
        assert!(!contained.is_in_use());
    }

    #[test]
    fn only_the_owner_of_the_page_is_told() {
        let files = [memfd(), memfd()];
        let tables = files.each_ref().map(memory);
        let (told, wait) = mpsc::channel();
        let _contained = tables.each_ref().map(|table| {
            let (told, start) = (told.clone(), Arc::as_ptr(table).addr());
            BusErrorGuard::new(table.clone(), &quota(1 << 20), move |_| told.send(start).unwrap())
                .unwrap()
        });
        files[1].set_len(0).unwrap();
        tables[1].write_obj(1u8, GuestAddress(5)).unwrap();
        tables[0].write_obj(1u8, GuestAddress(5)).unwrap();
        let start = wait.recv_timeout(Duration::from_secs(120)).unwrap();
        assert_eq!(start, Arc::as_ptr(&tables[1]).addr());
        assert!(wait.recv_timeout(Duration::from_millis(100)).is_err());
    }

    /// Bytes allocated in the file.
    fn allocated(file: &File) -> u64 {
        rustix::fs::fstat(file).unwrap().st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn pages_that_were_not_there_are_counted_once_and_up_to_the_quota() {
        if super::super::userfault().is_none() {
            eprintln!("SKIPPED: this kernel has no userfaultfd");
            return;
        }
        let page = rustix::param::page_size() as u64;
        let file = memfd();
        // The owner has touched the first page.
        rustix::io::pwrite(&file, b"x", 0).unwrap();
        let table = memory(&file);
        let (told, wait) = mpsc::channel();
        let quota = quota(2 * page);
        let _contained =
            BusErrorGuard::new(table.clone(), &quota, move |cause| told.send(cause).unwrap())
                .unwrap();
        let at = |n: u64| GuestAddress(n * page);
        assert_eq!(table.read_obj::<u8>(at(0)).unwrap(), b'x');
        assert_eq!(quota.used(), 0, "it was there");
        table.write_obj(5u8, at(1)).unwrap();
        assert_eq!(table.read_obj::<u8>(at(2)).unwrap(), 0, "reading allocates as well");
        assert_eq!((quota.used(), allocated(&file)), (2 * page, 3 * page));
        // The owner punches out a page, and the daemon touches it again: not counted twice.
        use rustix::fs::FallocateFlags as Flags;
        let hole = Flags::PUNCH_HOLE | Flags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, page, page).unwrap();
        assert_eq!(table.read_obj::<u8>(at(1)).unwrap(), 0);
        assert_eq!((quota.used(), quota.misses()), (2 * page, 3));
        assert!(wait.try_recv().is_err());
        table.write_obj(7u8, at(3)).unwrap();
        assert_eq!(wait.recv_timeout(Duration::from_secs(120)), Ok(FaultCause::OverQuota));
        assert_eq!(allocated(&file), 3 * page, "the file has got nothing of it");
    }

    #[test]
    fn memory_of_guests_is_left_out_of_core_dumps() {
        let file = memfd();
        let table = memory(&file);
        let _contained = BusErrorGuard::new(table.clone(), &quota(0), |_| ()).unwrap();
        let start = table.iter().next().unwrap().as_ptr().addr();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_region = smaps.split_once(&format!("{start:x}-")).unwrap().1;
        let flags = of_region.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }
}
