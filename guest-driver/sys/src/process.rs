// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the kernel says of this process. A filter of seccomp may refuse to let it ask. rustix panics
//! then, in a program that goes on otherwise, so libc asks.

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

/// The user whose rights the process has. The largest number if it is not known.
pub fn effective_user() -> u32 {
    // SAFETY: the call has no arguments.
    unsafe { libc::geteuid() }
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
        use rustix::process::{Resource, geteuid, getrlimit};
        let known = getrlimit(Resource::Nofile).current;
        assert_eq!(resource_limit(libc::RLIMIT_NOFILE), known);
        assert_eq!(effective_user(), geteuid().as_raw());
        assert!(has_own_rights());
    }
}
