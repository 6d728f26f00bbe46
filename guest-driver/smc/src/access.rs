// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds the obstacle between this user and a socket, and a command to remove the obstacle.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Access, AtFlags, CWD};

/// The reason why this user cannot reach a socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Obstacle {
    /// Description of the obstacle, with owner and mode.
    pub(crate) says: String,
    /// The command giving access, for an administrator with the rights to run the command.
    pub(crate) grant: Option<String>,
}

/// The first directory on the way to a socket, or the socket itself, closed to this user. `None`:
/// this user has access.
pub(crate) fn obstacle(socket: &Path) -> Option<Obstacle> {
    obstacle_for(socket, may_use)
}

fn may_use(path: &Path, access: Access) -> bool {
    rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS).is_ok()
}

fn obstacle_for(socket: &Path, may_use: impl Fn(&Path, Access) -> bool) -> Option<Obstacle> {
    let whole = std::path::absolute(socket).ok()?;
    let mut directories: Vec<&Path> = whole.ancestors().skip(1).collect();
    directories.reverse();
    for directory in directories {
        let data = directory.metadata().ok()?;
        if !may_use(directory, Access::EXEC_OK) {
            let says = format!("the directory {} is closed to you", directory.display());
            return Some(described(&says, directory, &data, 0o010));
        }
    }
    let data = whole.metadata().ok()?;
    if !data.file_type().is_socket() {
        return Some(Obstacle { says: "it is no socket".into(), grant: None });
    }
    if may_use(&whole, Access::WRITE_OK) {
        return None;
    }
    Some(described("you may not write it", &whole, &data, 0o020))
}

/// `bit`: the permission needed by members of the group.
fn described(says: &str, path: &Path, data: &Metadata, bit: u32) -> Obstacle {
    let (user, group) = (name_of(PASSWD, data.uid()), name_of(GROUP, data.gid()));
    let mode = data.mode() & 0o777;
    let says = format!("{says}: user {user}, group {group}, mode {mode:o}");
    let own = rustix::process::geteuid().as_raw();
    let grant = match data.mode() & bit != 0 && data.gid() != 0 {
        true => {
            format!("usermod -aG {group} {}     # as root; then log in again", name_of(PASSWD, own))
        }
        false => {
            let rights = if bit == 0o010 { "x" } else { "rw" };
            let who = if data.uid() == 0 { "root".to_owned() } else { format!("{user} or root") };
            format!("setfacl -m u:{own}:{rights} {}     # as {who}", path.display())
        }
    };
    Obstacle { says, grant: Some(grant) }
}

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// The name of a user or group, or else its number.
fn name_of(file: &str, id: u32) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let named = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| id.to_string())
}

/// A sentence or two for the user about a socket without access.
pub(crate) fn hint(socket: &Path) -> Option<String> {
    let Obstacle { says, grant } = obstacle(socket)?;
    let end = match grant {
        Some(grant) => format!(" What lets you in: {grant}"),
        None => String::new(),
    };
    Some(format!("You may not connect to {}: {says}.{end}", socket.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_first_closed_directory_is_named_and_not_the_socket() {
        let top = smc_test_support::TestDir::new();
        let closed = top.path("closed");
        std::fs::create_dir_all(&closed).unwrap();
        let socket = closed.join("any.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(obstacle_for(&socket, |_, _| true), None);
        let is_closed = |path: &Path, _: Access| path != closed;
        std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o700)).unwrap();
        let Obstacle { says, grant } = obstacle_for(&socket, is_closed).unwrap();
        assert!(says.contains(&format!("the directory {} is", closed.display())), "{says}");
        let grant = grant.unwrap();
        assert!(grant.contains(&format!(":x {}", closed.display())), "{grant}");
        let not_written = |_: &Path, access: Access| access != Access::WRITE_OK;
        let Obstacle { says, grant } = obstacle_for(&socket, not_written).unwrap();
        assert!(says.contains("you may not write it"), "{says}");
        assert!(grant.is_some());
    }

    #[test]
    fn nobody_is_told_to_open_a_file_that_is_no_socket() {
        let found = obstacle_for(Path::new("/etc/passwd"), |_, access| access != Access::WRITE_OK);
        assert_eq!(found, Some(Obstacle { says: "it is no socket".into(), grant: None }));
    }

    #[test]
    fn names_are_read_and_numbers_stay() {
        assert_eq!(name_of(PASSWD, 0), "root");
        assert_eq!(name_of(GROUP, 3_999_999_999), "3999999999");
    }
}
