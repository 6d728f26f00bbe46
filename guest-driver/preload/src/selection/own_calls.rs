// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs making system calls by instructions of their own, unseen by the library. The kernel
//! polls and reads the TCP socket for such a program. Once the library finds out, the process
//! begins no further connection on SMC, and its listeners answer no client.
//!
//! The files of a process show most such programs before their first connection. Others are found
//! by their actions.

use std::ffi::{OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_driver::kernel_calls;
use ism_sys::OnceBox;

use crate::selection::{answering_listeners, handed_listeners, session};
use crate::socket::stream::{SocketState, StreamSocket};
use crate::socket::table::{DESCRIPTORS, DescriptorRef, epoll_set_of};
use crate::sys::fork_lock::ForkMutex;
use crate::sys::own_stack::OwnStack;
use crate::sys::{borrowed, is_epoll_set, raw};
use crate::{fork, status};

/// Whether the program makes such calls on connections that may be on SMC.
static FOUND: AtomicBool = AtomicBool::new(false);

/// Whether the library has found out about such calls.
#[inline]
pub(crate) fn found() -> bool {
    FOUND.load(Ordering::Relaxed)
}

/// Notes such calls, named by `what`.
fn note(what: &str) {
    if !FOUND.swap(true, Ordering::Relaxed) {
        status::program_goes_around(what);
        handed_listeners::leave_all();
    }
}

/// Notes calls of libc outside the library, reported by the caller.
pub(crate) fn note_libc() {
    FOUND.store(true, Ordering::Relaxed);
    handed_listeners::leave_all();
}

/// Whether the process may have files newer than the last look.
static HAS_NEW_FILES: AtomicBool = AtomicBool::new(true);
/// The inodes of the files already checked.
static LOOKED_AT: ForkMutex<Vec<u64>> = ForkMutex::new(Vec::new());

/// The program opens an object. `file`: its path, if known. `true`: the object makes such calls,
/// and with the object in the process nothing may be on SMC.
pub(crate) fn opens(file: Option<&Path>) -> bool {
    HAS_NEW_FILES.store(true, Ordering::Relaxed);
    let is_in_use = || answering_listeners::any() || session::opened().is_some();
    let makes_calls = |file: &&Path| {
        let look = || !is_libcs(file) && kernel_calls::makes_socket_calls(file);
        on_own_stack(look)
    };
    match file.filter(|_| !found() && is_in_use()).filter(makes_calls) {
        Some(file) => {
            note_file(file);
            true
        }
        None => false,
    }
}

/// Does work on a stack of the library, or on the caller's if there is no memory for another one.
fn on_own_stack<T>(work: impl FnOnce() -> T) -> T {
    raw::without_signals(|| match OwnStack::take() {
        Some(mut stack) => stack.run(work),
        None => work(),
    })
}

fn note_file(file: &Path) {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    match WHY_NOT.get().filter(|(inode, _)| inode_of(file) == Some(*inode)) {
        Some((_, why)) => note(&format!("the kernel (in {name}, {why})")),
        None => note(&format!("the kernel (in {name})")),
    }
}

fn inode_of(file: &Path) -> Option<u64> {
    file.metadata().ok().map(|data| data.ino())
}

/// The inode of the program's file, and why the library cannot take over its calls.
static WHY_NOT: OnceBox<(u64, String)> = OnceBox::new();

static IS_IN_GO: AtomicBool = AtomicBool::new(false);

/// Notes that the library sees all calls of the file of a program in Go, by its inode.
#[cfg(target_arch = "x86_64")]
pub(crate) fn note_go_taken_over(inode: u64) {
    LOOKED_AT.lock().push(inode);
    IS_IN_GO.store(true, Ordering::Relaxed);
}

/// Notes that the library sees all calls of the process.
#[cfg(target_arch = "x86_64")]
pub(crate) fn note_all_taken_over() {
    HAS_NEW_FILES.store(false, Ordering::Relaxed);
}

/// Whether the program is one in Go whose calls come by the second door.
#[inline]
pub(crate) fn is_in_go() -> bool {
    IS_IN_GO.load(Ordering::Relaxed)
}

/// Notes why the library cannot take over the calls of a program.
#[cfg(target_arch = "x86_64")]
pub(crate) fn note_not_taken_over(inode: u64, why: String) {
    let _ = WHY_NOT.set((inode, why));
}

/// Checks the instructions of the files of the process. Called before a listener answers and before
/// a client asks, so no peer proposes SMC to a program about to read the Proposal.
#[inline]
pub(crate) fn look_at_files() {
    if HAS_NEW_FILES.load(Ordering::Relaxed) && !fork::shares_memory() {
        on_own_stack(first_look);
    }
}

#[cold]
fn first_look() {
    HAS_NEW_FILES.store(false, Ordering::Relaxed);
    let maps = std::fs::read("/proc/self/maps").unwrap_or_default();
    let here = first_look as *const () as usize;
    for line in maps.split(|byte| *byte == b'\n') {
        let Some((inode, file)) = executed_file(line, here) else { continue };
        let mut looked_at = LOOKED_AT.lock();
        if looked_at.contains(&inode) {
            continue;
        }
        looked_at.push(inode);
        drop(looked_at);
        if !is_libcs(file) && kernel_calls::makes_socket_calls(file) {
            note_file(file);
        }
    }
}

/// The inode and the path of a file, if mapped executable and not at this address.
fn executed_file(line: &[u8], except: usize) -> Option<(u64, &Path)> {
    let at = line.iter().position(|byte| *byte == b'/')?;
    let (head, path) = line.split_at_checked(at)?;
    let mut words = std::str::from_utf8(head).ok()?.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let address = |text| usize::from_str_radix(text, 16).ok();
    let is_executed = words.next()?.contains('x');
    let inode = words.nth(2)?.parse().ok()?;
    let is_other = !(address(begin)?..address(end)?).contains(&except);
    (is_executed && is_other).then(|| (inode, Path::new(OsStr::from_bytes(path))))
}

/// Whether a file is libc's, or a library of the distribution: these are in directories of the
/// system, and call libc. A libc of another place is known by its name, and so is a library calling
/// the kernel for futexes.
fn is_libcs(file: &Path) -> bool {
    const NAMES: [&str; 9] = [
        "ld-linux",
        "libc.so",
        "libpthread.so",
        "librt.so",
        "libdl.so",
        "libaio.so",
        "liburing.so",
        "libgomp",
        "libitm",
    ];
    const PLACES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"];
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let Some(directory) = file.parent() else { return false };
    let is_machines = directory.to_string_lossy().ends_with("-linux-gnu");
    let place = if is_machines { directory.parent() } else { Some(directory) };
    NAMES.iter().any(|known| name.starts_with(known))
        || place.is_some_and(|place| PLACES.iter().any(|known| place == Path::new(known)))
}

/// Looks for epoll sets in which the program watches connections or listeners without the library:
/// the program has made the set or the entry by a call of its own. Called before the process opens
/// a device.
pub(super) fn look_for_sets() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let mut all = entries.flatten().filter_map(number);
    let is_unseen = |fd: c_int| match epoll_set_of(fd) {
        Some(set) => members(fd).iter().any(|member| is_entered_without(fd, &set, member)),
        None => {
            !DESCRIPTORS.has(fd) && is_epoll_set(fd) && members(fd).iter().any(Member::is_socket)
        }
    };
    if all.any(is_unseen) {
        note("epoll");
    }
}

/// Whether the program has read the first bytes of a client without the library: the program took
/// the Proposal for data. A process sharing the connection may have read the bytes with the
/// library.
pub(super) fn has_read(socket: &StreamSocket, fd: c_int) -> bool {
    /// An urgent byte and the end of data may count as received, and not as queued.
    const UNCERTAIN: u64 = 2;
    let queued = rustix::io::ioctl_fionread(borrowed(fd)).unwrap_or(u64::MAX);
    let has_read = !socket.owner.may_be_shared()
        && raw::received_bytes(fd).is_some_and(|all| all > queued.saturating_add(UNCERTAIN));
    if has_read {
        note("read");
    }
    has_read
}

/// A member of a set of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    /// The number of the descriptor when it was added.
    fd: c_int,
    inode: u64,
}

impl Member {
    /// The member of a line of fdinfo.
    fn of_line(line: &str) -> Option<Member> {
        let (fd, rest) = line.strip_prefix("tfd:")?.trim_start().split_once(' ')?;
        let inode = rest.split_whitespace().find_map(|word| word.strip_prefix("ino:"))?;
        Some(Member { fd: fd.parse().ok()?, inode: u64::from_str_radix(inode, 16).ok()? })
    }

    /// Whether the descriptor still is the added file. Another process may keep the file, and so
    /// the member, after the number has become another file's.
    fn is_open(&self) -> bool {
        rustix::fs::fstat(borrowed(self.fd)).is_ok_and(|stat| stat.st_ino == self.inode)
    }

    /// Whether the member is a connection known to the library, or a listener of TCP.
    fn is_socket(&self) -> bool {
        let is_known = DESCRIPTORS.get(self.fd).is_some_and(|found| found.stream().is_some());
        self.is_open() && (is_known || is_listener(self.fd))
    }
}

/// The members of a set.
fn members(set: c_int) -> Vec<Member> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{set}")).unwrap_or_default();
    text.lines().filter_map(Member::of_line).collect()
}

/// Whether a known set has a connection added without the library. Several numbers may be of one
/// set.
fn is_entered_without(fd: c_int, set: &DescriptorRef, member: &Member) -> bool {
    let Some(found) = DESCRIPTORS.get(member.fd) else { return false };
    let Some(socket) = found.stream() else { return false };
    if !matches!(socket.state(), SocketState::Undecided | SocketState::Deciding | SocketState::Smc)
    {
        return false;
    }
    let registrations = socket.registrations();
    let is_known = registrations
        .iter()
        .any(|known| known.set == fd || epoll_set_of(known.set).is_some_and(|known| known.is(set)));
    // With the lock no other thread is about to add or remove a member.
    !is_known && member.is_open() && members(fd).contains(member)
}

fn is_listener(fd: c_int) -> bool {
    let option = |name| raw::socket_option(fd, libc::SOL_SOCKET, name);
    option(libc::SO_ACCEPTCONN) == Ok(1) && option(libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_those_that_are_executed_and_no_librarys_of_the_system() {
        let line =
            |access: &str, path: &str| format!("1000-2000 {access} 00001000 fe:00 17   {path}");
        let of = |line: &str| executed_file(line.as_bytes(), 0x5000).map(|found| found.0);
        assert_eq!(of(&line("r-xp", "/opt/program with blanks")), Some(17));
        assert_eq!(of(&line("rw-p", "/opt/program")), None);
        assert_eq!(of(&line("r-xp", "[vdso]")), None);
        assert_eq!(executed_file(line("r-xp", "/opt/this").as_bytes(), 0x1fff), None);
        for (file, is_its) in [
            ("/usr/lib/x86_64-linux-gnu/libssl.so.3", true),
            ("/lib64/libm.so.6", true),
            ("/opt/glibc/libc.so.6", true),
            ("/usr/bin/nginx", false),
            ("/usr/lib/jvm/lib/server/libjvm.so", false),
            ("/home/x/lib/plugin.so", false),
        ] {
            assert_eq!(is_libcs(Path::new(file)), is_its, "{file}");
        }
    }

    #[test]
    fn the_lines_of_a_set_name_its_members() {
        let line = "tfd:        5 events:       19 data:                5  pos:0 ino:1b3 sdev:8";
        assert_eq!(Member::of_line(line), Some(Member { fd: 5, inode: 0x1b3 }));
        assert_eq!(Member::of_line("flags:\t02000002"), None);
    }
}
