// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes written by the program before its connection was decided, on their way to TCP.

use std::os::fd::BorrowedFd;

use guest_driver::interpose::{BytePiece, ByteQueue};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::socket::table::DescriptorRef;

/// Sends a queue, and waits until TCP has taken all of it.
pub(super) fn send_all(mut queue: ByteQueue, tcp: BorrowedFd<'_>) {
    while !send_some(&mut queue, tcp) {
        await_room(tcp);
    }
}

/// Sends the kept bytes, as far as TCP takes them. `false`: TCP is full.
pub(super) fn send_kept(descriptor: &DescriptorRef, tcp: BorrowedFd<'_>) -> bool {
    descriptor.stream().is_none_or(|socket| send_some(&mut socket.undecided.early(), tcp))
}

/// Removes the bytes taken by TCP from the queue. `false`: TCP is full. After an error the queue is
/// empty: the program's next call gets the error.
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
pub(super) fn await_room(tcp: BorrowedFd<'_>) {
    let mut fds = [PollFd::new(&tcp, PollFlags::OUT)];
    let _ = rustix::event::poll(&mut fds, None);
}
