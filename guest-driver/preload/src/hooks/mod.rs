//! The exported functions. Each is thin: it looks the descriptor up, passes the call on if that is not
//! ours, and otherwise turns the program's pointers into slices for the rooms that do the work.

mod bytes;
mod descriptors;
mod fortify;
mod init;
mod libc_symbols;
mod readiness;
mod sockets;

use std::ffi::c_int;
use std::io::{IoSlice, IoSliceMut};

use crate::io::transfer::{self, Way};
use crate::sys::raw::Sys;
use crate::sys::table;

macro_rules! functions {
    ($($name:ident)*) => {
        /// libc's functions.
        #[allow(non_upper_case_globals, reason = "they have the names of the functions")]
        pub(in crate::hooks) mod real {
            use crate::hooks::libc_symbols::Next;
            $(pub(in crate::hooks) static $name: Next = {
                const NAME: &str = concat!(stringify!($name), "\0");
                match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) {
                    Ok(name) => Next::new(name),
                    Err(_) => Next::new(c""),
                }
            };)*
        }

        /// Looks all of them up.
        pub(super) fn find_all() {
            $(real::$name.find();)*
        }
    };
}

functions! {
    socket connect accept accept4 listen shutdown close dup dup2 dup3 fcntl ioctl
    getsockname getpeername getsockopt setsockopt read readv recv recvfrom recvmsg recvmmsg write writev send sendto sendmsg
    sendmmsg sendfile splice poll ppoll select pselect epoll_create epoll_create1 epoll_ctl epoll_wait
    epoll_pwait epoll_pwait2 open open64 openat openat64 eventfd timerfd_create memfd_create
}

/// Reads, if the descriptor is an SMC connection's. `None`: the kernel's affair.
#[inline]
fn recv_into(fd: c_int, bufs: &mut [IoSliceMut<'_>], flags: c_int) -> Option<Sys> {
    let sock = table::get(fd)?;
    match transfer::way(&sock, fd, flags & libc::MSG_DONTWAIT != 0) {
        Way::Native => None,
        Way::Smc(socket, stream) => Some(transfer::recv((socket, stream), bufs, flags)),
        Way::Fail(error) => Some(Err(error)),
    }
}

/// Writes, if the descriptor is an SMC connection's. `None`: the kernel's affair.
#[inline]
fn send_from(fd: c_int, bufs: &[IoSlice<'_>], flags: c_int) -> Option<Sys> {
    let sock = table::get(fd)?;
    match transfer::way_out(&sock, fd, flags & libc::MSG_DONTWAIT != 0) {
        Way::Native => None,
        Way::Smc(socket, stream) => Some(transfer::send((socket, stream), bufs, flags)),
        Way::Fail(error) => Some(Err(error)),
    }
}
