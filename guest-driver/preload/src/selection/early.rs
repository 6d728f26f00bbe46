// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program has written before its connection was decided, on its way to TCP.

use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_driver::interpose::{BytePiece, ByteQueue};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::selection::running::{self, RUNNING_LOCK};
use crate::selection::transitions::{ActionInput, carry_out};
use crate::socket::pair::high;
use crate::socket::states::SocketEvent;
use crate::socket::table::DescriptorRef;
use crate::sys::{STACK, raw};

/// Completes the handshake: TCP carries the connection. What the program has written by now goes
/// first. If TCP does not take all of it, a thread completes the handshake when it does: as long as
/// that takes, the library keeps what the program writes. `tcp`: the connection.
pub(super) fn complete_with_tcp(descriptor: &DescriptorRef, fd: c_int, tcp: impl AsFd) {
    let tcp = tcp.as_fd();
    if send_kept(descriptor, tcp) || !complete_later(descriptor, fd, tcp) {
        complete_now(descriptor, fd, tcp);
    }
}

/// Completes the handshake of a connection on which nothing can be sent any more.
pub(super) fn complete_without_sending(descriptor: &DescriptorRef, fd: c_int) {
    carry_out(descriptor, fd, SocketEvent::EndOnTcp, ActionInput::Nothing);
}

fn complete_now(descriptor: &DescriptorRef, fd: c_int, tcp: BorrowedFd<'_>) {
    // What the program has written since the last look, and most often nothing.
    let send = |mut rest: ByteQueue| {
        while !send_some(&mut rest, tcp) {
            await_room(tcp);
        }
    };
    carry_out(descriptor, fd, SocketEvent::EndOnTcp, ActionInput::Send(&send));
}

/// Has a thread complete the handshake. `false`: there are no descriptors or threads left.
fn complete_later(descriptor: &DescriptorRef, fd: c_int, tcp: BorrowedFd<'_>) -> bool {
    let Ok(tcp) = tcp.try_clone_to_owned().map(high) else { return false };
    {
        let _running = RUNNING_LOCK.lock();
        running::begin(descriptor);
    }
    let of_thread = descriptor.clone();
    let thread = std::thread::Builder::new().name("smc-early".into()).stack_size(STACK);
    let body = move || send_and_complete(of_thread, fd, &tcp);
    let begun = raw::without_signals(|| thread.spawn(body)).is_ok();
    if !begun {
        running::end(descriptor.clone());
    }
    begun
}

fn send_and_complete(descriptor: DescriptorRef, fd: c_int, tcp: &OwnedFd) {
    while !send_kept(&descriptor, tcp.as_fd()) {
        await_room(tcp.as_fd());
    }
    complete_now(&descriptor, fd, tcp.as_fd());
    running::end(descriptor);
}

/// Sends what the library has kept, as far as TCP takes it. `false`: TCP is full.
fn send_kept(descriptor: &DescriptorRef, tcp: BorrowedFd<'_>) -> bool {
    descriptor.stream().is_none_or(|socket| send_some(&mut socket.undecided.early(), tcp))
}

/// Takes out of the queue what TCP takes. `false`: TCP is full. After an error the queue is empty:
/// the program's next call gets the error.
fn send_some(queue: &mut ByteQueue, tcp: BorrowedFd<'_>) -> bool {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        let sent = match queue.next() {
            BytePiece::Ordinary(bytes) => send(tcp, bytes, flags),
            BytePiece::Urgent(byte) => send(tcp, &[byte], flags | SendFlags::OOB),
            BytePiece::None => return true,
        };
        match sent {
            Ok(n) => queue.remove(n),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(_) => *queue = ByteQueue::default(),
        }
    }
}

/// Waits until TCP takes more, or has an error.
fn await_room(tcp: BorrowedFd<'_>) {
    let mut fds = [PollFd::new(&tcp, PollFlags::OUT)];
    let _ = rustix::event::poll(&mut fds, None);
}
