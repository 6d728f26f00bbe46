// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's answers about this process. A seccomp filter may refuse the question. rustix panics then,
//! in a program able to go on, so libc asks.

/// The limit of a resource (`RLIMIT_FSIZE` and the like); `None`: there is none, or it is not known.
pub fn resource_limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is valid until the call returns.
    let asked = unsafe { libc::getrlimit(resource, &raw mut limit) };
    (asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// The number of the calling thread; negative: it is not known.
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
        let bytes: Vec<u8> = end.map(|byte| byte.cast_unsigned()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let mut names = std::mem::MaybeUninit::<libc::utsname>::uninit();
    // SAFETY: the names are valid until the call returns.
    let asked = unsafe { libc::uname(names.as_mut_ptr()) };
    // SAFETY: the call has filled them.
    let names = (asked == 0).then(|| unsafe { names.assume_init() })?;
    Some((text(&names.nodename), text(&names.release)))
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
        assert!(has_own_rights());
        assert_eq!(effective_group(), getegid().as_raw());
        let known = rustix::system::uname();
        let (name, release) = machine().unwrap();
        assert_eq!(name.as_bytes(), known.nodename().to_bytes());
        assert_eq!(release.as_bytes(), known.release().to_bytes());
    }
}
