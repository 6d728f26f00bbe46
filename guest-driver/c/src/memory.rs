// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Access to memory behind the caller's pointers. Each pointer is checked for NULL; for other values the
//! caller promises the validity documented in the header.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{IoSlice, IoSliceMut};

use crate::error::Error;

/// Most pieces of a list (IOV_MAX).
const MAX_PIECES: usize = 1024;

fn null(what: &'static str) -> Error {
    Error::new(libc::EINVAL, what)
}

/// The object behind a pointer.
///
/// # Safety
/// `at` leads to a valid `T`, unchanged and not freed during the call, or is NULL.
pub(crate) unsafe fn object<'a, T>(at: *const T, what: &'static str) -> Result<&'a T, Error> {
    // SAFETY: the caller's promise.
    unsafe { at.as_ref() }.ok_or_else(|| null(what))
}

/// A text.
///
/// # Safety
/// `at` leads to a string with a zero byte at its end, or is NULL.
pub(crate) unsafe fn text<'a>(at: *const c_char, what: &'static str) -> Result<&'a str, Error> {
    if at.is_null() {
        return Err(null(what));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(at) };
    text.to_str()
        .map_err(|_| Error::new(libc::EINVAL, format!("{:?} is no UTF-8", text.to_string_lossy())))
}

/// Like [`text`]; NULL is no text.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_text<'a>(at: *const c_char) -> Result<Option<&'a str>, Error> {
    match at.is_null() {
        true => Ok(None),
        // SAFETY: the caller's promise.
        false => unsafe { text(at, "") }.map(Some),
    }
}

fn check_len(at: *const c_void, len: usize) -> Result<(), Error> {
    if len > isize::MAX as usize {
        return Err(Error::new(libc::EINVAL, format!("a length of {len} bytes")));
    }
    match at.is_null() && len > 0 {
        true => Err(null("the buffer is NULL")),
        false => Ok(()),
    }
}

/// Bytes to send.
///
/// # Safety
/// `at` leads to `len` readable bytes, or is NULL.
pub(crate) unsafe fn bytes<'a>(at: *const c_void, len: usize) -> Result<&'a [u8], Error> {
    check_len(at, len)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), len) })
}

/// Room for bytes.
///
/// # Safety
/// `at` leads to `len` writable bytes, or is NULL.
pub(crate) unsafe fn room<'a>(at: *mut c_void, len: usize) -> Result<&'a mut [u8], Error> {
    check_len(at, len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), len) })
}

/// The pieces of a list.
///
/// # Safety
/// `iov` leads to `count` entries, or is NULL.
unsafe fn pieces<'a>(iov: *const libc::iovec, count: c_int) -> Result<&'a [libc::iovec], Error> {
    let n = usize::try_from(count).ok().filter(|n| *n <= MAX_PIECES);
    let n = n.ok_or_else(|| Error::new(libc::EINVAL, format!("{count} pieces")))?;
    if iov.is_null() {
        return Err(null("the list of pieces is NULL"));
    }
    // SAFETY: the caller's promise.
    let list = unsafe { std::slice::from_raw_parts(iov, n) };
    let sum = list.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.iov_len));
    match sum > isize::MAX as usize {
        true => Err(Error::new(libc::EINVAL, "the pieces are longer than SSIZE_MAX")),
        false => Ok(list),
    }
}

/// Pieces to send.
///
/// # Safety
/// `iov` leads to `count` entries. Each entry leads to readable bytes or is NULL.
pub(crate) unsafe fn bytes_of<'a>(
    iov: *const libc::iovec,
    count: c_int,
) -> Result<Vec<IoSlice<'a>>, Error> {
    // SAFETY: the caller's promise.
    let list = unsafe { pieces(iov, count) }?;
    let piece = |piece: &libc::iovec| {
        // SAFETY: the caller's promise.
        unsafe { bytes(piece.iov_base, piece.iov_len) }.map(IoSlice::new)
    };
    list.iter().filter(|piece| piece.iov_len > 0).map(piece).collect()
}

/// Pieces of room.
///
/// # Safety
/// `iov` leads to `count` entries. Each entry leads to writable bytes or is NULL.
pub(crate) unsafe fn room_of<'a>(
    iov: *const libc::iovec,
    count: c_int,
) -> Result<Vec<IoSliceMut<'a>>, Error> {
    // SAFETY: the caller's promise.
    let list = unsafe { pieces(iov, count) }?;
    let piece = |piece: &libc::iovec| {
        // SAFETY: the caller's promise.
        unsafe { room(piece.iov_base, piece.iov_len) }.map(IoSliceMut::new)
    };
    list.iter().filter(|piece| piece.iov_len > 0).map(piece).collect()
}

/// Writes a value as long as the caller's room, or shorter. Returns the number of bytes.
///
/// # Safety
/// `at` leads to `*len` writable bytes, and `len` to a valid number, or either is NULL.
pub(crate) unsafe fn write_value(
    value: &[u8],
    at: *mut c_void,
    len: *mut libc::socklen_t,
    may_be_cut: bool,
) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    let len = unsafe { len.as_mut() }.ok_or_else(|| null("the length is NULL"))?;
    let n = (*len as usize).min(value.len());
    if n < value.len() && !may_be_cut {
        return Err(Error::new(libc::EINVAL, format!("{len} bytes instead of {}", value.len())));
    }
    if at.is_null() {
        return Err(null("the place for the value is NULL"));
    }
    // SAFETY: the caller's promise.
    let room = unsafe { room(at, n) }?;
    room.copy_from_slice(value.get(..n).unwrap_or_default());
    *len = value.len() as libc::socklen_t;
    Ok(())
}
