// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! libc's functions behind the names of the hooks. The library looks the functions up once, when it
//! is loaded: a look-up may allocate, and an allocator may call a hook.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::sys::elf::{LoadedObject, SymbolResult};

/// A function of libc.
pub(in crate::hooks) struct Symbol {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Symbol {
    pub(in crate::hooks) const fn new(name: &'static CStr) -> Symbol {
        Symbol { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Looks the function up.
    pub(in crate::hooks) fn find(&self) {
        // SAFETY: the name ends with a zero byte.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Release);
    }

    /// Variant of [`Symbol::find`] in the objects behind this library. For each missing function
    /// the linker would take memory of the program's heap.
    fn find_in(&self, behind: &[Option<LoadedObject>]) {
        for object in behind {
            match object.as_ref().map(|object| object.find(self.name)) {
                Some(SymbolResult::Function(found)) => {
                    return self.found.store(found as *mut c_void, Ordering::Release);
                }
                Some(SymbolResult::Absent) => {}
                Some(SymbolResult::Other) | None => return self.find(),
            }
        }
    }

    /// The address, if the function was found.
    #[inline]
    pub(in crate::hooks) fn get(&self) -> Option<*mut c_void> {
        let found = self.found.load(Ordering::Relaxed);
        (!found.is_null()).then_some(found)
    }
}

macro_rules! functions {
    ($($name:ident)*) => {
        /// libc's functions.
        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        pub(in crate::hooks) mod symbols {
            use super::Symbol;
            $(pub(in crate::hooks) static $name: Symbol = {
                const NAME: &str = concat!(stringify!($name), "\0");
                match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) {
                    Ok(name) => Symbol::new(name),
                    Err(_) => Symbol::new(c""),
                }
            };)*
        }

        /// Looks all functions up. `behind`: the objects in the linker's search order after this
        /// library.
        pub(super) fn find_all(behind: &[Option<LoadedObject>]) {
            [$(&symbols::$name),*].into_iter().for_each(|symbol| symbol.find_in(behind));
        }

        /// The names and addresses of the found functions. Each is libc's, or a wrapper of libc's
        /// in another library.
        pub(super) fn found() -> impl Iterator<Item = (&'static CStr, *mut c_void)> {
            let all = [$(&symbols::$name),*];
            all.into_iter().filter_map(|symbol| Some((symbol.name, symbol.get()?)))
        }
    };
}

functions! {
    socket connect accept accept4 listen shutdown close dup dup2 dup3 fcntl ioctl getsockname
    getpeername getsockopt setsockopt read readv recv recvfrom recvmsg recvmmsg write writev send
    sendto sendmsg sendmmsg sendfile splice poll ppoll select pselect epoll_create epoll_create1
    epoll_ctl epoll_wait epoll_pwait epoll_pwait2 open open64 openat openat64 eventfd
    timerfd_create memfd_create inotify_init1 signalfd pipe pipe2 __pipe __open __open64 socketpair fdopen fclose dprintf vdprintf __dprintf_chk
    __vdprintf_chk fork vfork posix_spawn posix_spawnp posix_spawn_file_actions_adddup2
    posix_spawn_file_actions_destroy system popen aio_read aio_read64 aio_write aio_write64
    lio_listio lio_listio64 execve execv execvp execvpe fexecve execveat clone _Fork daemon unshare setns
    mlockall prctl
    sigaction signal sigset pthread_cancel pthread_exit dlopen dlmopen __libc_system pidfd_spawn pidfd_spawnp _IO_popen backtrace_symbols_fd
    setuid seteuid setreuid setresuid chroot
}

/// `call_libc!(name, number, (a: type, ...) -> type)`: calls libc's function. Before `init` has run
/// the macro makes the system call instead; `number` is -1 if there is none.
macro_rules! call_libc {
    ($name:ident, $number:expr, ($($arg:ident : $type:ty),*) -> $result:ty) => {{
        let number: i64 = $number;
        if number < 0 && $crate::hooks::libc_symbols::symbols::$name.get().is_none() {
            // The program called before `init` ran, and the kernel has no such call.
            $crate::hooks::libc_symbols::symbols::$name.find();
        }
        let known = $crate::hooks::libc_symbols::symbols::$name.get();
        match known {
            Some(function) => {
                type Function = unsafe extern "C-unwind" fn($($type),*) -> $result;
                let function = {
                    // SAFETY: libc's function of this name has this type.
                    unsafe { std::mem::transmute::<*mut libc::c_void, Function>(function) }
                };
                // SAFETY: the program's arguments, unchanged.
                let result = unsafe { function($($arg),*) };
                if result as isize == -1 {
                    $crate::sys::user_memory::share_errno();
                }
                result
            }
            None => {
                let mut all = [0usize; 6];
                let given = [$($arg as usize),*];
                all.iter_mut().zip(given).for_each(|(slot, value)| *slot = value);
                // SAFETY: the program's arguments, unchanged.
                let result = unsafe { $crate::sys::raw::call(number, all) };
                $crate::sys::user_memory::libc_result(result) as $result
            }
        }
    }};
}
pub(super) use call_libc;
