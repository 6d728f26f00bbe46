// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of the system call bpf(2) for a rendezvous.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::assembler::Instruction;
use super::unavailable::Rejected;

/// The type of a program, with its hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// TCP callbacks of the sockets of a cgroup.
    SockOps,
    /// setsockopt(2) calls of the processes of a cgroup.
    SetSockOpt,
    /// getsockopt(2) calls of the processes of a cgroup.
    GetSockOpt,
    /// Messages sent by the sockets of a map.
    Message,
    /// A function of the kernel, by its number in the kernel's types: the program runs first, and a result
    /// other than 0 stands in place of the function's.
    Function(u32),
}

impl Hook {
    /// `enum bpf_prog_type`.
    fn program_type(self) -> u32 {
        match self {
            Hook::SockOps => 13,
            Hook::SetSockOpt | Hook::GetSockOpt => 25,
            Hook::Message => 16,
            Hook::Function(_) => 26,
        }
    }

    /// `enum bpf_attach_type`.
    fn attach_type(self) -> u32 {
        match self {
            Hook::SockOps => 3,
            Hook::SetSockOpt => 22,
            Hook::GetSockOpt => 21,
            Hook::Message => 7,
            Hook::Function(_) => 26,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MapKind {
    /// An array of eight-byte values. Processes may map the array to read; only programs write values.
    ReadOnlyArray,
    /// A hash table dropping the least recently used entry when full.
    LruHash,
    /// Longest prefix match.
    PrefixTrie,
    /// A value in a socket, freed with the socket. Accepted sockets start with a copy of the listener's
    /// value.
    SocketStorage,
    /// A hash table of sockets.
    SocketHash,
    /// An array of cgroups, set by their descriptors.
    Cgroups,
}

impl MapKind {
    /// `enum bpf_map_type`.
    fn number(self) -> u32 {
        match self {
            MapKind::ReadOnlyArray => 2,
            MapKind::Cgroups => 8,
            MapKind::LruHash => 9,
            MapKind::SocketHash => 18,
            MapKind::PrefixTrie => 11,
            MapKind::SocketStorage => 24,
        }
    }
}

// `enum bpf_cmd`.
const MAP_CREATE: u32 = 0;
const MAP_LOOKUP_ELEM: u32 = 1;
const MAP_UPDATE_ELEM: u32 = 2;
const PROG_LOAD: u32 = 5;
const OBJ_PIN: u32 = 6;
const PROG_ATTACH: u32 = 8;
const PROG_GET_FD_BY_ID: u32 = 13;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const PROG_QUERY: u32 = 16;
const RAW_TRACEPOINT_OPEN: u32 = 17;
const BTF_LOAD: u32 = 18;
const MAP_FREEZE: u32 = 22;
const LINK_CREATE: u32 = 28;

const F_NO_PREALLOC: u32 = 1;
const F_CLONE: u32 = 1 << 9;
const F_MMAPABLE: u32 = 1 << 10;
/// Beside other programs.
const F_ALLOW_MULTI: u32 = 1 << 1;

/// `union bpf_attr` up to the last used field, as words.
#[derive(Default)]
struct Attributes([u64; 18]);

impl Attributes {
    /// Sets the four bytes at `offset`.
    fn set32(&mut self, offset: usize, value: u32) {
        let Some(word) = self.0.get_mut(offset / 8) else { return };
        let mut bytes = word.to_ne_bytes();
        let at = offset % 8;
        if let Some(place) = bytes.get_mut(at..at + 4) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        *word = u64::from_ne_bytes(bytes);
    }

    fn set_fd(&mut self, offset: usize, fd: BorrowedFd<'_>) {
        self.set32(offset, fd.as_raw_fd().cast_unsigned());
    }

    fn set64(&mut self, offset: usize, value: u64) {
        if let Some(word) = self.0.get_mut(offset / 8) {
            *word = value;
        }
    }

    /// Sets a name of at most 15 characters.
    fn set_name(&mut self, offset: usize, name: &str) {
        for (at, four) in
            name.as_bytes().get(..name.len().min(15)).into_iter().flatten().enumerate()
        {
            let place = offset + at;
            let Some(word) = self.0.get_mut(place / 8) else { return };
            let mut bytes = word.to_ne_bytes();
            if let Some(byte) = bytes.get_mut(place % 8) {
                *byte = *four;
            }
            *word = u64::from_ne_bytes(bytes);
        }
    }
}

/// Calls the kernel.
///
/// # Safety
/// The addresses in `attributes` point to memory of the length needed by the command, and the command may
/// read or write this memory.
unsafe fn bpf(command: u32, attributes: &mut Attributes) -> io::Result<RawFd> {
    if ism_sys::is_fatal(libc::SYS_bpf) {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    let length = size_of_val(&attributes.0);
    let mut call = || {
        // SAFETY: the attributes live and are `length` bytes long. The caller guarantees the memory behind
        // their addresses.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, command, attributes.0.as_mut_ptr(), length) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as RawFd) }
    };
    match call() {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            with_locked_memory(call).unwrap_or(Err(error))
        }
        result => result,
    }
}

/// Makes a call without a limit of locked memory. Kernels before 5.11 count maps and programs as locked
/// memory, and answer EPERM above the limit, usually 64 KiB. `None`: there was no limit, or the process
/// may not raise the limit.
fn with_locked_memory<T>(call: impl FnOnce() -> T) -> Option<T> {
    let limit = getrlimit(Resource::Memlock);
    limit.current?;
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).ok()?;
    let result = call();
    // The processes started from here have the limit again.
    let _ = setrlimit(Resource::Memlock, limit);
    Some(result)
}

/// Calls the kernel for a command with a descriptor as its result.
///
/// # Safety
/// As for [`bpf`].
unsafe fn bpf_fd(command: u32, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    // SAFETY: as the caller guarantees.
    let fd = unsafe { bpf(command, attributes)? };
    // SAFETY: the kernel has just made this descriptor, close-on-exec, without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A map with fixed sizes of key and value.
#[derive(Debug)]
pub(super) struct Map<K, V> {
    fd: OwnedFd,
    types: std::marker::PhantomData<fn(K) -> V>,
}

/// Types without padding, with a value for any bits.
pub(super) trait MapData:
    zerocopy::IntoBytes + zerocopy::FromBytes + zerocopy::Immutable
{
}

impl<T: zerocopy::IntoBytes + zerocopy::FromBytes + zerocopy::Immutable> MapData for T {}

impl<K: MapData, V: MapData> Map<K, V> {
    /// Makes a map of at most `entries` entries. `name`: shown by `bpftool map`.
    pub(super) fn new(kind: MapKind, entries: u32, name: &str) -> io::Result<Map<K, V>> {
        let mut attributes = Attributes::default();
        let flags = match kind {
            MapKind::ReadOnlyArray => F_MMAPABLE,
            MapKind::LruHash | MapKind::SocketHash | MapKind::Cgroups => 0,
            MapKind::PrefixTrie => F_NO_PREALLOC,
            MapKind::SocketStorage => F_NO_PREALLOC | F_CLONE,
        };
        attributes.set32(0, kind.number());
        attributes.set32(4, size_of::<K>() as u32);
        attributes.set32(8, size_of::<V>() as u32);
        attributes.set32(12, entries);
        attributes.set32(16, flags);
        attributes.set_name(28, name);
        // The kernel requires a description of the types of a storage.
        let types = (kind == MapKind::SocketStorage).then(load_u32_btf).transpose()?;
        if let Some(types) = &types {
            attributes.set_fd(48, types.as_fd());
            attributes.set32(52, 1);
            attributes.set32(56, 1);
        }
        // SAFETY: this command dereferences no addresses.
        let fd = unsafe { bpf_fd(MAP_CREATE, &mut attributes)? };
        if kind == MapKind::ReadOnlyArray {
            // A descriptor open for reading only could not be mapped.
            let mut attributes = Attributes::default();
            attributes.set_fd(0, fd.as_fd());
            // SAFETY: this command dereferences no addresses.
            unsafe { bpf(MAP_FREEZE, &mut attributes)? };
        }
        Ok(Self::of_fd(fd))
    }

    /// Adopts a map passed on by another process.
    ///
    /// # Errors
    /// The map has other types, or the number is no open map.
    pub(super) fn adopt(kind: MapKind, number: RawFd) -> io::Result<Map<K, V>> {
        let fd = duplicate(number)?;
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let says = |name: &str, value: usize| {
            let line = about.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.is_some_and(|text| text.trim() == value.to_string())
        };
        let same = says("map_type", kind.number() as usize)
            && says("key_size", size_of::<K>())
            && says("value_size", size_of::<V>());
        if same { Ok(Self::of_fd(fd)) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// A map with keys of the size of K and values of the size of V.
    fn of_fd(fd: OwnedFd) -> Map<K, V> {
        Map { fd, types: std::marker::PhantomData }
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &K) -> io::Result<Option<V>> {
        let mut value = V::new_zeroed();
        let mut attributes = Attributes::default();
        attributes.set_fd(0, self.fd.as_fd());
        attributes.set64(8, std::ptr::from_ref(key).expose_provenance() as u64);
        attributes.set64(16, std::ptr::from_mut(&mut value).expose_provenance() as u64);
        // SAFETY: the map was made with keys of the size of K and values of the size of V; any
        // bytes are a V.
        match unsafe { bpf(MAP_LOOKUP_ELEM, &mut attributes) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the value of a key.
    pub(super) fn set(&self, key: &K, value: &V) -> io::Result<()> {
        let mut attributes = Attributes::default();
        attributes.set_fd(0, self.fd.as_fd());
        attributes.set64(8, std::ptr::from_ref(key).expose_provenance() as u64);
        attributes.set64(16, std::ptr::from_ref(value).expose_provenance() as u64);
        // SAFETY: the map was made with keys of the size of K and values of the size of V, and the kernel
        // only reads both.
        unsafe { bpf(MAP_UPDATE_ELEM, &mut attributes).map(|_| ()) }
    }
}

impl<K, V> AsFd for Map<K, V> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The values of an array of the kernel, changed by its programs at any time.
#[derive(Debug)]
pub(super) struct MappedArray {
    first: NonNull<AtomicU64>,
    /// Number of values.
    len: usize,
}

// SAFETY: the mapping lives as long as the value, for all threads, and is only read by atomic loads.
unsafe impl Send for MappedArray {}
// SAFETY: as for `Send`.
unsafe impl Sync for MappedArray {}

impl MappedArray {
    /// Maps the first `len` values of a [`MapKind::ReadOnlyArray`].
    ///
    /// # Errors
    /// The map has fewer values, or cannot be mapped.
    pub(super) fn new(map: &Map<u32, u64>, len: usize) -> io::Result<MappedArray> {
        let bytes = len * size_of::<u64>();
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                rustix::mm::ProtFlags::READ,
                rustix::mm::MapFlags::SHARED,
                map.as_fd(),
                0,
            )?
        };
        let first = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(MappedArray { first, len })
    }

    pub(super) fn load(&self, at: usize) -> Option<u64> {
        // SAFETY: the value is one of the mapping's `len` values, and is aligned like the mapping. The kernel
        // has checked the length of the map: no mapping exceeds its map.
        // Acquire: partner of the program's atomic addition.
        (at < self.len).then(|| unsafe { self.first.add(at).as_ref() }.load(Ordering::Acquire))
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference to the mapping is left.
        let _ = unsafe { rustix::mm::munmap(self.first.as_ptr().cast(), self.len * 8) };
    }
}

/// Describes the one type "u32" in BPF Type Format.
fn load_u32_btf() -> io::Result<OwnedFd> {
    const KIND_INT: u32 = 1 << 24;
    const STRINGS: &[u8; 8] = b"\0u32\0\0\0\0";
    let mut blob = Vec::with_capacity(64);
    // struct btf_header: magic, version, flags, own length, then offset and length of two sections.
    blob.extend_from_slice(&0xeb9fu16.to_ne_bytes());
    blob.extend_from_slice(&[1, 0]);
    for word in [24u32, 0, 16, 16, STRINGS.len() as u32] {
        blob.extend_from_slice(&word.to_ne_bytes());
    }
    // struct btf_type: name (offset of the string), kind, bytes; then: 32 bits from bit 0.
    for word in [1u32, KIND_INT, 4, 32] {
        blob.extend_from_slice(&word.to_ne_bytes());
    }
    blob.extend_from_slice(STRINGS);
    let mut attributes = Attributes::default();
    attributes.set64(0, blob.as_ptr().expose_provenance() as u64);
    attributes.set32(16, blob.len() as u32);
    // SAFETY: the address is the address of `blob`, with its length, and the kernel only reads.
    unsafe { bpf_fd(BTF_LOAD, &mut attributes) }
}

/// Loads a program, checked and compiled by the kernel.
pub(super) fn load(hook: Hook, name: &str, program: &[Instruction]) -> Result<OwnedFd, Rejected> {
    let load = |log: Option<&mut [u8]>| {
        let mut attributes = Attributes::default();
        let license = c"Dual BSD/GPL";
        attributes.set32(0, hook.program_type());
        attributes.set32(4, program.len() as u32);
        attributes.set64(8, program.as_ptr().expose_provenance() as u64);
        attributes.set64(16, license.as_ptr().expose_provenance() as u64);
        if let Some(log) = log {
            attributes.set32(24, 1);
            attributes.set32(28, log.len() as u32);
            attributes.set64(32, log.as_mut_ptr().expose_provenance() as u64);
        }
        attributes.set_name(48, name);
        attributes.set32(68, hook.attach_type());
        if let Hook::Function(number) = hook {
            attributes.set32(108, number);
        }
        // SAFETY: the addresses lead to the program, with its length in instructions, to a zero-terminated
        // string, and to a writable buffer, with its length.
        unsafe { bpf_fd(PROG_LOAD, &mut attributes) }
    };
    load(None).map_err(|error| {
        // The kernel refused the program: load the program again with a log.
        let mut log = vec![0u8; 64 << 10];
        let _ = load(Some(&mut log));
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<_> = text.trim_end_matches('\0').trim_end().lines().collect();
        let from = lines.len().saturating_sub(8);
        let verifier = lines.get(from..).unwrap_or_default().join("; ");
        Rejected { error, verifier }
    })
}

/// Attaches a program to a cgroup, beside programs already attached, for as long as the returned descriptor
/// is open.
pub(super) fn attach(
    hook: Hook,
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::default();
    attributes.set_fd(0, program);
    attributes.set_fd(4, cgroup);
    attributes.set32(8, hook.attach_type());
    // SAFETY: this command dereferences no addresses.
    unsafe { bpf_fd(LINK_CREATE, &mut attributes) }
}

/// Attaches a program to its function of the kernel, for as long as the returned descriptor is open.
pub(super) fn attach_to_function(program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut attributes = Attributes::default();
    attributes.set_fd(8, program);
    // SAFETY: this command dereferences no addresses: the name is missing.
    unsafe { bpf_fd(RAW_TRACEPOINT_OPEN, &mut attributes) }
}

/// Keeps a link for as long as a new file in the file system of BPF exists.
pub(super) fn pin(link: BorrowedFd<'_>, file: &Path) -> io::Result<()> {
    let file = CString::new(file.as_os_str().as_bytes())?;
    let mut attributes = Attributes::default();
    attributes.set64(0, file.as_ptr().expose_provenance() as u64);
    attributes.set_fd(8, link);
    // SAFETY: the address is that of a zero-terminated string, which the kernel only reads.
    unsafe { bpf(OBJ_PIN, &mut attributes).map(|_| ()) }
}

/// Attaches a program to a cgroup, beside programs already attached, for as long as the cgroup exists.
pub(super) fn attach_for_good(
    hook: Hook,
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut attributes = Attributes::default();
    attributes.set_fd(0, cgroup);
    attributes.set_fd(4, program);
    attributes.set32(8, hook.attach_type());
    attributes.set32(12, F_ALLOW_MULTI);
    // SAFETY: this command dereferences no addresses.
    unsafe { bpf(PROG_ATTACH, &mut attributes).map(|_| ()) }
}

/// Attaches a program to a map of sockets, for as long as the map exists.
pub(super) fn attach_to_map(
    hook: Hook,
    program: BorrowedFd<'_>,
    map: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut attributes = Attributes::default();
    attributes.set_fd(0, map);
    attributes.set_fd(4, program);
    attributes.set32(8, hook.attach_type());
    // SAFETY: this command dereferences no addresses.
    unsafe { bpf(PROG_ATTACH, &mut attributes).map(|_| ()) }
}

/// Most programs of one kind in a cgroup (BPF_CGROUP_MAX_PROGS).
pub(super) const MAX_ATTACHED: usize = 64;

/// The names of the programs attached to this cgroup itself.
pub(super) fn attached(hook: Hook, cgroup: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    let mut ids = [0u32; MAX_ATTACHED];
    let mut attributes = Attributes::default();
    attributes.set_fd(0, cgroup);
    attributes.set32(4, hook.attach_type());
    attributes.set64(16, ids.as_mut_ptr().expose_provenance() as u64);
    attributes.set32(24, MAX_ATTACHED as u32);
    // SAFETY: the kernel writes at most as many numbers as there is room for.
    unsafe { bpf(PROG_QUERY, &mut attributes)? };
    ids.into_iter().filter(|id| *id != 0).map(name_of).collect()
}

/// The name of a program.
fn name_of(id: u32) -> io::Result<String> {
    let mut attributes = Attributes::default();
    attributes.set32(0, id);
    // SAFETY: this command dereferences no addresses.
    let program = unsafe { bpf_fd(PROG_GET_FD_BY_ID, &mut attributes)? };
    // `struct bpf_prog_info` up to the name.
    let mut info = [0u8; 80];
    let mut attributes = Attributes::default();
    attributes.set_fd(0, program.as_fd());
    attributes.set32(4, info.len() as u32);
    attributes.set64(8, info.as_mut_ptr().expose_provenance() as u64);
    // SAFETY: the kernel writes at most the given length. Every length in the buffer is 0, so the kernel
    // follows no address there.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attributes)? };
    let name = info.get(64..).unwrap_or_default().split(|byte| *byte == 0).next();
    Ok(String::from_utf8_lossy(name.unwrap_or_default()).into_owned())
}

/// Duplicates the descriptor `number`, passed on by another process.
pub(super) fn duplicate(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the number is only passed to fcntl(2), and fcntl(2) refuses a number without a descriptor.
    let theirs = unsafe { BorrowedFd::borrow_raw(number) };
    super::duplicate_high(theirs)
}

/// Sets a socket option whose value is an `int`.
pub(super) fn set_socket_option(
    socket: BorrowedFd<'_>,
    level: i32,
    name: i32,
    value: i32,
) -> io::Result<()> {
    // SAFETY: the value lives and has the stated length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A socket option whose value is an `int`.
pub(super) fn socket_option(socket: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0i32;
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: both addresses are the addresses of live variables, and the second holds the length of the
    // first.
    let result = unsafe {
        let value = std::ptr::from_mut(&mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), level, name, value, &mut length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// The cookie of a socket's network namespace.
pub(super) fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    let mut value = 0u64;
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: both addresses are the addresses of live variables, and the second holds the length of the
    // first.
    let result = unsafe {
        let value = std::ptr::from_mut(&mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &mut length)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Makes the accepted sockets of a listener save their SYN (TCP_SAVE_SYN).
pub(super) fn save_syn(listener: BorrowedFd<'_>) -> io::Result<()> {
    let saves = socket_option(listener, libc::IPPROTO_TCP, libc::TCP_SAVE_SYN);
    // The application may have asked for more than is needed here.
    if saves.is_ok_and(|saves| saves != 0) {
        return Ok(());
    }
    set_socket_option(listener, libc::IPPROTO_TCP, libc::TCP_SAVE_SYN, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_without_a_limit_of_locked_memory_leaves_the_limit() {
        let limit = || (getrlimit(Resource::Memlock).current, getrlimit(Resource::Memlock).maximum);
        let before = limit();
        // Without the right to raise the limit there is no call.
        let seen = with_locked_memory(limit);
        assert!(seen.is_none_or(|seen| seen == (None, None)), "{seen:?}");
        assert_eq!(limit(), before);
    }

    #[test]
    fn attributes_lie_where_they_are_put() {
        let mut attributes = Attributes::default();
        attributes.set32(0, 0x0403_0201);
        attributes.set32(4, 0x0807_0605);
        attributes.set64(8, u64::MAX);
        attributes.set_name(28, "a_name_longer_than_fifteen");
        let bytes: Vec<u8> = attributes.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(bytes[0..4], 0x0403_0201u32.to_ne_bytes());
        assert_eq!(bytes[4..8], 0x0807_0605u32.to_ne_bytes());
        assert_eq!(bytes[8..16], [0xff; 8]);
        assert_eq!(&bytes[28..44], b"a_name_longer_t\0");
    }

    #[test]
    fn an_offset_beyond_the_attributes_changes_nothing() {
        let mut attributes = Attributes::default();
        attributes.set32(18 * 8, 1);
        attributes.set64(18 * 8, 1);
        attributes.set_name(18 * 8 - 1, "xy");
        assert_eq!(attributes.0[..17], [0; 17]);
    }
}
