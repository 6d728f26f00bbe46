// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The choices of a seed before the run.

use core::time::Duration;

use super::super::rng::Rng;
use crate::connection::{Ring, RingError};
use crate::link_group::{
    EyeCatcher, Generation, Params, PeerProfile, Rnic, RnicId, Role, SingleRnic, Timers,
};
use crate::wire::ids::{Gid, LinkLimits, Mac, Mtu};
use crate::wire::llc::Dialect;

bitflags::bitflags! {
    /// The faults of a run.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Faults: u16 {
        /// Ports and RNICs go and come back.
        const PORT = 1 << 0;
        /// A path between two RNICs swallows everything for a while.
        const CUT = 1 << 1;
        /// A queue pair fails.
        const QUEUE_PAIR = 1 << 2;
        /// Messages take up to seconds.
        const SLOW = 1 << 3;
        /// A host polls no completion for a while, and runs out of posted receives.
        const STALL = 1 << 4;
        /// LLC arrives twice, at once or late.
        const DUPLICATE = 1 << 5;
        /// LLC arrives with flipped bits.
        const CORRUPT = 1 << 6;
        /// A host dies, with or without resets on TCP.
        const KILL = 1 << 7;
        /// Links and RMBs are deleted, and groups ended, by the API, at both ends at once.
        const API = 1 << 8;
        /// Applications abort.
        const ABORT = 1 << 9;
        /// Queue pairs cannot be made, or only slowly.
        const SETUP = 1 << 10;
        /// A peer ignores LLC now and then.
        const IGNORE = 1 << 11;
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) generation: Generation,
    pub(super) profile: [PeerProfile; 2],
    /// RNICs of each host.
    pub(super) rnics: [u32; 2],
    pub(super) eye_catcher: EyeCatcher,
    pub(super) single: SingleRnic,
    pub(super) faults: Faults,
    /// About how often something goes wrong, microseconds.
    pub(super) fault_every: u64,
    /// About how often a connection is opened, microseconds.
    pub(super) open_every: u64,
    /// Longest usual time of a message, microseconds.
    pub(super) latency: u64,
    /// Longest usual time until a completion is polled, microseconds.
    pub(super) polling: u64,
    /// Most bytes of one direction of a connection.
    pub(super) bytes: u32,
}

impl Plan {
    pub(super) fn draw(rng: &mut Rng) -> Plan {
        let generation = match rng.below(5) {
            0 | 1 => Generation::V1 { max_links: 2 },
            2 => Generation::V2,
            n => {
                let max_links = if n == 3 && rng.one_in(3) { 1 } else { 2 };
                Generation::V21(LinkLimits { max_conns: 16 + rng.below(16) as u8, max_links })
            }
        };
        let dialect = if rng.one_in(2) { Dialect::SPEC } else { Dialect::TO_LINUX };
        let profile = [0, 1].map(|_| PeerProfile {
            dialect,
            rkeys_at_once: rng.one_in(2),
            one_link_will_do: rng.one_in(2),
            reject_reason: rng.one_in(2),
        });
        let rnics = [1 + u32::from(!rng.one_in(4)), 1 + u32::from(!rng.one_in(4))];
        let mut faults = Faults::from_bits_truncate(rng.bits() as u16);
        for rare in [Faults::CORRUPT, Faults::DUPLICATE, Faults::KILL, Faults::IGNORE] {
            if !rng.one_in(3) {
                faults.remove(rare);
            }
        }
        if rng.one_in(16) {
            faults = Faults::empty();
        }
        Plan {
            generation,
            profile,
            rnics,
            eye_catcher: if rng.one_in(4) { EyeCatcher::On } else { EyeCatcher::Off },
            single: if rng.one_in(4) { SingleRnic::InvalidMtu } else { SingleRnic::Asymmetric },
            faults,
            fault_every: 1000 << rng.below(14),
            open_every: 1000 << rng.below(12),
            latency: 1 << rng.below(12),
            polling: 1 << rng.below(14),
            bytes: 1 << rng.below(15),
        }
    }

    pub(super) fn params(&self, role: usize, number: u32, up: &[bool; 2]) -> Params {
        let side = if role == 0 { Role::Server } else { Role::Client };
        let mut params = Params::new(
            side,
            self.generation,
            self.profile.get(role).copied().unwrap_or(PeerProfile::SPEC),
        );
        params.timers = Timers { idle: Duration::from_secs(600), ..params.timers };
        params.eye_catcher = self.eye_catcher;
        params.single_rnic = self.single;
        params.number = number;
        let count = self.rnics.get(role).copied().unwrap_or(1) as usize;
        params.rnics = (0..count).filter(|n| up[*n]).map(|n| rnic(role, n)).collect();
        if role == 0 {
            params.peer_gids = (0..self.rnics[1] as usize).map(|n| rnic(1, n).gid).collect();
        }
        params
    }

    pub(super) fn ring(&self, len: u32) -> Result<Ring, RingError> {
        match self.eye_catcher {
            EyeCatcher::Off => Ring::smcr_without_eye_catcher(len),
            EyeCatcher::On => Ring::smcr(len),
        }
    }
}

/// RNIC `n` of host `host`.
pub(super) fn rnic(host: usize, n: usize) -> Rnic {
    let (host, byte) = (host as u8 + 1, n as u8);
    Rnic {
        id: RnicId(n as u32),
        gid: Gid::from_ipv4([10, 9, byte, host]),
        mac: Mac([0x52, 0x54, 0, 0, byte, host]),
        mtu: Mtu::B1024,
        direct: true,
    }
}
