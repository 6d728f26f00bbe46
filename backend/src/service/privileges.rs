// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The user and the capabilities of the daemon's processes.

use std::io;
use std::path::Path;

use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use thiserror::Error;

/// The user a daemon started as root becomes, if present.
pub(crate) const DEFAULT_USER: &str = "vhost-device-ism";

/// Why a user cannot be used.
#[derive(Debug, Error)]
pub(crate) enum UserError {
    /// The user is neither in /etc/passwd nor a number.
    #[error("there is no user {0:?} in /etc/passwd; give a name, or numbers as UID:GID")]
    Unknown(String),
    /// Only root can become another user.
    #[error("--user needs to be started as root")]
    NotRoot,
    /// The user is root.
    #[error("--user {0:?} is root, which is no restriction")]
    Root(String),
    /// The kernel refuses.
    #[error("cannot give up rights: {0}")]
    System(#[from] io::Error),
}

/// A user and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// The daemon's future user: `wanted`, or else the default user. `None`: no change.
    ///
    /// # Errors
    /// See [`UserError`].
    pub(crate) fn choose(wanted: Option<&str>) -> Result<Option<User>, UserError> {
        let passwd = || std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        match wanted {
            Some(_) if !geteuid().is_root() => Err(UserError::NotRoot),
            Some(text) => find(text, &passwd()).map(Some),
            None if geteuid().is_root() => Ok(find(DEFAULT_USER, &passwd()).ok()),
            None => Ok(None),
        }
    }
}

/// Reads a user: a name of `passwd`, or UID:GID.
fn find(text: &str, passwd: &str) -> Result<User, UserError> {
    let named = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let (uid, gid) = (fields.nth(1)?, fields.next()?);
        (name == text).then_some(())?;
        Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    });
    let numbers = || {
        let (uid, gid) = text.split_once(':')?;
        Some(User { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    };
    let user = named.or_else(numbers).ok_or_else(|| UserError::Unknown(text.into()))?;
    // The kernel takes -1 as "no change".
    if user.uid == u32::MAX || user.gid == u32::MAX {
        return Err(UserError::Unknown(text.into()));
    }
    if user.uid == 0 { Err(UserError::Root(text.into())) } else { Ok(user) }
}

/// Becomes `user`, without capabilities; without a user, keeps only the capabilities `keep`. Affects only
/// this thread and threads started later, so to be called before any other threads.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn give_up(user: Option<User>, keep: CapabilitySet) -> io::Result<()> {
    let now = capabilities(None)?;
    if now.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().difference(keep).iter() {
            // Fails for a capability unknown to this kernel.
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    if let Some(User { uid, gid }) = user {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
    }
    if now.permitted.is_empty() {
        return Ok(());
    }
    let left = if user.is_some() { CapabilitySet::empty() } else { now.permitted & keep };
    set_capabilities(
        None,
        CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() },
    )?;
    Ok(())
}

/// Makes a permanently empty directory the root of this process. `false`: missing permission, or no place for
/// such a directory.
pub(crate) fn enter_empty_root() -> bool {
    let may = capabilities(None).is_ok_and(|now| now.effective.contains(CapabilitySet::SYS_CHROOT));
    may && ["/run", "/tmp", "/var/tmp"]
        .iter()
        .any(|parent| try_empty_root(Path::new(parent)).is_ok())
}

fn try_empty_root(parent: &Path) -> io::Result<()> {
    let path = parent.join(format!("vhost-device-ism-{}", uuid::Uuid::new_v4()));
    rustix::fs::mkdir(&path, rustix::fs::Mode::empty())?;
    let directory = rustix::fs::open(
        &path,
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    );
    // A directory without a name stays empty.
    rustix::fs::rmdir(&path)?;
    rustix::process::fchdir(directory?)?;
    rustix::process::chroot(".")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nism:x:990:991::/:/usr/sbin/nologin\nbad:x:y:z::/:/\n";

    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(find("ism", PASSWD).unwrap(), User { uid: 990, gid: 991 });
        assert_eq!(find("7:8", PASSWD).unwrap(), User { uid: 7, gid: 8 });
        for unknown in ["", "is", "bad", "7", "7:", ":8", "4294967295:8", "7:4294967295", "x:y"] {
            assert!(matches!(find(unknown, PASSWD), Err(UserError::Unknown(_))), "{unknown:?}");
        }
        for root in ["root", "0:8"] {
            assert!(matches!(find(root, PASSWD), Err(UserError::Root(_))), "{root:?}");
        }
    }
}
