// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Specifications of fabrics and guests.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use virtio_ism_abi::{Chid, Gid};

use super::bounds::{
    DEFAULT_CHID, MAX_POOL, check_socket_path, parse_chid, parse_gid, parse_mode, size,
};
use super::error::ConfigError;
use super::id_map::{self, IdMap};

/// One fabric: guests able to reach each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricSpec {
    /// The fabric's CHID.
    pub chid: Chid,
    /// Caps on the sums of the devices' quotas.
    pub caps: Caps,
    /// Quotas of each device, where different from the defaults.
    pub quotas: Quotas,
}

impl FabricSpec {
    /// A fabric with default quotas.
    pub fn new(chid: Chid) -> Self {
        FabricSpec { chid, caps: Caps::default(), quotas: Quotas::default() }
    }
}

/// Caps on the sum of the quotas of a fabric's devices: a device over a cap cannot join, so no quota is ever
/// overcommitted. `None`: no cap (256 devices).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Caps {
    /// Devices.
    pub devices: Option<u32>,
    /// Sum of `max_dmb_bytes`.
    #[serde(default, deserialize_with = "size")]
    pub dmb_bytes: Option<u64>,
    /// Sum of `max_slab_bytes`.
    #[serde(default, deserialize_with = "size")]
    pub slab_bytes: Option<u64>,
}

/// Per-device quotas; `None`: the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Quotas {
    /// DMBs registered at a time.
    pub max_dmbs: Option<u32>,
    /// Bytes of DMBs registered at a time.
    #[serde(default, deserialize_with = "size")]
    pub max_dmb_bytes: Option<u64>,
    /// Bytes of slabs owned, each counted whole.
    #[serde(default, deserialize_with = "size")]
    pub max_slab_bytes: Option<u64>,
    /// Bytes of slabs attached.
    #[serde(default, deserialize_with = "size")]
    pub max_attached_bytes: Option<u64>,
    /// DMBs attached at a time.
    pub max_attach: Option<u32>,
    /// Peers at a time.
    pub max_peers: Option<u32>,
    /// Slabs mapped into the front end at a time.
    pub max_maps: Option<u32>,
    /// Bytes of all regions of the guest's memory; 1 TiB by default.
    #[serde(default, deserialize_with = "size")]
    pub max_guest_memory: Option<u64>,
    /// Bytes of the guest's memory the daemon may allocate by first touches, in all connections of the guest;
    /// 256 MiB by default.
    #[serde(default, deserialize_with = "size")]
    pub max_touched_bytes: Option<u64>,
    /// Control commands per second.
    pub commands_per_second: Option<u32>,
    /// Wake records per second and slab or DMB; more are delayed and merged.
    pub wakes_per_second: Option<u32>,
}

/// Where a front end connects.
#[derive(Clone, Debug)]
pub enum Socket {
    /// A Unix socket the daemon creates.
    Path(PathBuf),
    /// A listening Unix socket passed to the daemon, with room for one connection in its queue (a backlog of
    /// 0).
    Listening(Arc<OwnedFd>),
}

impl PartialEq for Socket {
    fn eq(&self, other: &Socket) -> bool {
        match (self, other) {
            (Socket::Path(own), Socket::Path(other)) => own == other,
            (Socket::Listening(own), Socket::Listening(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

impl Eq for Socket {}

/// One guest: a socket for its front end, with settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestSpec {
    /// The guest's name in logs, metrics and on the management socket.
    pub name: String,
    /// Where the front end connects.
    pub socket: Socket,
    /// The guest's fabric.
    pub chid: Chid,
    /// A pinned GID, for tests only: a GID should never come back.
    pub gid: Option<Gid>,
    /// Mappings this front end can hold; none: the fabric's quota.
    pub max_maps: Option<u32>,
    /// Accept guest memory in any file. A file system with slow pages makes a thread of the daemon wait, and
    /// so makes peers wait.
    pub allow_any_file: bool,
    /// Permission bits of the socket; none: the configuration's bits.
    pub mode: Option<u32>,
    /// Makes the socket a device pool with this number of devices, one per connection. None: the guest has
    /// one device, and its front end connects to the socket itself.
    pub devices: Option<u32>,
    /// Only processes of this user get a device of the pool.
    pub peer_uid: Option<u32>,
    /// Only processes of this group get a device of the pool.
    pub peer_gid: Option<u32>,
    /// Front ends speak vfio-user on the socket instead of vhost-user.
    pub vfio_user: bool,
}

impl GuestSpec {
    /// A guest on the default fabric, named after its socket.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        GuestSpec {
            name,
            socket: Socket::Path(path),
            chid: DEFAULT_CHID,
            gid: None,
            max_maps: None,
            allow_any_file: false,
            mode: None,
            devices: None,
            peer_uid: None,
            peer_gid: None,
            vfio_user: false,
        }
    }

    /// Reads `PATH[,KEY=VALUE..]`; the keys are [`SETTINGS`](super::SETTINGS).
    ///
    /// # Errors
    /// The first invalid setting or value.
    pub fn parse(text: &str, chid: Chid) -> Result<Self, ConfigError> {
        let mut words = text.split(',');
        let path = words.next().filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| ConfigError::NoPath(text.into()))?;
        let mut spec = GuestSpec { chid, ..GuestSpec::new(path) };
        for word in words {
            let (key, value) = match word.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (word, None),
            };
            let wrong = |expected| ConfigError::SettingValue {
                key: key.into(),
                value: value.unwrap_or_default().into(),
                expected,
            };
            let text = || value.ok_or_else(|| wrong("a value"));
            let number = || {
                let number = value.and_then(|value| value.parse().ok());
                number.map(Some).ok_or_else(|| wrong("a number"))
            };
            match key {
                "allow-any-file" if value.is_none() => spec.allow_any_file = true,
                "vfio-user" if value.is_none() => spec.vfio_user = true,
                "allow-any-file" | "vfio-user" => return Err(wrong("no value")),
                "gid" => spec.gid = Some(parse_gid(text()?)?),
                "chid" => spec.chid = parse_chid(text()?)?,
                "name" => spec.name = text()?.into(),
                "mode" => spec.mode = Some(parse_mode(text()?)?),
                "max-maps" => spec.max_maps = number()?,
                "devices" => spec.devices = number()?,
                "peer-uid" => spec.peer_uid = number()?,
                "peer-gid" => spec.peer_gid = number()?,
                _ => return Err(ConfigError::UnknownSetting { key: key.into() }),
            }
        }
        Ok(spec)
    }

    /// The path of the socket, if any.
    pub fn path(&self) -> Option<&Path> {
        match &self.socket {
            Socket::Path(path) => Some(path),
            Socket::Listening(_) => None,
        }
    }

    /// Checks the guest on its own, without the other guests.
    ///
    /// # Errors
    /// [`ConfigError::SocketPath`], [`ConfigError::Name`], [`ConfigError::Devices`],
    /// [`ConfigError::Contradiction`], [`ConfigError::UnknownPeer`].
    pub fn check(&self) -> Result<(), ConfigError> {
        // First: a guest without a name of its own is named after the path.
        self.path().map_or(Ok(()), check_socket_path)?;
        let printable = self.name.chars().all(|c| !c.is_control() && c != '"' && c != '\\');
        if self.name.is_empty() || self.name.len() > 64 || !printable {
            return Err(ConfigError::Name(self.name.clone()));
        }
        let name = || self.name.clone();
        let contradiction = |what| Err(ConfigError::Contradiction { name: name(), what });
        match self.devices {
            Some(devices) if !(1..=MAX_POOL).contains(&devices) => {
                Err(ConfigError::Devices { name: name(), devices })
            }
            Some(_) if self.gid.is_some() => {
                contradiction("devices of a pool cannot share a pinned GID")
            }
            Some(_) if self.path().is_none() => {
                contradiction("a pool needs the path of a socket, not a descriptor")
            }
            Some(_) if self.vfio_user => {
                contradiction("front ends of a pool speak vhost-user, not vfio-user")
            }
            None if self.peer_uid.or(self.peer_gid).is_some() => {
                contradiction("peer-uid and peer-gid are for a pool (devices=N)")
            }
            _ => self.check_peers(id_map::users(), id_map::groups()),
        }
    }

    /// Checks whether the user and the group are mapped in this process's user namespace.
    fn check_peers(&self, users: &IdMap, groups: &IdMap) -> Result<(), ConfigError> {
        let unknown = |key, id: Option<u32>, map: &IdMap| {
            let id = id.filter(|id| !map.has(*id))?;
            Some(ConfigError::UnknownPeer { name: self.name.clone(), key, id })
        };
        unknown("peer-uid", self.peer_uid, users)
            .or_else(|| unknown("peer-gid", self.peer_gid, groups))
            .map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_socket_with_all_its_options() {
        let spec = GuestSpec::parse(
            "/run/vm1.sock,gid=3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b,chid=ff07,name=one,max-maps=4,allow-any-file",
            DEFAULT_CHID,
        )
        .unwrap();
        assert_eq!(spec.path(), Some(Path::new("/run/vm1.sock")));
        assert_eq!(spec.gid.unwrap().to_string(), "3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b");
        assert_eq!(spec.chid, Chid(0xff07));
        assert_eq!(
            (spec.name.as_str(), spec.max_maps, spec.allow_any_file),
            ("one", Some(4), true)
        );
    }

    #[test]
    fn reads_a_pool() {
        let text = "/run/any.sock,devices=64,mode=666,peer-uid=1000,peer-gid=100";
        let pool = GuestSpec::parse(text, DEFAULT_CHID).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.devices, pool.mode), (Some(64), Some(0o666)));
        assert_eq!((pool.peer_uid, pool.peer_gid), (Some(1000), Some(100)));
        let flawed = |text: &str| GuestSpec::parse(text, DEFAULT_CHID).unwrap().check();
        for devices in [0, 4097] {
            let refused = flawed(&format!("/run/any.sock,devices={devices}"));
            assert!(
                matches!(refused, Err(ConfigError::Devices { devices: n, .. }) if n == devices)
            );
        }
        let gid = "/s,devices=2,gid=3f31e22c-f0fe-4ebf-8cb6-e7fb5fa4373b";
        for text in [gid, "/s,peer-uid=0", "/s,peer-gid=0", "/s,devices=2,vfio-user"] {
            assert!(matches!(flawed(text), Err(ConfigError::Contradiction { .. })), "{text}");
        }
    }

    #[test]
    fn a_user_that_the_kernel_would_not_show_cannot_be_asked_for() {
        let service = IdMap::parse("0 0 1\n990 990 1\n");
        let host = IdMap::parse("0 0 4294967295\n");
        let pool = |text: &str| GuestSpec::parse(text, DEFAULT_CHID).unwrap();
        for known in ["/s,devices=2,peer-uid=990,peer-gid=0", "/s,devices=2"] {
            assert!(pool(known).check_peers(&service, &service).is_ok(), "{known}");
        }
        for (key, id) in [("peer-uid", 2001), ("peer-uid", 65534), ("peer-gid", 36)] {
            let pool = pool(&format!("/s,devices=2,{key}={id}"));
            let refused = pool.check_peers(&service, &service).unwrap_err().to_string();
            assert!(refused.contains(&format!("{key}={id}: this process cannot")), "{refused}");
            assert!(pool.check_peers(&host, &host).is_ok());
        }
    }

    #[test]
    fn names_a_guest_after_its_socket() {
        let spec = GuestSpec::parse("/run/vm1.sock", Chid(0xff01)).unwrap();
        assert_eq!((spec.name.as_str(), spec.chid), ("vm1", Chid(0xff01)));
        assert!(!spec.allow_any_file && !spec.vfio_user);
        assert!(GuestSpec::parse("/run/vm1.sock,vfio-user", DEFAULT_CHID).unwrap().vfio_user);
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_not_called_a_name() {
        let path = |bytes: usize| format!("/{}", "p".repeat(bytes - 1));
        let check = |text: String| GuestSpec::parse(&text, DEFAULT_CHID).unwrap().check();
        check(path(107) + ",name=a").unwrap();
        for refused in [check(path(108)), check(path(108) + ",name=a")] {
            let said = refused.unwrap_err().to_string();
            assert!(said.contains(&path(108)) && said.contains("limit is 107"), "{said}");
        }
    }

    #[test]
    fn refuses_settings_of_sockets_that_do_not_exist() {
        let parse = |text| GuestSpec::parse(text, DEFAULT_CHID);
        for bad in ["", ",gid=x"] {
            assert!(matches!(parse(bad), Err(ConfigError::NoPath(_))), "{bad}");
        }
        let unknown = parse("/s,foo=1").unwrap_err();
        assert!(matches!(&unknown, ConfigError::UnknownSetting { key } if key == "foo"));
        assert!(unknown.to_string().starts_with("\"foo\" is no setting of a socket"), "{unknown}");
        for bad in ["/s,max-maps=many", "/s,gid", "/s,vfio-user=1", "/s,devices", "/s,name"] {
            assert!(matches!(parse(bad), Err(ConfigError::SettingValue { .. })), "{bad}");
        }
        let nil = "/s,gid=00000000-0000-0000-0000-000000000000";
        assert!(matches!(parse(nil), Err(ConfigError::Gid(_))));
        assert!(matches!(parse("/s,chid=1"), Err(ConfigError::Chid(_))));
    }
}
