// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of the management socket.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{FileGuest, LeaveTime};
use crate::service::leave::LeaveInfo;
use crate::service::reload::ReloadInfo;
use crate::vhost::FAULTS;
use crate::vhost::device_slot::GuestStatus;
use ism_device::Counts;
use virtio_ism_abi::Status;

/// A request, for the server.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(super) enum Request {
    List,
    Add(FileGuest),
    Remove {
        name: String,
        timeout: Option<LeaveTime>,
    },
    Drain {
        name: String,
        timeout: Option<LeaveTime>,
        #[serde(default)]
        migration: bool,
    },
    Undrain {
        name: String,
    },
    Metrics,
    Reload,
}

/// A guest to add.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddGuest {
    /// Where the front end will connect.
    pub socket: PathBuf,
    /// Name of the guest; by default the socket's file name without extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The guest's fabric, four hexadecimal digits; by default the daemon's first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chid: Option<String>,
    /// A pinned GID, for tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<String>,
    /// Mappings the front end can hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_maps: Option<u32>,
    /// Accept memory in any file.
    pub allow_any_file: bool,
    /// Permission bits of the socket, octal; by default the configuration's bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Makes the guest a device pool with this number of devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// Only processes of this user get a device of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_uid: Option<u32>,
    /// Only processes of this group get a device of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_gid: Option<u32>,
    /// Front ends speak vfio-user on the socket.
    pub vfio_user: bool,
}

/// A request, from the client.
#[derive(Debug, Serialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(super) enum Call<'a> {
    List,
    Add(&'a AddGuest),
    Remove { name: &'a str, timeout: Option<LeaveTime> },
    Drain { name: &'a str, timeout: Option<LeaveTime>, migration: bool },
    Undrain { name: &'a str },
    Metrics,
    Reload,
}

/// An answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) guests: Option<Vec<Guest>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reloaded: Option<ReloadInfo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) left: Option<LeaveInfo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) undrained: Option<usize>,
}

/// The present state of a guest. Counters include all its connections; each front end of a pool has its own
/// entry, and the pool's entry counts disconnected front ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Guest {
    /// Name of the guest.
    pub name: String,
    /// Where the front end connects; none for a socket passed by descriptor.
    pub socket: Option<PathBuf>,
    /// The guest's fabric, four hexadecimal digits.
    pub chid: String,
    /// Whether a front end is connected; of a pool: whether a device is in use.
    pub connected: bool,
    /// Whether front ends speak vfio-user on the socket.
    pub vfio_user: bool,
    /// Of a device pool: the number of devices. The entries of its front ends follow in the list.
    pub devices: Option<u32>,
    /// Of a device pool: devices in use.
    pub devices_in_use: Option<u32>,
    /// Of a device pool: connections refused a device.
    pub refused_connections: Option<u64>,
    /// Of a front end of a pool: the pool.
    pub pool: Option<String>,
    /// Of a front end of a pool: its process id, in the daemon's namespace.
    pub pid: Option<i32>,
    /// Of a front end of a pool: its user.
    pub uid: Option<u32>,
    /// Of a front end of a pool: the cookie of its network namespace.
    pub network_namespace: Option<u64>,
    /// Connections so far.
    pub connections: u64,
    /// Threads of earlier connections kept from ending by their front end.
    pub hanging: usize,
    /// GID of the device's session, if there is one.
    pub gid: Option<String>,
    /// Size of the window in bytes; 0 for a front end unable to map.
    pub window_size: u64,
    /// DMBs registered.
    pub dmbs: u64,
    /// Bytes of registered DMBs.
    pub dmb_bytes: u64,
    /// DMBs of peers attached.
    pub attached: u64,
    /// Slabs mapped.
    pub slabs: u64,
    /// Bytes of slabs owned.
    pub slab_bytes: u64,
    /// Bytes of peers' slabs mapped.
    pub attached_slab_bytes: u64,
    /// Related peers.
    pub peers: u64,
    /// Events counted by the devices.
    #[serde(flatten)]
    pub counts: Counts,
    /// Whether the driver was asked to leave; then the device takes on nothing new. Of a device pool: whether
    /// the pool is drained.
    pub leaving: bool,
    /// Commands refused, by status.
    pub refusals: BTreeMap<String, u64>,
    /// Moves refused, by status.
    pub move_refusals: BTreeMap<String, u64>,
    /// Faults of the front end or driver, over all connections.
    pub faults: BTreeMap<String, u64>,
}

fn by_status(counts: &[u64; Status::ALL.len()]) -> BTreeMap<String, u64> {
    let named = Status::ALL.iter().zip(counts);
    named.filter(|(_, n)| **n != 0).map(|(s, n)| (s.name().to_owned(), *n)).collect()
}

impl From<&GuestStatus> for Guest {
    fn from(status: &GuestStatus) -> Guest {
        let mut device = status.device.clone().unwrap_or_default();
        device.add_counters(&status.ended);
        let faults = FAULTS.iter().zip(status.faults).filter(|(_, n)| *n != 0);
        Guest {
            name: status.spec.name.clone(),
            socket: status.spec.path().map(Into::into),
            chid: status.spec.chid.to_string(),
            connected: status.device.is_some()
                || status.pool.as_ref().is_some_and(|pool| pool.in_use > 0),
            vfio_user: status.spec.vfio_user,
            devices: status.spec.devices.filter(|_| status.pool.is_some()),
            devices_in_use: status.pool.as_ref().map(|pool| pool.in_use),
            refused_connections: status.pool.as_ref().map(|pool| pool.refused),
            pool: status.member.as_ref().map(|member| member.pool.clone()),
            pid: status.member.as_ref().map(|member| member.pid),
            uid: status.member.as_ref().and_then(|member| member.uid),
            network_namespace: status.member.as_ref().map(|member| member.network_namespace),
            connections: status.connections,
            hanging: status.hanging,
            gid: device.gid.map(|gid| gid.to_string()),
            window_size: device.window_size,
            dmbs: device.dmbs,
            dmb_bytes: device.dmb_bytes,
            attached: device.attached,
            slabs: device.slabs,
            slab_bytes: device.slab_bytes,
            attached_slab_bytes: device.attached_slab_bytes,
            peers: device.peers,
            counts: device.counts,
            leaving: device.is_leaving || status.pool.as_ref().is_some_and(|pool| pool.drained),
            refusals: by_status(&device.refusals),
            move_refusals: by_status(&device.move_refusals),
            faults: faults.map(|(fault, n)| (fault.name().to_owned(), n)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_the_client_writes_the_server_reads() {
        let add = AddGuest {
            socket: "/a.sock".into(),
            name: Some("a".into()),
            max_maps: Some(4),
            allow_any_file: true,
            vfio_user: true,
            ..AddGuest::default()
        };
        let text = serde_json::to_string(&Call::Add(&add)).unwrap();
        let Request::Add(guest) = serde_json::from_str(&text).unwrap() else { panic!("{text}") };
        assert_eq!((guest.name, guest.max_maps), (Some("a".into()), Some(4)));
        assert!(guest.allow_any_file && guest.vfio_user);
        let second = Some(LeaveTime(Duration::from_millis(1500)));
        for call in [
            Call::List,
            Call::Metrics,
            Call::Reload,
            Call::Remove { name: "a", timeout: None },
            Call::Remove { name: "a", timeout: second },
            Call::Drain { name: "a", timeout: second, migration: true },
        ] {
            let text = serde_json::to_string(&call).unwrap();
            serde_json::from_str::<Request>(&text).unwrap();
        }
    }

    #[test]
    fn each_counter_of_a_device_is_a_key_of_its_guest() {
        let keys = Counts::ALL.iter().zip(1_u64..).map(|(counter, n)| (counter.name, n));
        let json = serde_json::to_string(&keys.collect::<BTreeMap<_, _>>()).unwrap();
        let guest: Guest = serde_json::from_str(&json).unwrap();
        let written = serde_json::to_value(&guest).unwrap();
        for (counter, n) in Counts::ALL.iter().zip(1_u64..) {
            assert_eq!((counter.get)(&guest.counts), n, "{counter:?}");
            assert_eq!(written[counter.name], n, "{counter:?}");
        }
        // An older daemon may count less.
        assert_eq!(serde_json::from_str::<Guest>("{\"moves\":2}").unwrap().counts.moves, 2);
    }

    #[test]
    fn unknown_ops_and_keys_are_refused() {
        for bad in [
            "{}",
            "[]",
            "{\"op\":\"paint\"}",
            "{\"op\":\"add\",\"socket\":\"/a\",\"x\":1}",
            "{\"op\":\"drain\",\"name\":\"a\",\"timeout\":-1}",
            "{\"op\":\"drain\",\"name\":\"a\",\"timeout\":1e9}",
        ] {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
