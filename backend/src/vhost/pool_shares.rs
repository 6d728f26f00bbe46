// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The decision about another device of a pool.
//!
//! The kernel tells the user and the network namespace of the asking process. Neither alone is enough. A user
//! of the host can make any number of network namespaces, by making user namespaces. A container running as
//! root can become any user, but stays in its namespace.
//!
//! So a device counts for both. An asker with devices in the namespace gets another only if its namespace has
//! fewer devices than are free, and its user has fewer than are free (the dynamic threshold of shared
//! buffers): so no user and no namespace takes more than half. An asker without devices in the namespace gets
//! one if fewer users have devices in its namespace than devices are free, and its user has devices in fewer
//! namespaces than devices are free. So a user with its half leaves devices for the other users of the same
//! namespace, and a container leaves some for other containers with the same user id.
//!
//! User 0 is not limited as a user: user 0 is the administrator and the containers the administrator has
//! started. User ids given to a user by `/etc/subuid` count as this user.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, OnceLock};

use virtio_ism_abi::PoolStatus;

/// The owner of a user id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Account {
    /// A user.
    User(u32),
    /// The owner of subordinate ids without an entry in /etc/passwd.
    Owner(Arc<str>),
    /// Every user not mapped in the daemon's user namespace.
    Unknown,
}

impl Account {
    const ROOT: Account = Account::User(0);
}

/// A holder of a device or an asker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PoolPeer {
    pub(super) account: Account,
    /// Cookie of the peer's network namespace.
    pub(super) namespace: u64,
}

/// Whether `asking` gets another of `devices`, with `held` in use; otherwise the reason for the refusal.
pub(super) fn admit(devices: u32, held: &[&PoolPeer], asking: &PoolPeer) -> Result<(), PoolStatus> {
    let free = (devices as usize).saturating_sub(held.len());
    if free == 0 {
        return Err(PoolStatus::AllInUse);
    }
    let held = || held.iter().copied();
    let of_namespace = || held().filter(|party| party.namespace == asking.namespace);
    let is_limited = asking.account != Account::ROOT;
    let of_user = || held().filter(|party| is_limited && party.account == asking.account);
    let counted = if held().any(|party| party == asking) {
        of_namespace().count().max(of_user().count())
    } else {
        let users: BTreeSet<_> = of_namespace().map(|party| &party.account).collect();
        let namespaces: BTreeSet<_> = of_user().map(|party| party.namespace).collect();
        users.len().max(namespaces.len())
    };
    if counted < free { Ok(()) } else { Err(PoolStatus::ShareInUse) }
}

/// The account of a user, by the files at the time of [`prepare`].
pub(super) fn account_of(uid: Option<u32>) -> Account {
    match uid {
        Some(uid) => account_in(SUBORDINATES.get_or_init(read_subordinates), uid),
        None => Account::Unknown,
    }
}

/// Reads the subordinate ids of the host. The sandbox forbids reading later.
pub(super) fn prepare() {
    let _ = SUBORDINATES.get_or_init(read_subordinates);
}

/// Most bytes read of a file.
const MAX_FILE: u64 = 4 << 20;

/// User ids an account may use in its user namespaces.
#[derive(Debug, PartialEq, Eq)]
struct Subordinates {
    start: u32,
    count: u32,
    account: Account,
}

static SUBORDINATES: OnceLock<Vec<Subordinates>> = OnceLock::new();

fn account_in(subordinates: &[Subordinates], uid: u32) -> Account {
    let of = |ids: &&Subordinates| uid.checked_sub(ids.start).is_some_and(|at| at < ids.count);
    let found = subordinates.iter().find(of);
    found.map_or(Account::User(uid), |ids| ids.account.clone())
}

fn read_subordinates() -> Vec<Subordinates> {
    let text = |path| {
        let mut bytes = Vec::new();
        // A host without these files has no such ids.
        let _ = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    };
    parse(&text("/etc/subuid"), &text("/etc/passwd"))
}

/// Lines `NAME:START:COUNT` of subuid(5); NAME can be a number.
fn parse(subuid: &str, passwd: &str) -> Vec<Subordinates> {
    let user = |name: &str| {
        let of_line = |line: &str| {
            let mut fields = line.split(':');
            (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
        };
        name.parse().ok().or_else(|| passwd.lines().find_map(of_line))
    };
    let line = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let (start, count) = (fields.next()?.parse().ok()?, fields.next()?.trim().parse().ok()?);
        let account = user(name).map_or_else(|| Account::Owner(name.into()), Account::User);
        Some(Subordinates { start, count, account })
    };
    subuid.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u64 = 1;

    fn party(uid: u32, namespace: u64) -> PoolPeer {
        PoolPeer { account: Account::User(uid), namespace }
    }

    /// Makes each peer in turn take as many devices as allowed. Returns the number for each.
    fn take(devices: u32, held: &mut Vec<PoolPeer>, parties: &[PoolPeer]) -> Vec<usize> {
        let mut got = Vec::new();
        for party in parties {
            let before = held.len();
            while admit(devices, &held.iter().collect::<Vec<_>>(), party).is_ok() {
                held.push(party.clone());
            }
            got.push(held.len() - before);
        }
        got
    }

    #[test]
    fn a_user_leaves_devices_for_other_users_of_its_namespace() {
        let mut held = Vec::new();
        assert_eq!(take(16, &mut held, &[party(2001, HOST)]), [8]);
        let others: Vec<_> = (2002..2006).map(|uid| party(uid, HOST)).collect();
        assert_eq!(take(16, &mut held, &others), [1, 1, 1, 1]);
        // A container, too.
        assert_eq!(take(16, &mut held, &[party(0, 7)]), [2]);
    }

    #[test]
    fn a_user_that_makes_namespaces_leaves_devices_for_everybody_else() {
        for devices in [8, 16, 64, 1000] {
            let mut held = Vec::new();
            let own: Vec<_> = (1..1000).map(|namespace| party(2001, namespace)).collect();
            take(devices, &mut held, &own);
            assert!(held.len() <= devices as usize * 3 / 4, "{} of {devices}", held.len());
            let others = [party(2002, HOST), party(0, 5000), party(33, 5001)];
            let got = take(devices, &mut held, &others[..2]);
            assert!(got.iter().all(|got| *got > 0), "{got:?} of {devices}");
            if devices > 8 {
                assert_ne!(take(devices, &mut held, &others[2..]), [0], "of {devices}");
            }
        }
    }

    #[test]
    fn a_container_that_becomes_any_user_leaves_devices_for_other_namespaces() {
        for devices in [8, 16, 64, 1000] {
            let mut held = Vec::new();
            let own: Vec<_> = (0..1000).map(|uid| party(uid, 7)).collect();
            take(devices, &mut held, &own);
            assert!(held.len() <= devices as usize * 3 / 4, "{} of {devices}", held.len());
            // Also for users with an id it has used.
            assert_ne!(take(devices, &mut held, &[party(1, 8)]), [0], "of {devices}");
            assert_ne!(take(devices, &mut held, &[party(0, 9)]), [0], "of {devices}");
        }
    }

    #[test]
    fn containers_that_root_runs_share_no_user() {
        let mut held = Vec::new();
        let containers: Vec<_> = (1..7).map(|namespace| party(0, namespace)).collect();
        assert_eq!(take(64, &mut held, &containers), [32, 16, 8, 4, 2, 1]);
        assert_eq!(take(64, &mut held, &[party(0, 99)]), [1], "the last one");
        let held: Vec<_> = held.iter().collect();
        assert_eq!(admit(64, &held, &party(1, 100)), Err(PoolStatus::AllInUse));
    }

    #[test]
    fn subordinate_ids_count_as_their_owner() {
        let passwd = "root:x:0:0::/:/bin/sh\nann:x:1000:1000::/:/bin/sh\nbad:x:y:0::/:/\n";
        let subuid = "ann:100000:65536\n1001:165536:65536\ncontainers:300000:10\nbad:400000:1\n\
                      ann:x:1\nann\n:\nann:4294967295:4294967295\n";
        let ids = parse(subuid, passwd);
        for (uid, account) in [
            (0, Account::ROOT),
            (1000, Account::User(1000)),
            (99_999, Account::User(99_999)),
            (100_000, Account::User(1000)),
            (165_535, Account::User(1000)),
            (165_536, Account::User(1001)),
            (300_009, Account::Owner("containers".into())),
            (300_010, Account::User(300_010)),
            (400_000, Account::Owner("bad".into())),
            (u32::MAX, Account::User(1000)),
        ] {
            assert_eq!(account_in(&ids, uid), account, "{uid}");
        }
    }
}
