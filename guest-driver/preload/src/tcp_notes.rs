// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reasons for TCP of this process's connections, for `smc stat connections`.
//!
//! The first connection of a process on TCP makes the file. From then on a note is a store into memory.
//! A child of a fork writes into a file of its own. Notes on the child's inherited connections are in
//! the file of the parent, mapped by the child as well.

use std::ffi::c_int;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use guest_driver::Fallback;
use guest_driver::statistics::TcpReasons;
use ism_sys::OnceBox;

use crate::sys::{leaked, raw};
use crate::{config, fork};

static NOTES: AtomicPtr<TcpReasons> = AtomicPtr::new(std::ptr::null_mut());
/// The generation of the process after the attempt to make the file; 0: no attempt yet.
static MADE_BY: AtomicU32 = AtomicU32::new(0);

/// The reason for the end of the library's work, if all connections are concerned.
static OFF: OnceBox<Fallback> = OnceBox::new();
/// Calls needed to make the file, among the calls tried with filters.
const CALLS: [libc::c_long; 9] = [
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_mmap,
    libc::SYS_openat,
    libc::SYS_prlimit64,
    libc::SYS_statx,
    libc::SYS_unlinkat,
];

/// The notes of this process, if there are any. A child of vfork has the notes of its parent.
fn own() -> Option<&'static TcpReasons> {
    let made_by = MADE_BY.load(Ordering::Acquire);
    if made_by == 0 || made_by != fork::generation() {
        return None;
    }
    leaked(NOTES.load(Ordering::Acquire))
}

/// Notes the reason for TCP of a descriptor's connection.
pub(crate) fn note(fd: c_int, why: &Fallback) {
    if MADE_BY.load(Ordering::Acquire) != fork::generation() && !fork::shares_memory() {
        make();
    }
    if let Some(notes) = own() {
        notes.note(fd, why);
    }
}

/// Notes the reason for TCP of all further connections of this process: the library is about to be
/// switched off. There are no notes if a filter of system calls forbids to make the file.
pub(crate) fn note_all(why: Fallback, has_filter: bool) {
    let is_made = MADE_BY.load(Ordering::Acquire) == fork::generation();
    let may_make = || !has_filter || !CALLS.iter().any(|call| ism_sys::is_fatal(*call));
    if !is_made && may_make() {
        make();
    }
    // The first reason stays.
    let _ = OFF.set(why);
}

/// The reason for TCP of all connections of this process, after [`note_all`].
pub(crate) fn of_all() -> Option<&'static Fallback> {
    OFF.get()
}

/// Notes the reason for TCP of a connection unseen by the library. Other sockets have no note.
pub(crate) fn note_unseen(fd: c_int, why: &Fallback) {
    if raw::socket_option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Ok(libc::IPPROTO_TCP) {
        note_unless_known(fd, why);
    }
}

/// Notes the reason for TCP of a descriptor's connection, unless there is a note already.
pub(crate) fn note_unless_known(fd: c_int, why: &Fallback) {
    if !own().is_some_and(|notes| notes.has(fd)) {
        note(fd, why);
    }
}

/// Forgets the note of a descriptor: from now on the descriptor is another socket's.
#[inline]
pub(crate) fn forget(fd: c_int) {
    if MADE_BY.load(Ordering::Relaxed) != 0
        && let Some(notes) = own()
    {
        notes.forget(fd);
    }
}

#[cold]
fn make() {
    let Some(config) = config::get() else { return };
    let now = fork::generation();
    // One thread makes the file; others note their connections from then on.
    if MADE_BY.swap(now, Ordering::AcqRel) == now {
        return;
    }
    // The parent's file is not this process's to write.
    NOTES.store(std::ptr::null_mut(), Ordering::Release);
    let create = || TcpReasons::create(&config.statistics_of_now()?).ok();
    if let Some(notes) = raw::without_signals(create) {
        NOTES.store(Box::into_raw(Box::new(notes)), Ordering::Release);
    }
}

/// Removes the file, when the program ends.
pub(crate) fn remove() {
    if let Some(notes) = own() {
        notes.remove();
    }
}
