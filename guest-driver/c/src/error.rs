// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors: an errno, and words.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;

/// Reason of a failed call.
#[derive(Debug)]
pub(crate) struct Error {
    /// The value of errno.
    code: c_int,
    /// More than the text of strerror(3).
    text: Option<Cow<'static, str>>,
}

impl Error {
    /// An error with the text of strerror(3).
    pub(crate) const fn of_code(code: c_int) -> Error {
        Error { code, text: None }
    }

    /// An error with its own words.
    pub(crate) fn new(code: c_int, text: impl Into<Cow<'static, str>>) -> Error {
        Error { code, text: Some(text.into()) }
    }

    /// The errno.
    pub(crate) fn code(&self) -> c_int {
        self.code
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        let code = error.raw_os_error().unwrap_or_else(|| code_of(error.kind()));
        // A frequent error, such as EAGAIN, has no text of its own.
        let text = error.get_ref().map(|inner| inner.to_string().into());
        Error { code, text }
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Error {
        Error::of_code(error.raw_os_error())
    }
}

/// The errno of an error not returned by a system call.
pub(crate) fn code_of(kind: io::ErrorKind) -> c_int {
    use io::ErrorKind as K;
    match kind {
        K::WouldBlock => libc::EAGAIN,
        K::BrokenPipe => libc::EPIPE,
        K::ConnectionReset => libc::ECONNRESET,
        K::ConnectionAborted => libc::ECONNABORTED,
        K::ConnectionRefused => libc::ECONNREFUSED,
        K::NotConnected => libc::ENOTCONN,
        K::TimedOut => libc::ETIMEDOUT,
        K::Interrupted => libc::EINTR,
        K::InvalidInput => libc::EINVAL,
        K::InvalidData => libc::EPROTO,
        K::OutOfMemory => libc::ENOMEM,
        K::PermissionDenied => libc::EACCES,
        K::ResourceBusy => libc::EBUSY,
        K::UnexpectedEof => libc::ECONNRESET,
        _ => libc::EIO,
    }
}

/// The last error of a thread.
enum Last {
    None,
    /// Turned into text only on request.
    Code(c_int),
    Text(CString),
}

thread_local! {
    static LAST: RefCell<Last> = const { RefCell::new(Last::None) };
}

/// Takes note of an error, and sets errno.
pub(crate) fn set(error: Error) {
    let last = match error.text {
        Some(text) => Last::Text(to_c(text.into_owned())),
        None => Last::Code(error.code),
    };
    // A destructor of the thread may call when the place is gone.
    let _ = LAST.try_with(|place| {
        if let Ok(mut place) = place.try_borrow_mut() {
            *place = last;
        }
    });
    set_errno(error.code);
}

/// The words of the last error of this thread; "" if there was none.
pub(crate) fn last() -> *const c_char {
    let text = LAST.try_with(|place| {
        let mut place = place.try_borrow_mut().ok()?;
        if let Last::Code(code) = *place {
            *place = Last::Text(to_c(words(code)));
        }
        match &*place {
            Last::Text(text) => Some(text.as_ptr()),
            _ => None,
        }
    });
    text.ok().flatten().unwrap_or(c"".as_ptr())
}

/// A text for C, cut at the first zero byte.
fn to_c(mut text: String) -> CString {
    if let Some(end) = text.find('\0') {
        text.truncate(end);
    }
    CString::new(text).unwrap_or_default()
}

/// The text of strerror(3).
fn words(code: c_int) -> String {
    let mut room = [0u8; 128];
    // SAFETY: the room is as long as the call is told.
    unsafe { libc::strerror_r(code, room.as_mut_ptr().cast(), room.len()) };
    CStr::from_bytes_until_nul(&room).unwrap_or_default().to_string_lossy().into_owned()
}

fn set_errno(code: c_int) {
    // SAFETY: the address is the address of this thread's errno.
    unsafe { *libc::__errno_location() = code };
}

/// The errno of this thread.
pub(crate) fn errno() -> c_int {
    // SAFETY: the address is the address of this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Restores an errno, not to be changed by a call.
pub(crate) fn restore_errno(code: c_int) {
    set_errno(code);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said() -> String {
        // SAFETY: the text is valid until the next error of this thread.
        unsafe { CStr::from_ptr(last()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn the_last_error_of_a_thread_has_its_own_words_or_those_of_strerror() {
        assert_eq!(said(), "");
        set(io::Error::from_raw_os_error(libc::EAGAIN).into());
        assert_eq!((errno(), &*said()), (libc::EAGAIN, "Resource temporarily unavailable"));
        set(Error::new(libc::EINVAL, "the port 0"));
        assert_eq!((errno(), &*said()), (libc::EINVAL, "the port 0"));
        std::thread::spawn(|| assert_eq!(said(), "")).join().unwrap();
        set(io::Error::new(io::ErrorKind::TimedOut, "a\0b").into());
        assert_eq!((errno(), &*said()), (libc::ETIMEDOUT, "a"));
    }

    #[test]
    fn a_code_that_no_system_has_is_named_as_well() {
        set(Error::of_code(123_456));
        assert_eq!(said(), "Unknown error 123456");
    }
}
