// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets of the kernel's AF_SMC for the processes of an existing cgroup.
//!
//! The kernel detaches the program of [`super::kernel_sockets`] with the last reference to the program's link.
//! No process stays for a grant, so two files in the file system of BPF are the grant:
//!
//! ```text
//! /sys/fs/bpf/smc/INODE/link
//! /sys/fs/bpf/smc/INODE/cgroup -> /sys/fs/cgroup/system.slice/redis.service
//! ```
//!
//! INODE is the inode number of the cgroup's directory: the kernel gives each cgroup another number, also a
//! cgroup that is made again. The kernel does not remove the files with the cgroup. The next grant does.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use rustix::net::Protocol;

use super::kernel_sockets::{KernelSockets, NoKernelSockets, SMC, attach_for};
use super::{bpf, cgroup};

const GRANTS: &str = "/sys/fs/bpf/smc";
const LINK: &str = "link";
const CGROUP: &str = "cgroup";

impl KernelSockets {
    /// Gives the processes of a cgroup, and of its descendants, sockets of AF_SMC until
    /// [`KernelSockets::revoke`], or until the cgroup goes. An existing grant of the cgroup is kept.
    ///
    /// # Errors
    /// `cgroup` is no directory of cgroup v2, or is the root of all; or the missing precondition.
    pub fn grant(cgroup: &Path) -> Result<(), NoKernelSockets> {
        grant(SMC, cgroup)
    }

    /// Takes a grant back; `false`: there is none. Existing sockets stay as they are. The kernel ends the link
    /// some milliseconds later; sockets made until then are sockets of AF_SMC.
    ///
    /// # Errors
    /// `cgroup` is no directory of cgroup v2, or is the root of all; or a file of the grant stays.
    pub fn revoke(cgroup: &Path) -> Result<bool, NoKernelSockets> {
        revoke(cgroup)
    }
}

fn grant(protocol: Protocol, cgroup: &Path) -> Result<(), NoKernelSockets> {
    let (directory, path) = cgroup::open_below_root(cgroup)?;
    remove_old()?;
    let grant = of_cgroup(&directory)?;
    let link = grant.join(LINK);
    if link.exists() {
        return Ok(());
    }
    let attached = attach_for(protocol, &directory)?;
    match fs::DirBuilder::new().mode(0o700).create(GRANTS) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            check_owner(Path::new(GRANTS))?
        }
        made => made.map_err(at(Path::new(GRANTS)))?,
    }
    // An interrupted grant left files without a link.
    remove(&grant)?;
    fs::create_dir(&grant).map_err(at(&grant))?;
    let path = fs::canonicalize(&path).map_err(at(&path))?;
    symlink(path, grant.join(CGROUP)).map_err(at(&grant))?;
    bpf::pin(attached.as_fd(), &link).map_err(at(&link))
}

fn revoke(cgroup: &Path) -> Result<bool, NoKernelSockets> {
    let (directory, _) = cgroup::open_below_root(cgroup)?;
    remove_old()?;
    let grant = of_cgroup(&directory)?;
    let exists = grant.join(LINK).exists();
    remove(&grant)?;
    Ok(exists)
}

/// Refuses a directory of grants made by another user: everyone may make directories in the file system of
/// BPF, unless it is mounted for root only.
fn check_owner(grants: &Path) -> Result<(), NoKernelSockets> {
    let found = match fs::symlink_metadata(grants) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(at(grants))?,
    };
    let is_own = found.is_dir() && found.uid() == ism_sys::effective_user();
    match is_own && found.mode() & 0o022 == 0 {
        true => Ok(()),
        false => Err(at(grants)(io::ErrorKind::PermissionDenied.into())),
    }
}

fn of_cgroup(directory: &fs::File) -> Result<PathBuf, NoKernelSockets> {
    let about = directory.metadata().map_err(at(Path::new(GRANTS)))?;
    Ok(Path::new(GRANTS).join(about.ino().to_string()))
}

/// Removes the grants of cgroups that have gone.
fn remove_old() -> Result<(), NoKernelSockets> {
    check_owner(Path::new(GRANTS))?;
    for grant in fs::read_dir(GRANTS).into_iter().flatten().flatten() {
        let exists = fs::metadata(grant.path().join(CGROUP))
            .is_ok_and(|cgroup| grant.file_name() == *cgroup.ino().to_string());
        if !exists {
            remove(&grant.path())?;
        }
    }
    Ok(())
}

/// Removes a grant, if there is one. The link goes first.
fn remove(grant: &Path) -> Result<(), NoKernelSockets> {
    for (path, remove) in [
        (grant.join(LINK), fs::remove_file as fn(PathBuf) -> io::Result<()>),
        (grant.join(CGROUP), fs::remove_file),
        (grant.to_owned(), fs::remove_dir),
    ] {
        match remove(path.clone()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&path)(error)),
            _ => {}
        }
    }
    Ok(())
}

fn at(path: &Path) -> impl Fn(io::Error) -> NoKernelSockets {
    move |error| NoKernelSockets::Files { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use rustix::net::ipproto;

    use super::super::cgroup::Temporary;
    use super::super::kernel_sockets::tests::*;
    use super::*;

    /// With MPTCP in place of AF_SMC: kernels with MPTCP are common. Takes root.
    #[test]
    fn a_grant_lasts_until_it_is_revoked_or_the_cgroup_goes() {
        if child_prints() {
            return;
        }
        let make = || Temporary::make(&format!("smc-test-grant-{}", std::process::id()));
        let grants = |cgroup: &Temporary| of_cgroup(&cgroup.open().unwrap()).unwrap();
        let Ok(made) = make() else { return skipped("no cgroup can be made") };
        if let Err(why) = grant(ipproto::MPTCP, made.path()) {
            return skipped(&why.to_string());
        }
        grant(ipproto::MPTCP, made.path()).expect("a second grant changes nothing");
        assert_child_gets(MPTCP, made.path());
        assert_eq!(protocols(), TCP, "outside of the cgroup");
        assert!(revoke(made.path()).unwrap());
        // The kernel ends the link some time after its file.
        let end = Instant::now() + Duration::from_secs(60);
        while !child_gets(TCP, made.path()) {
            assert!(Instant::now() < end, "there is still a link");
        }
        assert!(!revoke(made.path()).unwrap(), "there is no grant any more");

        grant(ipproto::MPTCP, made.path()).unwrap();
        let old = grants(&made);
        drop(made);
        let made = make().unwrap();
        assert_child_gets(TCP, made.path());
        assert!(old.join(LINK).exists());
        grant(ipproto::MPTCP, made.path()).unwrap();
        assert!(!old.exists(), "the next grant removes it");
        assert!(revoke(made.path()).unwrap());
    }

    #[test]
    fn a_directory_of_grants_that_others_can_change_is_refused() {
        let own = std::env::temp_dir().join(format!("smc-test-grants-{}", std::process::id()));
        assert!(check_owner(&own).is_ok(), "there is none yet");
        fs::DirBuilder::new().mode(0o700).create(&own).unwrap();
        let by_link = own.join("link");
        symlink(&own, &by_link).unwrap();
        let results = [check_owner(&own).is_ok(), check_owner(&by_link).is_ok()];
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        let open = check_owner(&own).is_ok();
        fs::remove_dir_all(&own).unwrap();
        assert_eq!((results, open), ([true, false], false));
    }

    #[test]
    fn the_root_of_all_cgroups_gets_no_grant() {
        let none = grant(ipproto::MPTCP, Path::new("/sys/fs/cgroup")).unwrap_err().to_string();
        assert!(none.contains("no cgroup below the root"), "{none}");
    }
}
