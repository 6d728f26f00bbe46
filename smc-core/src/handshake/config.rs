// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! This host's part of a handshake: names, devices, release, and strictness.

use core::time::Duration;

use super::decline::{DeclineReason, SmcKind};
use super::ism_device::IsmDevice;
use super::route::Route;
use crate::wire::clc::{CarrierOptions, Limits};
use crate::wire::ids::{Chid, Eid, Features, Hostname, LinkLimits, OsType, PeerId, Release};

/// How long one message is awaited unless configured otherwise; the value Linux uses (ERR-7).
pub const DEFAULT_WAIT: Duration = Duration::from_secs(6);

/// Most EIDs, and most GID/CHID entries, in one Proposal (EID-6, EISM-30).
pub const MAX_OFFERED: usize = 8;

bitflags::bitflags! {
    /// The types of SMC offered by a host as a client and accepted as a server (CLCV2-88).
    ///
    /// A host without any version 2 type is a version 1 host and sends the Proposal of RFC 7609.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Kinds: u8 {
        /// SMC-D version 2.
        const SMCD_V2 = 1;
        /// SMC-D version 1; needs a platform ISM device.
        const SMCD_V1 = 2;
        /// SMC-R version 2.
        const SMCR_V2 = 4;
        /// SMC-R version 1; needs a [peer id](Config::peer_id).
        const SMCR_V1 = 8;
    }
}

impl Kinds {
    /// Whether a type is among them.
    pub const fn has(self, kind: SmcKind) -> bool {
        self.contains(match kind {
            SmcKind::SmcdV2 => Kinds::SMCD_V2,
            SmcKind::SmcdV1 => Kinds::SMCD_V1,
            SmcKind::SmcrV2 => Kinds::SMCR_V2,
            SmcKind::SmcrV1 => Kinds::SMCR_V1,
        })
    }

    /// Whether there is a type of version 2.
    pub(super) const fn has_v2(self) -> bool {
        self.intersects(Kinds::SMCD_V2.union(Kinds::SMCR_V2))
    }
}

impl Default for Kinds {
    /// SMC-Dv2 alone.
    fn default() -> Kinds {
        Kinds::SMCD_V2
    }
}

/// The treatment of a CHID of the emulated range without its second entry (EISM-13, D-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unpaired {
    /// Decline the offer of SMC-Dv2, as the specification asks (EISM-14).
    #[default]
    Decline,
    /// Skip the entry, as Linux does.
    Skip,
}

/// A receiver's choices on points of difference between the specifications and Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tolerance {
    /// A lone CHID of the emulated range.
    pub unpaired: Unpaired,
    /// Largest buffer size codes taken from a peer; above them the value is reserved and declined
    /// (CLC-30, A-14).
    pub sizes: Limits,
}

impl Tolerance {
    /// The specifications to the letter: buffers up to 512 KiB, unpaired CHIDs declined.
    pub const STRICT: Tolerance = Tolerance { unpaired: Unpaired::Decline, sizes: Limits::RFC };
    /// Linux's behaviour: SMC-D buffers up to 1 MiB, unpaired CHIDs skipped.
    pub const LINUX: Tolerance = Tolerance { unpaired: Unpaired::Skip, sizes: Limits::LINUX };
}

/// The configuration of a host for every handshake, in both roles.
///
/// Shared by all handshakes of a process; a change of configuration makes a new one. Offering
/// commits nothing (CLC-11), and every Proposal of a configuration is the same for TCP connections
/// of one [`Route`](super::Route) (CLC-9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Stack instance: random per process and the MAC of an adapter, never zero, to make a restart
    /// visible (CLC-7, CLC-8); see [`PeerId::new`]. Without a peer id SMC-Rv1 is neither offered
    /// nor accepted.
    pub peer_id: PeerId,
    /// Host name for the first contact extension (CLCV2-51).
    pub hostname: Hostname,
    /// Operating system for the first contact extension and Decline (CLCV2-53).
    pub os: OsType,
    /// Highest release of version 2 this host speaks; v2.1 unless a v2.0 host is to be played
    /// (CLCV2-36, CLCV2-38, CLCV2-93).
    pub release: Release,
    /// Supplemental features this host has; without Emulated-ISM no emulated device is used
    /// (EISM-2, CLCV2-94).
    pub features: Features,
    /// User EIDs. The first eight are offered, all are matched against (EID-6, EID-16).
    pub ueids: Vec<Eid>,
    /// System EID, if this host has one (EID-10 to EID-12).
    pub seid: Option<Eid>,
    /// ISM devices in order of preference, emulated and platform ones mixed (EISM-17, EISM-26).
    pub devices: Vec<IsmDevice>,
    /// The reason told to a client of SMC-D version 2 while there is no device.
    pub without_device: DeclineReason,
    /// The types of SMC in use; SMC-Dv2 alone unless configured otherwise.
    pub kinds: Kinds,
    /// Connections (16 to 255) and links (1 or 2) allowed in a link group of SMC-R at this host
    /// (CLCV2-22, CLCV2-23); values out of range are moved into the range.
    pub limits: LinkLimits,
    /// Records on TCP: offered as a client (CLCV2-13), and answered as a server if the client
    /// offers records (CLCV2-16). The agreement of both ends is in [`Terms`](super::Terms) and
    /// [`TermsR`](super::TermsR). `None`: neither.
    pub carriers: Option<CarrierOptions>,
    /// Waiting time for each message (ERR-7).
    pub wait: Duration,
    /// How strict this host is with its peers.
    pub tolerance: Tolerance,
}

impl Config {
    /// A v2.1 host with Emulated-ISM, without a name, EIDs or devices.
    pub fn new(peer_id: PeerId) -> Config {
        Config {
            peer_id,
            hostname: Hostname::BLANK,
            os: OsType::LINUX,
            release: Release::V2_1,
            features: Features::EMULATED_ISM,
            ueids: Vec::new(),
            seid: None,
            devices: Vec::new(),
            without_device: DeclineReason::NoIsmDevice,
            kinds: Kinds::default(),
            limits: LinkLimits { max_conns: 255, max_links: 2 },
            carriers: None,
            wait: DEFAULT_WAIT,
            tolerance: Tolerance::default(),
        }
    }

    /// The release stated on the wire: the configured one, at most v2.1, the newest known here.
    pub(super) fn stated_release(&self) -> Release {
        self.release.min(Release::V2_1)
    }

    /// The feature mask stated on the wire: none before v2.1 (CLCV2-24, CLCV2-37, CLCV2-43,
    /// CLCV2-62).
    pub(super) fn stated_features(&self) -> Features {
        if self.stated_release().has_v2_1_fields() { self.features } else { Features::empty() }
    }

    /// The options for records at a release: none before v2.1.
    pub(super) fn carriers_at(&self, release: Release) -> Option<CarrierOptions> {
        self.carriers.filter(|_| release.has_v2_1_fields())
    }

    /// The usable devices: one per CHID, emulated ones only with the feature (EISM-2, EISM-22),
    /// none without an address.
    pub(super) fn usable_devices(&self) -> Vec<IsmDevice> {
        let emulated = self.stated_features().contains(Features::EMULATED_ISM);
        let mut usable: Vec<IsmDevice> = Vec::new();
        for &device in &self.devices {
            let known = usable.iter().any(|other| other.chid == device.chid);
            let fits = emulated || !device.chid.is_emulated();
            if !known && fits && device.chid != Chid::NONE && !device.gid.is_none() {
                usable.push(device);
            }
        }
        usable
    }

    /// The devices offered by a client: in order, as many as fit into the array. A device is left
    /// out whole, never by half (EISM-12, EISM-30, EISM-32).
    ///
    /// The `associated` device has a field of its own and so needs no room (CLCV2-11).
    pub(super) fn offered_devices(&self, associated: Option<IsmDevice>) -> Vec<IsmDevice> {
        let mut room = MAX_OFFERED;
        let mut offered = self.usable_devices();
        offered.retain(|device| {
            if associated.is_some_and(|associated| associated.chid == device.chid) {
                return false;
            }
            let fits = device.entries() <= room;
            if fits {
                room -= device.entries();
            }
            fits
        });
        offered
    }

    /// The limits of a link group on a route: configured, bounded by the adapter, and moved into
    /// the range (CLCV2-22, CLCV2-23, D-12).
    pub(super) fn limits_on(&self, route: &Route) -> LinkLimits {
        let possible = route.rnic.map_or(u8::MAX, |rnic| rnic.max_links);
        LinkLimits {
            max_conns: self.limits.max_conns.max(16),
            max_links: self.limits.max_links.min(possible).clamp(1, 2),
        }
    }

    /// The system EID; all zero means "none" on the wire, and so here (CLCV2-30).
    pub(super) fn system_eid(&self) -> Option<Eid> {
        self.seid.filter(|eid| *eid != Eid::ZERO)
    }

    /// The UEIDs a client offers (EID-6).
    pub(super) fn offered_ueids(&self) -> &[Eid] {
        self.ueids.get(..MAX_OFFERED).unwrap_or(&self.ueids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::Gid;

    fn device(chid: u16) -> IsmDevice {
        IsmDevice { chid: Chid(chid), gid: Gid([7; 16]) }
    }

    fn config(chids: &[u16]) -> Config {
        let mut config = Config::new(PeerId([1; 8]));
        config.devices = chids.iter().map(|&chid| device(chid)).collect();
        config
    }

    fn offered(config: &Config) -> Vec<u16> {
        config.offered_devices(None).iter().map(|device| device.chid.0).collect()
    }

    // Shows: EISM-17.
    #[test]
    fn offers_devices_in_order_and_each_chid_once() {
        assert_eq!(offered(&config(&[0xff02, 3, 0xff02, 0xffff])), [0xff02, 3, 0xffff]);
    }

    // Shows: EISM-12, EISM-30, EISM-32.
    #[test]
    fn leaves_out_an_emulated_device_that_has_room_for_one_half_only() {
        assert_eq!(offered(&config(&[1, 2, 3, 4, 5, 6, 7, 0xff00])), [1, 2, 3, 4, 5, 6, 7]);
        let mixed = config(&[1, 2, 3, 4, 5, 6, 7, 0xff00, 8, 9]);
        assert_eq!(offered(&mixed), [1, 2, 3, 4, 5, 6, 7, 8]);
        let emulated = config(&[0xff00, 0xff01, 0xff02, 0xff03, 0xff04]);
        assert_eq!(offered(&emulated), [0xff00, 0xff01, 0xff02, 0xff03]);
    }

    // Shows: CLCV2-43.
    #[test]
    fn uses_emulated_devices_in_release_2_1_with_the_feature_only() {
        let mut config = config(&[0xff00, 5]);
        config.release = Release::V2_0;
        assert_eq!(offered(&config), [5]);
        assert_eq!(config.stated_features(), Features::empty());
        config.release = Release::V2_1;
        config.features = Features::empty();
        assert_eq!(offered(&config), [5]);
    }

    #[test]
    fn ignores_devices_without_chid_or_gid() {
        let mut config = config(&[0, 5]);
        config.devices.push(IsmDevice { chid: Chid(6), gid: Gid::NONE });
        assert_eq!(offered(&config), [5]);
    }

    // Shows: EID-6.
    #[test]
    fn offers_the_first_eight_eids() {
        let mut config = config(&[]);
        config.ueids = (0..9).map(|i| Eid::new(&format!("EID{i}")).unwrap()).collect();
        assert_eq!(config.offered_ueids(), &config.ueids[..8]);
        config.ueids.truncate(3);
        assert_eq!(config.offered_ueids().len(), 3);
    }

    #[test]
    fn kinds_are_smc_dv2_alone_unless_configured() {
        let kinds = config(&[]).kinds;
        let has: Vec<bool> = SmcKind::PREFERENCE.iter().map(|kind| kinds.has(*kind)).collect();
        assert_eq!(has, [true, false, false, false]);
        assert!(Kinds::SMCR_V2.has_v2() && !(Kinds::SMCR_V1 | Kinds::SMCD_V1).has_v2());
        for (i, kind) in SmcKind::PREFERENCE.into_iter().enumerate() {
            assert!(Kinds::from_bits_truncate(1 << i).has(kind), "{kind}");
        }
    }

    // Shows: CLCV2-22, CLCV2-23.
    #[test]
    fn limits_are_the_most_that_there_can_be_unless_configured() {
        assert_eq!(config(&[]).limits, LinkLimits { max_conns: 255, max_links: 2 });
    }

    // Shows: CLCV2-11.
    #[test]
    fn an_associated_device_takes_no_room_in_the_array() {
        let nine = config(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let associated = Some(nine.devices[0]);
        let chids: Vec<u16> =
            nine.offered_devices(associated).iter().map(|device| device.chid.0).collect();
        assert_eq!(chids, [2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
