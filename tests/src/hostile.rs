// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A peer after a proper handshake, with direct access to the victim's DMB.

use std::net::TcpStream;
use std::sync::atomic::Ordering;

use guest_driver::SmcStream;
use ism_sys::SharedSlice;
use smc_core::wire::Cursor;
use smc_core::wire::cdc::{ConsumerWord, ProducerFlags, ProducerWord, StateFlags};
use smc_core::wire::ids::DmbToken;
use virtio_ism::{OwnDmb, PeerDmb};
use virtio_ism_abi::slab::CONTROL_LEN;
use virtio_ism_abi::{Gid, Token};

use crate::bench::Pair;
use crate::raw::{Device, LINK, dmbe, propose, put};
use crate::watch::note;

/// Bytes of the hostile peer's own DMB.
pub const LEN: u32 = 64 << 10;

/// The hostile end of a connection.
pub struct Hostile {
    /// The TCP connection.
    pub tcp: TcpStream,
    /// The peer's own DMB, written by the victim.
    pub own: OwnDmb,
    /// The victim's DMB.
    pub theirs: PeerDmb,
}

impl Hostile {
    /// Connects to the pair's listener as a client, properly; the victim is the accepted stream.
    #[track_caller]
    pub fn connect(pair: &Pair, device: &Device) -> (Hostile, SmcStream) {
        note("connects as a hostile client");
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| pair.listener.accept().unwrap().0);
            let (tcp, accepted) = propose(pair.addr(), &device.config()).accepted();
            let DmbToken(token) = accepted.peer().token;
            let theirs = device.ism.attach(Token(token), accepted.peer().size.bytes()).unwrap();
            let victim_gid = Gid(accepted.devices().peer.0);
            let own = device.ism.register(victim_gid, LEN, 0).unwrap();
            let (_, confirm) = accepted.confirm(dmbe(own.token().0, LEN), LINK);
            put(&tcp, &confirm);
            let victim = accepting.join().unwrap();
            assert!(victim.is_smc(), "{}", victim.info());
            (Hostile { tcp, own, theirs }, victim)
        })
    }

    /// Stores any two words into the victim's control block, and signals.
    pub fn words(&self, producer: u64, consumer: u64) {
        let _ = self.theirs.deliver(&[], [producer, consumer], true);
    }

    /// Like [`Hostile::say`], without a signal.
    pub fn say_silently(&self, says: Says) {
        let _ = self.theirs.deliver(&[], says.words(), false);
    }

    /// Stores cursors and flags.
    pub fn say(&self, says: Says) {
        let [producer, consumer] = says.words();
        self.words(producer, consumer);
    }

    /// Writes bytes anywhere into the victim's DMB.
    pub fn scribble(&self, offset: u32, bytes: &[u8]) {
        let words = [0, 8].map(|at| {
            let mut word = [0; 8];
            let start = (8 + at) as usize;
            if let Some(bytes) = bytes.get(start..start + 8).filter(|_| offset == 0) {
                word.copy_from_slice(bytes);
            }
            u64::from_ne_bytes(word)
        });
        let _ = self.theirs.deliver(&[(offset, bytes)], words, true);
    }
}

/// The content of a hostile control block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Says {
    /// Producer cursor.
    pub producer: Cursor,
    /// Consumer cursor.
    pub consumer: Cursor,
    /// B, R, P, U.
    pub flags: ProducerFlags,
    /// D, C, A.
    pub state: StateFlags,
}

impl Says {
    fn words(self) -> [u64; 2] {
        let producer = ProducerWord { cursor: self.producer };
        let consumer = ConsumerWord {
            cursor: self.consumer,
            producer_flags: self.flags,
            state_flags: self.state,
        };
        [producer.to_u64(), consumer.to_u64()]
    }
}

/// Every slab mapped in a device's window, control tail included.
pub fn slabs(device: &Device) -> Vec<SharedSlice> {
    const STEP: u64 = 2 << 20;
    let size = device.transport.window_size().min(4 << 30);
    let mut slabs = Vec::new();
    let mut at = 0;
    while at < size {
        let data = (22..=26).rev().map(|shift| 1u64 << shift);
        let found = data
            .map(|data| data + CONTROL_LEN as u64)
            .find_map(|len| Some((len, device.transport.window_slice(at, len)?)));
        match found {
            Some((len, slab)) => {
                slabs.push(slab);
                at += len.next_multiple_of(STEP);
            }
            None => at += STEP,
        }
    }
    slabs
}

/// Fills a whole slab with words of `next`, control blocks and signal lines included.
pub fn flood(slab: &SharedSlice, mut next: impl FnMut() -> u64) {
    for at in (0..slab.len()).step_by(8) {
        slab.atomic_u64(at).unwrap().store(next(), Ordering::Relaxed);
    }
}
