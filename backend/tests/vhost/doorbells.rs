// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Doorbells: front ends with and without them, and their order.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;

use virtio_ism_abi::command::{BACKING_WINDOW, Op};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Status};
use zerocopy::IntoBytes;

use crate::front_end::{FrontEnd, Maps, Place, QUIET, TIMEOUT, Wish, register_request};

const DMB: u32 = 64 << 10;

/// A doorbell handed over by the back end.
#[derive(Clone, Debug)]
pub(crate) struct HandedDoorbell {
    /// Number of the slab.
    pub(crate) slab: u64,
    /// `true`: to ring; `false`: to wait for.
    pub(crate) rings: bool,
    pub(crate) fd: Arc<File>,
}

/// A driver taking doorbells, like a process.
fn greet(place: &Place, name: &str, maps: Maps) -> (FrontEnd, Gid) {
    let wish = Wish::default();
    let features = wish.features | Features::DOORBELL.bits();
    let mut front_end = FrontEnd::connect_with(&place.path(name), Wish { maps, features, ..wish });
    let gid = front_end.hello();
    (front_end, gid)
}

/// An owner and a user with these reactions to their doorbells.
fn pair(place: &Place, owner: Maps, user: Maps) -> [(FrontEnd, Gid); 2] {
    [greet(place, "a", owner), greet(place, "b", user)]
}

/// Makes a slab of the owner, attached by the user. Returns the slab's number at each of them.
fn share(owner: &mut (FrontEnd, Gid), user: &mut (FrontEnd, Gid), idx: u32) -> [u64; 2] {
    let dmb = owner.0.register(user.1, idx, DMB, BACKING_WINDOW);
    assert!(user.0.doorbells().iter().all(|doorbell| !doorbell.rings || idx > 1));
    let attached = user.0.attach(dmb.token.get());
    [dmb.slab_id.get().into(), attached.slab_id.get().into()]
}

#[test]
fn the_owner_gets_the_doorbell_of_a_slab_to_wait_for_and_then_the_user_to_ring() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let [mut a, mut b] = pair(&place, Maps::Yes, Maps::Yes);
    let [at_owner, at_user] = share(&mut a, &mut b, 1);
    let [mine, theirs] = [a.0.doorbells(), b.0.doorbells()];
    let of =
        |all: &[HandedDoorbell]| all.iter().map(|one| (one.slab, one.rings)).collect::<Vec<_>>();
    assert_eq!((of(&mine), of(&theirs)), (vec![(at_owner, false)], vec![(at_user, true)]));
    (&*theirs[0].fd).write_all(&3u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    (&*mine[0].fd).read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 3, "one counter");
    share(&mut a, &mut b, 2);
    assert_eq!((a.0.doorbells().len(), b.0.doorbells().len()), (1, 1), "once per slab");
}

#[test]
fn a_slab_whose_owner_or_user_takes_no_doorbells_has_none_and_kicks_work() {
    let refuses = Maps::RefuseDoorbells;
    for (owner, user) in [(refuses, Maps::Yes), (Maps::Yes, refuses)] {
        let place = Place::new();
        let _daemon = place.daemon(&["a", "b"]);
        let [mut a, mut b] = pair(&place, owner, user);
        share(&mut a, &mut b, 1);
        assert_eq!(b.0.doorbells().is_empty(), owner == refuses);
        let dmb = a.0.register(b.1, 2, DMB, BACKING_WINDOW);
        assert_eq!(b.0.transfer(dmb.token.get(), &[], true), Status::Ok);
        assert!(matches!(a.0.event(TIMEOUT), Some(Event::SlabWake(_))));
        assert!(a.0.event(QUIET).is_none());
    }
    for without in [0, 1] {
        let place = Place::new();
        let _daemon = place.daemon(&["a", "b"]);
        let [mut a, mut b] = [0, 1].map(|at| {
            let name = ["a", "b"][at];
            match at == without {
                true => FrontEnd::greet(&place.path(name)),
                false => greet(&place, name, Maps::Yes),
            }
        });
        share(&mut a, &mut b, 1);
        assert!(a.0.doorbells().is_empty() && b.0.doorbells().is_empty());
    }
}

#[test]
fn a_front_end_that_does_not_answer_for_a_doorbell_is_dropped_alone() {
    let place = Place::new();
    let _daemon = place.daemon(&["a", "b"]);
    let [mut a, mut b] = pair(&place, Maps::SilentForDoorbells, Maps::Yes);
    let request = register_request(b.1, 1, DMB, BACKING_WINDOW);
    a.0.send_command(Op::Register, request.as_bytes());
    b.0.register(b.1, 1, DMB, BACKING_WINDOW);
    a.0.wait_cut();
    b.0.register(b.1, 2, DMB, BACKING_WINDOW);
}
