// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's answers about this process. A seccomp filter may refuse the question. rustix panics then,
//! in a program able to go on, so libc asks.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A resource with a limit. The type of this number is libc's.
#[cfg(target_env = "gnu")]
pub(crate) type Resource = libc::__rlimit_resource_t;
/// A resource with a limit. The type of this number is libc's.
#[cfg(not(target_env = "gnu"))]
pub(crate) type Resource = libc::c_int;

/// The limit of a resource (`RLIMIT_FSIZE` and the like); `None`: there is none, or the kernel does not
/// tell.
pub fn resource_limit(resource: Resource) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is valid until the call returns.
    let asked = unsafe { libc::getrlimit(resource, &raw mut limit) };
    (asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Both limits of a resource; `None`: the kernel does not tell.
pub(crate) fn limit_of(resource: Resource) -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is valid until the call returns.
    (unsafe { libc::getrlimit(resource, &raw mut limit) } == 0).then_some(limit)
}

/// Sets the limits of a resource. `false`: the kernel refuses.
pub(crate) fn set_limit(resource: Resource, limit: libc::rlimit) -> bool {
    // SAFETY: the limit is valid until the call returns.
    unsafe { libc::setrlimit(resource, &raw const limit) == 0 }
}

/// Bytes of a page of memory.
///
/// libc knows the size. rustix would read the vDSO. The vDSO is not mapped after a start by another loader
/// than the kernel: valgrind, or a tool to restore a checkpoint.
pub fn page_size() -> usize {
    // SAFETY: a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The number of the calling thread; negative: unknown.
pub fn thread_number() -> i32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::gettid() }
}

/// The effective user of the process. The largest number if unknown.
pub fn effective_user() -> u32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::geteuid() }
}

/// The effective group of the process. The largest number if unknown.
pub fn effective_group() -> u32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::getegid() }
}

/// The name of this machine, and the release of its kernel; `None`: unknown.
pub fn machine() -> Option<(String, String)> {
    let text = |text: &[libc::c_char]| {
        let end = text.iter().take_while(|byte| **byte != 0);
        let bytes: Vec<u8> = end.flat_map(|byte| byte.to_ne_bytes()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut names = std::mem::MaybeUninit::<libc::utsname>::uninit();
    // SAFETY: the names are valid until the call returns.
    let asked = unsafe { libc::uname(names.as_mut_ptr()) };
    // SAFETY: the call has filled them.
    let names = (asked == 0).then(|| unsafe { names.assume_init() })?;
    Some((text(&names.nodename), text(&names.release)))
}

/// The path at the start of the program: maybe the path of a link or of a script.
pub fn started_as() -> Option<PathBuf> {
    // SAFETY: reads a table of the process.
    let at = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const libc::c_char;
    // SAFETY: the kernel's text lies above the stack as long as the process lives.
    let text = (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) })?.to_bytes();
    // A program started by its descriptor has no other name.
    let is_named = !text.is_empty() && !text.starts_with(b"/dev/fd/");
    is_named.then(|| OsStr::from_bytes(text).into())
}

/// Whether the process has the rights of its own user and group, and no others.
pub fn has_own_rights() -> bool {
    // SAFETY: the calls have no arguments.
    unsafe { libc::getuid() == libc::geteuid() && libc::getgid() == libc::getegid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_and_users_are_those_that_the_kernel_knows() {
        use rustix::process::{Resource, getegid, geteuid, getrlimit};
        let known = getrlimit(Resource::Nofile).current;
        assert_eq!(resource_limit(libc::RLIMIT_NOFILE), known);
        assert_eq!(effective_user(), geteuid().as_raw());
        #[allow(clippy::disallowed_methods, reason = "both ways say the same")]
        let page = rustix::param::page_size();
        assert_eq!(page_size(), page);
        assert!(has_own_rights());
        assert_eq!(effective_group(), getegid().as_raw());
        let known = rustix::system::uname();
        let (name, release) = machine().unwrap();
        assert_eq!(name.as_bytes(), known.nodename().to_bytes());
        assert_eq!(release.as_bytes(), known.release().to_bytes());
    }
}
